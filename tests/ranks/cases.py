"""Helpers that the rank tests share: configs, a fixed batch of episodes, a small random model, and one step on it."""

import dataclasses
import os
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from spmdrl.config.presets import with_preset
from spmdrl.config.schema import Config
from spmdrl.data.distribute import assign_updates, balance
from spmdrl.data.episode import Episode, episode_of, prompt_segment
from spmdrl.data.microbatch import work_of
from spmdrl.data.pack import from_episodes
from spmdrl.data.step_batch import ReplayBuffer
from spmdrl.policy.fsdp.policy import FsdpPolicy
from spmdrl.policy.models import Models
from spmdrl.rl.compose import compose
from spmdrl.rl.score import score
from spmdrl.rl.update import update
from spmdrl.spmd.exchange import all_gather_rows, all_reduce
from spmdrl.spmd.peers import Peers
from spmdrl.spmd.seeds import generator_for, seed_for
from spmdrl.weights.reshard import Entry

VOCAB = 47
HORIZON = PROMPT = 16


def config(**sections) -> Config:
    """Config with changed values in some sections: `config(run={"seed": 1})`; a preset in `algo` comes first."""
    base = {
        "model": {"dtype": "float32"},
        "rollout": {"engine": "hf", "max_new_tokens": HORIZON},
        "optimizer": {"lr": 1e-2, "clip_grad_norm": 0.0},
        # Qwen2's norms go through float32, where a sum over samples rounds in another order: see test_shared_prompts.
        "policy": {"share_prompts": False},
    }
    for name, values in sections.items():
        base[name] = base.get(name, {}) | values
    cfg = with_preset(Config(), base.get("algo", {}).get("preset", "grpo"))
    return dataclasses.replace(cfg, **{n: dataclasses.replace(getattr(cfg, n), **v) for n, v in base.items()})


