"""Measures the peak memory of a training step at V = 151936 with all logits, linear_logprob and chunked_loss.

    python benchmarks/kernels/step_memory.py [--quick] [--json FILE]

A random Qwen2 (D=128, 2 layers; on a GPU D=1024, 8 layers, bfloat16) takes one AdamW step on a policy-gradient loss
with an entropy bonus. Each variant runs in a separate process. The peak is the memory that the step adds to the model
and its inputs, including gradients and optimizer state. The script needs transformers.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks._about import available, measured_on, save  # noqa: E402

VOCAB = 151_936
SIZES = {"cpu": (256, 512, 1024), "cuda": (8192, 4096, 16384)}
"""Tokens of a step. On a GPU with 256 tokens, weights and moments take nearly all memory in every variant."""
WAYS = {"all logits": "before", "linear_logprob": "after", "chunked_loss": "after, loss inside the chunk"}


def one(way: str, tokens: int) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from spmdrl_kernels import chunked_loss, linear_logprob

    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    D, layers, device = (1024, 8, "cuda") if gpu else (128, 2, "cpu")
    sizes = dict(hidden_size=D, intermediate_size=2 * D, num_hidden_layers=layers, num_attention_heads=4)
    config = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=True)
    model = Qwen2ForCausalLM(config).to(device, torch.bfloat16 if gpu else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    ids, advantage = torch.randint(VOCAB, (1, tokens), device=device), torch.randn(tokens, device=device)

    def loss_of(logp, entropy, x):
        return -(x["advantage"] * logp + 0.01 * entropy) / tokens

    def step() -> float:
        targets, inputs = ids[0].roll(-1), {"advantage": advantage}
        weight = model.get_output_embeddings().weight
        if way == "all logits":
            log_p = torch.log_softmax(model(ids).logits[0].float(), -1)
            logp, entropy = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
            loss = loss_of(logp, entropy, inputs).sum()
        elif way == "linear_logprob":
            hidden = model.base_model(ids).last_hidden_state[0]
            loss = loss_of(*linear_logprob(hidden, weight, targets), inputs).sum()
        else:
            hidden = model.base_model(ids).last_hidden_state[0]
            loss, _ = chunked_loss(hidden, weight, targets, loss_of, inputs)
        loss.backward()
        optimizer.step()
        return loss.item()

    if gpu:
        before = torch.cuda.memory_allocated()
        loss = step()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loss = step()
        peak = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    row = {"way": way, "tokens": tokens, "peak_mib": peak / 2**20, "loss": loss, "device": device}
    print(json.dumps(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.one[0], int(args.one[1]))
        return
    device = available()
    about, rows = measured_on(device, args.json), []
    counts = SIZES[device]
    for tokens in counts[:1] if args.quick else counts:
        for way, when in WAYS.items():
            command = [sys.executable, __file__, "--one", way, str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
            rows.append(json.loads(done.stdout.splitlines()[-1]) | {"when": when})
            assert rows[-1]["device"] == device
            print("{tokens:>6} tokens  {way:16} {peak_mib:>8.0f} MiB  loss {loss:.6f}".format(**rows[-1]), flush=True)
    first, second = rows[-3]["peak_mib"], rows[-2]["peak_mib"]
    print(f"target kernel-step-memory-ratio {first / second:.2f} 1.5 {'ok' if first >= 1.5 * second else 'miss'}")
    save(args.json, about, rows=rows)


if __name__ == "__main__":
    main()
