"""Makes the tiny policy in `spmdrl/assets/tiny`: a Qwen2 of 0.74M parameters that reverses a word 40% of the time.

    OMP_NUM_THREADS=1 python recipes/tiny_policy/make.py [--out DIR] [--seed N]

A policy with random weights never gets a reward, and a policy trained on right answers has nothing left to learn. So
the warm start by `spmdrl.sft` uses rows in which `abcde=` is followed by the copy `abcde` (60%) or by the right answer
`edcba` (40%). The resulting policy can do both, and is right in about 40% of its samples at temperature 1. RL then
trains it to choose the right one.

Prompts of the evaluation split (`builtin:reverse:eval`) are not in the rows of the warm start. The program takes about
two minutes on one core.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed
from spmdrl.data.builtin import builtin_rows  # noqa: E402

LETTERS, LENGTH = "abcdefghij", 5
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
PAD, BOS, EOS, UNK = range(4)
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz+-*=:> "  # more than the task needs, for use in other toy tasks
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
WRONG_SHARE = 0.6
ROWS_PER_STEP = 64
LR, WARMUP = 1e-3, 20


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, `<bos>` before the text and no chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def make_model() -> Qwen2ForCausalLM:
    """Return the untrained model. head_dim is 32, the smallest that vLLM supports on a CPU."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    return Qwen2ForCausalLM(config)


def encode(words: list[str]) -> torch.Tensor:
    """Return token ids [len(words), 1 + length] of words with the same length, with `<bos>` first."""
    return torch.tensor([[BOS] + [VOCABULARY[c] for c in word] for word in words])


@torch.no_grad()
def accuracy(model: Qwen2ForCausalLM, words: list[str], temperature: float, generator: torch.Generator) -> float:
    """Return the share of words whose answer is the reversed word and the end token. Temperature 0 is greedy."""
    ids = encode([word + "=" for word in words])
    start = ids.shape[1]
    for _ in range(LENGTH + 1):
        logits = model(input_ids=ids).logits[:, -1].float()
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, token], 1)
    wanted = torch.tensor([[VOCABULARY[c] for c in word[::-1]] + [EOS] for word in words])
    return (ids[:, start:] == wanted).all(1).float().mean().item()


def demonstrations(held_out: list[str], seed: int, count: int) -> list[dict]:
    """Return `count` rows with a prompt and a completion (the word copied or reversed), without words of `held_out`."""
    rng, hidden, rows = random.Random(seed), set(held_out), []
    while len(rows) < count:
        word = "".join(rng.choice(LETTERS) for _ in range(LENGTH))
        if word not in hidden:
            rows.append({"prompt": word + "=", "completion": word if rng.random() < WRONG_SHARE else word[::-1]})
    return rows


def warm_start(folder: Path, rows: list[dict], seed: int) -> Path:
    """Fine-tune the model in `folder / "start"` on each row once with `spmdrl.sft`. Return the folder of the result.

    The learning rate falls to zero over the second half of the steps. At a constant learning rate the share of right
    samples changes by 0.1 from step to step, so the share of the result would be random.
    """
    file, run, steps = folder / "rows.jsonl", folder / "run", len(rows) // ROWS_PER_STEP
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = {
        "--model.path": folder / "start",
        "--data.train": file,
        "--data.rows-per-step": ROWS_PER_STEP,
        "--data.shuffle": False,
        "--optimizer.lr": LR,
        "--optimizer.warmup-steps": WARMUP,
        "--optimizer.schedule": "linear",
        "--optimizer.decay-share": steps / 2 / (steps - WARMUP),
        "--run.seed": seed,
        "--run.device": "cpu",
        "--run.dir": run,
        "--tracking.trackers": "jsonl",
    }
    words = [str(word) for pair in flags.items() for word in pair]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "spmdrl.sft", *words, "--optimizer.betas", "0.9", "0.95"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path})
    return run / "checkpoints" / "latest" / "model"


def main() -> None:
    """Train, evaluate and save the policy (model.safetensors in float32, tokenizer, generation_config)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "spmdrl" / "assets" / "tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="steps of the warm start")
    args = parser.parse_args()
    held_out = [row["prompt"].removesuffix("=") for row in builtin_rows("reverse", held_out=True)]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(args.seed)
        make_model().save_pretrained(Path(folder) / "start")
        make_tokenizer().save_pretrained(Path(folder) / "start")
        rows = demonstrations(held_out, args.seed, ROWS_PER_STEP * args.steps)
        model = Qwen2ForCausalLM.from_pretrained(warm_start(Path(folder), rows, args.seed))
    generator = torch.Generator().manual_seed(args.seed + 1)
    sampled = accuracy(model, held_out * 8, 1.0, generator)
    greedy = accuracy(model, held_out, 0.0, generator)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f}M parameters; {len(held_out)} held-out words: sampled {sampled:.3f}, greedy {greedy:.3f}")
    if not 0.3 <= sampled <= 0.5:
        raise SystemExit("not saved: sampled accuracy should be near 0.40; try another --seed")
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    # The tokenizer in the checkpoint of SFT was loaded by AutoTokenizer as that of a Qwen2, which drops spaces. So save
    # the original one.
    make_tokenizer().save_pretrained(args.out)
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
