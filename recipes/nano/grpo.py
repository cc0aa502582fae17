"""GRPO in one file: a language model learns from rewards, with only torch and transformers.

    torchrun --nproc-per-node 2 recipes/nano/grpo.py --run.steps 60

The order of the file is: random numbers, prompts, sampling, rewards and advantages, the loss, the optimizer, and the
loop that calls them. Every rank runs this same program; there is no controller. A rank samples some of a step's
prompts and learns from its own samples. Ranks communicate only to gather weights (FSDP2, `push`) and to sum gradients
and counts (FSDP2, `total`). Samples and updates are the same for any number of ranks, because

- a random number is a hash of seed, step, prompt, sample and position, but not of the rank;
- a loss is a sum divided by counts over all ranks, and gradients are summed over ranks, not averaged;
- the number of collectives does not depend on the data of a rank.

Flags have the same meaning as in `spmdrl.train`, which samples the same tokens and computes the same losses
(`tests/e2e/test_nano.py`). `spmdrl.train` adds fast engines, packing, checkpoints and more.

Suffixes of tensors: B rows, T tokens of a row, V tokens of the vocabulary, n tokens of a response.
"""

import argparse
import json
import math
import os
import random
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, AutoTokenizer

FLAGS = {
    "run.dir": ("runs/nano", "folder for metrics.jsonl, samples_RANK.jsonl and the trained model"),
    "run.steps": (10, "steps: each samples once and takes --algo.updates-per-step optimizer steps"),
    "run.seed": (0, "seed of all draws"),
    "model.path": (str(Path(__file__).parents[2] / "spmdrl/assets/tiny"), "folder of a language model"),
    "data.train": ("", "file with a JSON object in each line: prompt, answer. Empty: the task of reversing letters"),
    "rollout.prompts-per-step": (32, "prompts of a step, over all ranks"),
    "rollout.samples-per-prompt": (8, "responses to each prompt: its group"),
    "rollout.max-new-tokens": (8, "longest response"),
    "rollout.temperature": (1.0, "sampling temperature; log p is taken at the same one everywhere"),
    "algo.updates-per-step": (1, "optimizer steps of a step; each uses an equal share of its prompts"),
    "algo.aggregation": ("seq-mean-token-mean", "reduction of the tokens' losses: this or token-mean"),
    "algo.clip-low": (0.2, "lower bound of the ratio: 1 - this"),
    "algo.clip-high": (0.2, "upper bound of the ratio: 1 + this"),
    "policy.max-tokens-per-microbatch": (8192, "tokens of one forward; changes the memory, not the result"),
    "optimizer.lr": (2e-4, "peak learning rate of AdamW"),
    "optimizer.schedule": ("constant", "learning rate after warm-up: constant, linear or cosine"),
    "optimizer.warmup-steps": (0, "optimizer steps of linear warm-up"),
    "optimizer.clip-grad-norm": (1.0, "largest norm of the gradient"),
}
"""Name -> default, help. In the code the flag `--run.steps` is `cfg.steps`."""


# ── random numbers ───────────────────────────────────────────────────────────
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    """Hash 64 bits by a step of SplitMix64 (https://doi.org/10.1145/2714064.2660195)."""
    x = (x + GOLDEN) % 2**64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
    return x ^ (x >> 31)


def seed_for(*key: int) -> int:
    """Return the seed of a key such as (seed, step, prompt, ...)."""
    state = 0
    for part in key:
        state = mix(state + part)
    return state >> 1


def uniform(seed: int, position: int) -> float:
    """Return the uniform number between 0 and 1 at a position of the seed's stream."""
    return ((mix(seed + position * GOLDEN) >> 12) + 0.5) / 2**52


@lru_cache(4)
def shuffled(count: int, *key: int) -> list[int]:
    """Return 0 .. count - 1 in a random order that depends on the key only."""
    order = list(range(count))
    random.Random(seed_for(*key)).shuffle(order)
    return order


