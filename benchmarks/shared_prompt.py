"""Compares forward and backward passes of a group with its prompt run once and with its prompt run for each sample.

    python benchmarks/shared_prompt.py [--quick] [--json FILE] [--model FOLDER_OR_NAME] [--dtype float32]

It runs in one process on groups of 8 and 16 samples with prompt to response lengths of 4:1, 1:1 and 1:4. Both sides run
the same sequences in the same call, in turns, and their medians are compared. On one thread of a CPU, the default model
is a random Llama of 12 million parameters in float32, and a sample has 256 or 320 tokens. On a GPU it is a random Qwen2
with six layers of Qwen2.5-7B's shapes in bfloat16, and a sample has 1,024 or 1,280 tokens. At these sizes the products,
not Python and launches, take the time: a GPU multiplies 30 to 240 TFLOP in a pass.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402 (threads first)

from benchmarks._about import available, measured_on, save  # noqa: E402
from benchmarks._models import published  # noqa: E402
from spmdrl.hub.build import DTYPES, build_model  # noqa: E402
from spmdrl.hub.resolve import resolve  # noqa: E402
from spmdrl.policy.attention import packed as attention  # noqa: E402
from spmdrl.policy.heads import PackedLM  # noqa: E402

RATIOS = {"4:1": (256, 64), "1:1": (128, 128), "1:4": (64, 256)}
"""Numbers of prompt and response tokens on a CPU, by their ratio."""
LONGER = 4
"""Factor by which prompts and responses are longer on a GPU."""
GOALS = {"4:1": 2.0, "1:1": 1.4, "1:4": 1.1}
GROUPS = (8, 16)


def random_model(device: str, dtype: str) -> Any:
    """Return the random model of a type of device, made on it in its dtype, because files of it would take seconds."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    if device == "cuda":
        config = published("Qwen2.5-7B", num_hidden_layers=6, tie_word_embeddings=True)
    else:
        sizes: dict = dict(vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=10)
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=attention.register()
        ).eval()


def one_pass(model: PackedLM, tokens, lengths, mask, sync) -> float:
    """Return the seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    logp, entropy = model(model.plan(tokens, lengths, mask), 1.0)
    (logp.sum() + entropy.sum()).backward()
    sync()
    return time.perf_counter() - began


def measure(hf, group: int, prompt: int, response: int, repeats: int, device: torch.device) -> dict:
    """Return the median seconds of both sides, and the maximum difference of their logp."""
    rng = torch.Generator().manual_seed(group + prompt)
    vocab = hf.config.vocab_size
    head = torch.randint(vocab, (prompt,), generator=rng)
    tokens = torch.cat([torch.cat([head, torch.randint(vocab, (response,), generator=rng)]) for _ in range(group)])
    lengths = torch.full((group,), prompt + response)
    mask = (torch.arange(len(tokens)) % (prompt + response)) >= prompt
    sync = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    sides = {share: PackedLM(hf, share=share).train() for share in (False, True)}
    with torch.no_grad():
        first, second = (side(side.plan(tokens, lengths, mask), 1.0)[0] for side in sides.values())
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(repeats + 1):
        for share, model in sides.items():
            took = one_pass(model, tokens, lengths, mask, sync)
            if i:
                seconds[share].append(took)
    plain, shared = (statistics.median(seconds[share]) for share in (False, True))
    return {
        "group": group,
        "prompt": prompt,
        "response": response,
        "plain_s": plain,
        "shared_s": shared,
        "ratio": plain / shared,
        "logp_difference": (first - second).abs().max().item(),
    }


def main() -> None:
    """Print a table and one line per target; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="groups of 8 alone, once (on a GPU three times)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="", help="as --model.path; empty: a random model")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")
    args = parser.parse_args()
    kind = available()
    dtype = args.dtype or ("bfloat16" if kind == "cuda" else "float32")
    device, about = torch.device(kind), measured_on(kind, args.json) | {"dtype": dtype, "model": args.model or "random"}
    if kind == "cpu":
        torch.set_num_threads(1)
    if args.model:
        hf = build_model(resolve(args.model), DTYPES[dtype], False, attention.register()).to(device)
    else:
        hf = random_model(kind, dtype)
    longer, repeats = (LONGER, 3) if kind == "cuda" else (1, 1 if args.quick else 3)
    rows = []
    print(f"on {about['device']}, {dtype}")
    print(f"{'group':>5} {'ratio':>5} {'prompt':>6} {'response':>8} {'plain s':>8} {'shared s':>8} {'gain':>6}")
    for group in GROUPS[:1] if args.quick else GROUPS:
        for name, sizes in RATIOS.items():
            prompt, response = (longer * n for n in sizes)
            row = {"name": name} | measure(hf, group, prompt, response, repeats, device)
            rows.append(row)
            save(args.json, about, rows=rows)
            print(
                f"{group:5} {name:>5} {prompt:6} {response:8} {row['plain_s']:8.3f} {row['shared_s']:8.3f} "
                f"{row['ratio']:6.2f}",
                flush=True,
            )
    for row in rows:
        goal = GOALS[row["name"]]
        verdict = "ok" if row["ratio"] >= goal else "miss"
        print(f"target shared_prompt_{row['group']}_{row['name']} {row['ratio']:.2f} {goal} {verdict}")


if __name__ == "__main__":
    main()