def small_model(folder: Path, seed: int = 0, scalar: bool = False, **changes) -> str:
    """A random Qwen2 of 16,000 parameters as a HF folder; weights large enough that its logits differ.

    scalar: a critic or reward model, whose values differ too.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    values = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    config = Qwen2Config(**values | ({"num_labels": 1} if scalar else {}) | changes)
    model = (Qwen2ForSequenceClassification if scalar else Qwen2ForCausalLM)(config).double()
    torch.set_rng_state(state)
    model.save_pretrained(folder)
    return str(folder)


def push_folder(engine, folder: str | Path, version: int = 0) -> dict[str, torch.Tensor]:
    """Gives an engine of one rank the weights of a HF folder, as a push would; returns them by name."""
    found = [load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))]
    tensors = {name: x for some in found for name, x in some.items()}
    engine.needs([Entry(name, tuple(x.shape), x.dtype) for name, x in tensors.items()])
    engine.load([{name: x} for name, x in tensors.items()], version)
    return tensors


def synthetic_batch(prompts: int = 4, samples: int = 3) -> list[Episode]:
    """Random tokens, ragged lengths, groups with and without a difference in reward, gaps in the loss mask.

    17 to 31 tokens each, so that with a budget of 31 every sequence is alone.
    """
    out = []
    for position in range(prompts):
        rng = generator_for(11, position)
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT)]
        for sample in range(samples):
            reply = [rng.randrange(VOCAB) for _ in range(min(PROMPT - 1, 1 + int(rng.expovariate(0.2))))]
            mask = torch.tensor([False] * len(prompt) + [True] * len(reply))
            if len(reply) > 8:
                mask[len(prompt) + 3 : len(prompt) + 6] = False  # what a tool said
            logp = torch.tensor([-rng.uniform(2.0, 5.0) for _ in mask]) * mask
            # Every third group agrees: its advantages are exactly zero.
            reward = 0.5 if position % 3 == 2 else float(rng.randrange(3)) / 2
            tokens = torch.tensor(prompt + reply)
            out.append(
                episode_of(
                    prompt=position,
                    sample=sample,
                    position=position,
                    tokens=tokens,
                    mask=mask,
                    rollout_logp=logp,
                    version=0,
                    reward=reward,
                )
            )
    return out


def branching_batch(prompts: int = 4, samples: int = 3) -> list[Episode]:
    """Episodes of several turns: some never branch, others have two to four paths with different rewards in turns.

    A branch begins where the history is shortened, in the middle of a response, or inside the prompt.
    """
    out = []
    for position in range(prompts):
        rng = generator_for(12, position)
        draw = lambda n, rng=rng: [rng.randrange(VOCAB) for _ in range(n)]  # noqa: E731
        prompt = draw(PROMPT)
        for sample in range(samples):
            episode = Episode(position, sample, position, [prompt_segment(prompt)], "stop")

            def respond(most: int, rng=rng, draw=draw, episode=episode) -> None:
                n = 1 + rng.randrange(most)
                episode.add_sampled(draw(n), [-rng.uniform(2.0, 5.0) for _ in range(n)], 0)
                episode.add_reward(rng.randrange(3) / 4)

            respond(9)
            episode.add_observed(draw(3))
            respond(5)
            kinds = (position + sample) % 4
            if kinds:
                # The first response is left out of the history.
                episode.fork([*prompt, *draw(2)])
                respond(7)
            if kinds > 1:
                episode.add_observed(draw(2), after=episode.cut(PROMPT + 2))
                respond(3)
            if kinds > 2:
                episode.fork([*prompt[: PROMPT // 2], *draw(5)])
                respond(4)
            # Every third group agrees on the outcome.
            final = 0.5 - episode.turn_rewards if position % 3 == 2 else rng.randrange(3) / 2
            episode.reward = episode.turn_rewards + final
            out.append(episode)
    return out


@contextmanager
def float64_softmax():
    """Takes softmax in float64: Hugging Face's eager attention takes it in float32 whatever the model's type."""
    plain = torch.nn.functional.softmax

    def softmax(x, dim=None, _stacklevel=3, dtype=None):
        # Scores are [B, H, L, L]; a router's logits are not, and stay as they are.
        return plain(x, dim=dim, dtype=None if x.dtype == torch.float64 and x.dim() == 4 else dtype)

    torch.nn.functional.softmax = softmax
    try:
        yield
    finally:
        torch.nn.functional.softmax = plain


def build_policy(cfg: Config, world, trainable: bool = True) -> FsdpPolicy:
    """Builds a policy, or with trainable=False a frozen model."""
    return FsdpPolicy(cfg, world, 100, trainable)


def group_of(world):
    """Returns the group that a run gives its collectives."""
    return world.data_group


def packed(
    cfg: Config, world, everyone: list[Episode], experts_width: int = 0, turn_rewards: bool = False, make=from_episodes
):
    """Packs this rank's balanced share of episodes that engines made; the rest as in `from_episodes`.

    make: makes the batch of this rank's episodes, with the arguments of `from_episodes`.
    """
    mine = [t for t in everyone if t.position % world.size == world.rank]
    parts = tuple(sorted({name for t in everyone for name in t.parts}))
    batch = make(mine, parts, experts_width, **({"turn_rewards": True} if turn_rewards else {}))
    rows = zip(*(batch.seq[k].tolist() for k in ("prompt", "position", "sample")), strict=True)
    batch.seq["seed"] = torch.tensor([seed_for(0, 0, *row, 1) for row in rows], dtype=torch.int64)
    batch.seq["work"], common = work_of(batch, cfg.policy.share_prompts)
    batch.seq |= {"common": common} if cfg.policy.share_prompts else {}
    prompts = max(t.position for t in everyone) + 1
    batch = ReplayBuffer(cfg.filter, prompts).mix(batch, 0, 0, Peers(world.group, world.device))
    order = list(range(prompts))
    generator_for(3).shuffle(order)
    return balance(assign_updates(batch, cfg.algo.updates_per_step, prompts, order), world)


def scored_batch(cfg: Config, world, models: Models, everyone: list[Episode], batch=None):
    """Returns (algorithm, batch with every column of the update, metrics); batch: one that is packed already."""
    algo = compose(cfg)
    batch = packed(cfg, world, everyone) if batch is None else batch
    stats = score(batch, models, algo, cfg, world.data_peers)
    return algo, algo.advantages(batch, world.data_peers), stats


def update_models(cfg: Config, world, models: Models, everyone: list[Episode], batch=None) -> dict[str, float]:
    """Makes one step as `train.py` does; returns the reduced metrics."""
    algo, batch, stats = scored_batch(cfg, world, models, everyone, batch)
    done = update(batch, models, algo, cfg, cfg.critic.warmup_steps, world.data_peers)
    done.merge(stats)
    return done.reduce(lambda x, op: all_reduce(x, op, group_of(world)), world.device)


def update_once(cfg: Config, world, policy, reference, everyone: list[Episode]) -> dict[str, float]:
    """Calls `update_models` for an algorithm that needs no other model."""
    return update_models(cfg, world, Models(policy, reference), everyone)


def whole(named: list[tuple[str, DTensor]]) -> dict[str, torch.Tensor]:
    """Gathers whole tensors from shards along dim 0, as `full_tensor` does one by one. Collective, once for all."""
    mesh = named[0][1].device_mesh
    shards = mesh.size(mesh.ndim - 1)
    mine = torch.cat([x.detach().to_local().flatten() for _, x in named])
    rows = all_gather_rows(mine[:, None], mesh.get_group(mesh.ndim - 1))
    # As torch.chunk cuts: equal ranges of rows, fewer or none for the last ones.
    ranges = [torch.arange(len(x)).chunk(shards) for _, x in named]
    sizes = [
        [len(r[i]) * x.numel() // len(x) if i < len(r) else 0 for r, (_, x) in zip(ranges, named, strict=True)]
        for i in range(shards)
    ]
    parts = [part[:, 0].split(size) for part, size in zip(rows, sizes, strict=True)]
    return {name: torch.cat(own).view(x.shape) for (name, x), *own in zip(named, *parts, strict=True)}


def bytes_on_disk(policy) -> int:
    """Bytes of the files in which a parked policy is kept."""
    return sum(os.fstat(each.tape.file.fileno()).st_size for each in policy.away if each.tape)


def full_weights(policy) -> dict[str, torch.Tensor]:
    """Returns whole parameters by HF name. Collective."""
    return whole(policy.named_weights())


def gradients_of(policy, run) -> list[dict[str, torch.Tensor]]:
    """Returns whole gradients of every optimizer step that `run()` makes. Collective."""
    return gradients_of_all({"": policy}, run)[""]


def gradients_of_all(policies: dict, run) -> dict[str, list[dict[str, torch.Tensor]]]:
    """Returns `gradients_of` each of several models that `run()` trains. Collective."""
    seen = {name: [] for name in policies}

    def look(model):
        seen[model].append(whole([(name, p.grad) for name, p in policies[model].named_weights()]))

    handles = [p.optimizer.register_step_pre_hook(lambda *_, model=n: look(model)) for n, p in policies.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


class Rewind:
    """Rewinds a policy to where it was, with another config: building one anew is what takes the time."""

    def __init__(self, policy: FsdpPolicy):
        self.policy = policy
        self.start = [p.detach().to_local().clone() for _, p in policy.named_weights()]

    def __call__(self, cfg: Config) -> FsdpPolicy:
        """Returns the policy as it was built, under `cfg`."""
        with torch.no_grad():
            for (_, p), start in zip(self.policy.named_weights(), self.start, strict=True):
                p.to_local().copy_(start)
        if self.policy.optimizer:
            self.policy.optimizer.state.clear()
        self.policy.cfg, self.policy.version = cfg, 0
        self.policy.updates_done = self.policy.updates_due = 0
        return self.policy


def relative(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of two sets of tensors, relative to each one's largest entry (or 1/1000 of that of all)."""
    assert a.keys() == b.keys()
    floor = max(x.abs().max().item() for x in a.values()) / 1000
    return max((a[n] - b[n]).abs().max().item() / max(a[n].abs().max().item(), floor) for n in a)