# ── prompts ──────────────────────────────────────────────────────────────────
def read_prompts(file: str, tokenizer) -> list[tuple]:
    """Return tokens and answer of each prompt. Without a file, the task is to answer `abcde=` with `edcba`."""
    if file:
        rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines()]
    else:  # the first 512 words are reserved for evaluation
        codes = random.Random("spmdrl reverse").sample(range(10**5), 512 + 4096)[512:]
        words = ["".join("abcdefghij"[code // 10**i % 10] for i in range(5)) for code in codes]
        rows = [{"prompt": f"{word}=", "answer": word[::-1]} for word in words]
    prompts = []
    for row in rows:
        text, plain = row["prompt"], not (file and tokenizer.chat_template)
        if not plain:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        # A chat template writes all special tokens itself; for plain text the tokenizer must add them.
        prompts.append((tokenizer(text, add_special_tokens=plain).input_ids, str(row["answer"])))
    return prompts


# ── sampling ─────────────────────────────────────────────────────────────────
@dataclass
class Sample:
    """A response to a prompt."""

    index: int  # index of the prompt in the data
    prompt: list[int]
    answer: str
    number: int  # number of the sample in its group
    seed: int
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)  # log p of the tokens under the model that sampled them
    old_logp: torch.Tensor = field(default_factory=torch.Tensor)  # [n], log p under the policy before its first update
    reward: float = 0.0
    advantage: float = 0.0


@torch.inference_mode()
def respond(model, samples: list[Sample], ends: list[int], cfg) -> None:
    """Sample responses token by token with a KV cache. All prompts must have the same length, so nothing is padded."""
    inputs_BT = torch.tensor([sample.prompt for sample in samples], device=model.device)
    cache, live = None, set(range(len(samples)))
    for position in range(cfg.max_new_tokens):
        out = model(input_ids=inputs_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        logp_BV = (out.logits[:, -1] / cfg.temperature).double().log_softmax(-1)
        # Take the token at which the cumulative probability passes the random number. The number depends on the row and
        # the position only, not on the other rows.
        sums_BV = logp_BV.exp().cumsum(-1)
        drawn_B = torch.tensor([uniform(sample.seed, position) for sample in samples], dtype=torch.float64)
        drawn_B1 = drawn_B.to(model.device)[:, None] * sums_BV[:, -1:]
        inputs_BT = torch.searchsorted(sums_BV, drawn_B1, right=True).clamp(max=sums_BV.shape[1] - 1)
        tokens, logp = inputs_BT[:, 0].tolist(), logp_BV.gather(1, inputs_BT)[:, 0].tolist()
        for row in list(live):
            samples[row].tokens.append(tokens[row])
            samples[row].logp.append(logp[row])
            if tokens[row] in ends:
                live.remove(row)  # the row stays in the batch, but its further tokens are ignored
        if not live:
            break


def rollout(model, prompts: list[tuple], positions: list[int], step: int, ends: list[int], cfg) -> list[Sample]:
    """Return samples of the prompts at these positions of the run, whose epochs repeat all prompts in a new order."""
    samples: list[Sample] = []
    for position in positions:
        epoch, place = divmod(position, len(prompts))
        index = shuffled(len(prompts), cfg.seed, 0x0DE4, epoch)[place]
        for number in range(cfg.samples_per_prompt):
            # The last part of the key is the position of the turn in a conversation; this file has single turns only.
            seed = seed_for(cfg.seed, step, index, position, number, 0)
            samples.append(Sample(index, *prompts[index], number, seed))
    for length in sorted({len(sample.prompt) for sample in samples}):
        respond(model, [sample for sample in samples if len(sample.prompt) == length], ends, cfg)
    return samples


# ── rewards and advantages ───────────────────────────────────────────────────
def chunks(samples: list[Sample], size: int) -> list[list[Sample]]:
    """Return the samples, `size` at a time."""
    return [samples[begin : begin + size] for begin in range(0, len(samples), size)]


def grade(samples: list[Sample], tokenizer, size: int) -> None:
    """Set the reward of each response (1 if it equals the answer, else 0) and its advantage within its group.

    GRPO (https://arxiv.org/abs/2402.03300) needs no value model: an advantage is the distance from the group's mean in
    standard deviations. If all rewards of a group are equal, their advantages are 0.
    """
    for sample in samples:
        text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
        sample.reward = float(text.strip() == sample.answer.strip())
    for group in chunks(samples, size):
        reward_B = torch.tensor([sample.reward for sample in group], dtype=torch.float64)
        advantage_B = (reward_B - reward_B.mean()) / (reward_B.std() + 1e-6)
        for sample, advantage in zip(group, advantage_B.tolist(), strict=True):
            sample.advantage = advantage


# ── the loss ─────────────────────────────────────────────────────────────────
def logprobs(policy, samples: list[Sample], temperature: float) -> list[torch.Tensor]:
    """Return log p [n] of each sample's tokens. Collective: FSDP2 gathers weights; all ranks call it equally often."""
    rows = [sample.prompt + sample.tokens for sample in samples]
    longest = max(map(len, rows))
    # Padding at the end of short rows has no effect: attention is causal.
    ids_BT = torch.tensor([row + [0] * (longest - len(row)) for row in rows], device=policy.device)
    logp_BTV = (policy(input_ids=ids_BT, use_cache=False).logits / temperature).log_softmax(-1)
    found = []
    for row, sample in enumerate(samples):
        begin, end = len(sample.prompt), len(rows[row])  # the output at a token predicts the next one
        found.append(logp_BTV[row, begin - 1 : end - 1].gather(1, ids_BT[row, begin:end, None])[:, 0])
    return found


def clipped_loss(logp_n: torch.Tensor, sample: Sample, cfg) -> tuple[torch.Tensor, torch.Tensor]:
    """Return PPO's loss [n] (https://arxiv.org/abs/1707.06347), and bool [n], True where the clip decides the loss.

    The ratio is the probability of a token divided by its probability before the first update. Minimizing the loss
    raises it if the advantage is positive, else lowers it. Beyond the clip the loss is constant, to limit the change.
    """
    ratio_n = (logp_n - sample.old_logp).exp()
    loss_n = -sample.advantage * ratio_n
    bound_n = -sample.advantage * ratio_n.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    return torch.maximum(loss_n, bound_n), bound_n > loss_n


def total(*numbers: float) -> list[float]:
    """Return the sums of numbers over all ranks. Collective."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def learning_rate(update: int, cfg) -> float:
    """Return the learning rate of an optimizer step, counted from 0."""
    updates = cfg.steps * cfg.updates_per_step
    if update < cfg.warmup_steps:
        return cfg.lr * (update + 1) / cfg.warmup_steps
    done = 1 - (updates - update) / max(1, updates - cfg.warmup_steps)
    return cfg.lr * {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[cfg.schedule]


def take_update(policy, optimizer, samples: list[Sample], rows: int, lr: float, cfg) -> tuple[float, int, float]:
    """Take one optimizer step on the samples of all ranks, with `rows` samples in a forward. Collective.

    Returns this rank's parts of the loss and of the number of clipped tokens, and the norm of the full gradient.
    """
    # Counts over all ranks are known before the first forward. With losses divided by them, gradients are plain sums
    # over samples, so the rank and the micro-batch of a sample make no difference.
    count, tokens = total(len(samples), sum(len(sample.tokens) for sample in samples))
    micros, losses, clipped = chunks(samples, rows), 0.0, 0
    for micro in micros:
        policy.set_requires_gradient_sync(micro is micros[-1])  # sum gradients over ranks once, at the end
        loss = torch.zeros((), dtype=torch.float64, device=policy.device)
        for sample, logp_n in zip(micro, logprobs(policy, micro, cfg.temperature), strict=True):
            loss_n, clipped_n = clipped_loss(logp_n, sample, cfg)
            weight = 1 / tokens if cfg.aggregation == "token-mean" else 1 / (count * len(sample.tokens))
            loss, clipped = loss + loss_n.double().sum() * weight, clipped + int(clipped_n.sum())
        loss.backward()
        losses += loss.item()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.clip_grad_norm).full_tensor().item()
    for group in optimizer.param_groups:
        group["lr"] = lr
    if norm > 0:  # without a gradient (equal rewards in every group) momentum must not move the weights
        optimizer.step()
    optimizer.zero_grad()
    return losses, clipped, norm


# ── the loop ─────────────────────────────────────────────────────────────────
def shard(model) -> None:
    """Divide weights, gradients and moments over all ranks (FSDP2)."""
    for part in [*model.model.layers, model]:
        fully_shard(part)
        part.set_gradient_divide_factor(1.0)  # FSDP2 averages gradients unless this is 1
        part.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def push(policy, sampler) -> None:
    """Copy the policy's weights into the unsharded model with which each rank samples. Collective."""
    for mine, weight in zip(policy.parameters(), sampler.parameters(), strict=True):
        weight.copy_(mine.full_tensor())


def summary(samples: list[Sample], updates: list[tuple[float, int, float]]) -> dict[str, float]:
    """Return the numbers of a step, over all ranks. Collective."""
    losses, clipped, norms = map(sum, zip(*updates, strict=True))
    # log p of policy and sampler should differ only by rounding.
    distance = sum(float((sample.old_logp.cpu() - torch.tensor(sample.logp)).abs().sum()) for sample in samples)
    tokens, rewards = sum(len(sample.tokens) for sample in samples), sum(sample.reward for sample in samples)
    count, tokens, rewards, loss, clipped, distance = total(len(samples), tokens, rewards, losses, clipped, distance)
    found = {"reward/mean": rewards / count, "loss": loss / len(updates), "grad_norm": norms / len(updates)}
    found |= {"clip_fraction": clipped / tokens, "response_length/mean": tokens / count}
    return found | {"logp_diff/mean": distance / tokens}


def train(cfg, device: torch.device) -> None:
    """Run all steps: sample, grade, update."""
    rank, ranks, share = dist.get_rank(), dist.get_world_size(), cfg.prompts_per_step // cfg.updates_per_step
    if cfg.prompts_per_step % (cfg.updates_per_step * ranks) or cfg.samples_per_prompt < 2:
        raise SystemExit("--rollout.samples-per-prompt must be above 1, prompts-per-step a multiple of updates x ranks")
    tokenizer = AutoTokenizer.from_pretrained(cfg.path)
    how = {"dtype": torch.float32, "use_safetensors": True}  # other formats can contain pickles, which run code
    sampler, policy = (AutoModelForCausalLM.from_pretrained(cfg.path, **how).eval().to(device) for _ in range(2))
    shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    named = sampler.generation_config.eos_token_id
    ends = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    prompts = read_prompts(cfg.train, tokenizer)
    rows = max(1, cfg.max_tokens_per_microbatch // (max(len(tokens) for tokens, _ in prompts) + cfg.max_new_tokens))
    (folder := Path(cfg.dir)).mkdir(parents=True, exist_ok=True)
    for step in range(cfg.steps):
        push(policy, sampler)
        # The prompts of the step are shuffled and divided into a share for each update. Each rank samples and learns
        # from an equal part of each share.
        order = shuffled(cfg.prompts_per_step, cfg.seed, step, 1)
        mine = [place for begin in range(0, len(order), share) for place in order[begin : begin + share][rank::ranks]]
        positions = [step * cfg.prompts_per_step + place for place in mine]
        samples = rollout(sampler, prompts, positions, step, ends, cfg)
        grade(samples, tokenizer, cfg.samples_per_prompt)
        with torch.no_grad():
            for micro in chunks(samples, rows):
                for sample, logp_n in zip(micro, logprobs(policy, micro, cfg.temperature), strict=True):
                    sample.old_logp = logp_n
        updates = []
        for i, part in enumerate(chunks(samples, len(samples) // cfg.updates_per_step)):
            lr = learning_rate(step * cfg.updates_per_step + i, cfg)
            updates.append(take_update(policy, optimizer, part, rows, lr, cfg))
        numbers = {"step": step + 1} | summary(samples, updates)
        with open(folder / f"samples_{rank}.jsonl", "a" if step else "w") as file:
            for sample in samples:
                row = {"step": step + 1, "index": sample.index, "sample": sample.number, "reward": sample.reward}
                text = tokenizer.decode(sample.tokens, skip_special_tokens=True)
                file.write(json.dumps(row | {"completion": text}) + "\n")
        if rank == 0:
            with open(folder / "metrics.jsonl", "a" if step else "w") as file:
                file.write(json.dumps(numbers) + "\n")
            print("  ".join(f"{name} {value:.4g}" for name, value in numbers.items()), flush=True)
    push(policy, sampler)
    for part in (sampler, tokenizer) if rank == 0 else ():
        part.save_pretrained(folder / "model")


def main() -> None:
    """Read the flags, join the other ranks, and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, about) in FLAGS.items():
        short = name.split(".")[1].replace("-", "_")
        parser.add_argument(f"--{name}", dest=short, type=type(default), default=default, help=about)
    cfg = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group()  # gloo for tensors on the host, NCCL for those on GPUs
    train(cfg, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
