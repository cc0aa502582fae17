"""Compares forward and backward passes of a group with its prompt run once and with its prompt run for each sample.

    python benchmarks/shared_prompt.py [--quick] [--json FILE] [--model FOLDER_OR_NAME] [--dtype float32]

It runs in one process, on one thread of a CPU (or on the whole GPU if there is one), on groups of 8 and 16 samples with
prompt to response lengths of 4:1, 1:1 and 1:4. Both sides run the same sequences in the same call, in turns, and their
medians are compared. The default model is a random Llama of 12 million parameters, which is large enough that its
layers, not Python, take the time.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402 (threads first)

from spmdrl.hub.build import build_model  # noqa: E402
from spmdrl.hub.resolve import resolve  # noqa: E402
from spmdrl.policy.attention import packed as attention  # noqa: E402
from spmdrl.policy.heads import PackedLM  # noqa: E402

RATIOS = {"4:1": (256, 64), "1:1": (128, 128), "1:4": (64, 256)}
"""Numbers of prompt and response tokens by their ratio."""
GOALS = {"4:1": 2.0, "1:1": 1.4, "1:4": 1.1}
GROUPS = (8, 16)


def random_llama(folder: Path) -> Path:
    """Write a random Llama with 12 million parameters and return its folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=10,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ).save_pretrained(folder)
    return folder


def one_pass(model: PackedLM, tokens, lengths, mask, sync) -> float:
    """Return the seconds of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    began = time.perf_counter()
    logp, entropy = model(tokens, lengths, mask, 1.0)
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
        first, second = (sides[share](tokens, lengths, mask, 1.0)[0] for share in (False, True))
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="groups of 8 alone, once")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", default="", help="as --model.path; empty: a random Llama")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = resolve(args.model) if args.model else random_llama(Path(scratch))
        hf = build_model(folder, args.dtype, False, attention.register()).to(device)
    rows = []
    print(f"{'group':>5} {'ratio':>5} {'prompt':>6} {'response':>8} {'plain s':>8} {'shared s':>8} {'gain':>6}")
    for group in GROUPS[:1] if args.quick else GROUPS:
        for name, (prompt, response) in RATIOS.items():
            row = {"name": name} | measure(hf, group, prompt, response, 1 if args.quick else 3, device)
            rows.append(row)
            print(
                f"{group:5} {name:>5} {prompt:6} {response:8} {row['plain_s']:8.3f} {row['shared_s']:8.3f} "
                f"{row['ratio']:6.2f}"
            )
    for row in rows:
        goal = GOALS[row["name"]]
        verdict = "ok" if row["ratio"] >= goal else "miss"
        print(f"target shared_prompt_{row['group']}_{row['name']} {row['ratio']:.2f} {goal} {verdict}")
    if args.json:
        machine = {"machine": platform.processor() or platform.machine(), "device": str(device)}
        versions = {"torch": torch.__version__, "python": platform.python_version(), "dtype": args.dtype}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        date = time.strftime("%Y-%m-%d")
        args.json.write_text(json.dumps(machine | versions | {"date": date, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
