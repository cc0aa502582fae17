"""Measures peak memory and time of an update at V = 151936 with all logits, `linear_logprob` and `chunked_loss`.

    python benchmarks/vocabulary.py [--quick] [--json FILE]

The script runs `FsdpPolicy.update` (GRPO, one AdamW step) on one rank and a random Qwen2 (D=128, 2 layers; on a GPU
D=1024, 8 layers, bfloat16), in one micro-batch. `all logits` replaces the kernel by plain torch. Each variant runs in a
separate process. The peak is the memory that the update needs in addition to model and batch, including gradients and
moments, which are the same for all variants.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks._about import available, measured_on, save  # noqa: E402

VOCAB = 151_936
SIZES = {"cpu": (256, 512, 1024), "cuda": (8192, 4096, 16384)}
"""Tokens of an update. On a GPU with 256 tokens, weights and moments take nearly all memory in every variant."""
WAYS = ("all logits", "linear_logprob", "chunked_loss")
TARGET = 1.5
"""Minimum ratio of the peak with all logits to the peak of spmdrl."""


def plain(states, weight, targets, temperature, *, entropy=True, **_):
    import torch

    log_p = torch.log_softmax((states @ weight.T).float() / temperature, -1)
    logp = log_p.gather(1, targets[:, None])[:, 0]
    return logp, -(log_p.exp() * log_p).sum(-1) if entropy else None


def held(gpu: bool, reset: bool = False) -> int:
    """Return the peak bytes since the last reset. reset: begin a new measurement and return the current bytes."""
    import torch

    if gpu:
        torch.cuda.reset_peak_memory_stats() if reset else None
        return torch.cuda.memory_allocated() if reset else torch.cuda.max_memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines["VmRSS" if reset else "VmHWM"].split()[0])


def one(way: str, tokens: int) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from spmdrl.config.presets import with_preset
    from spmdrl.config.schema import Config
    from spmdrl.data.episode import episode_of
    from spmdrl.data.pack import from_episodes
    from spmdrl.policy import heads
    from spmdrl.policy.fsdp.policy import FsdpPolicy
    from spmdrl.policy.objectives.reinforcement import PolicyObjective
    from spmdrl.rl.compose import compose
    from spmdrl.spmd.mesh import start

    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    width, layers = (1024, 8) if gpu else (128, 2)
    sizes = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers, num_attention_heads=4)
    config = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=VOCAB, tie_word_embeddings=True)
    if way == "all logits":
        heads.linear_logprob = plain
    cfg = with_preset(Config(), "grpo")
    cfg.policy.chunked_loss, cfg.policy.max_tokens_per_microbatch = way == "chunked_loss", tokens
    cfg.model.dtype = "bfloat16" if gpu else "float32"
    with tempfile.TemporaryDirectory() as folder:
        Qwen2ForCausalLM(config).save_pretrained(folder)
        cfg.model.path = folder
        world = start(cfg.parallel, 1)
        policy = FsdpPolicy(cfg, world, 10)
    before, clock = held(gpu, reset=True), time.perf_counter if gpu else time.process_time
    length = 128
    sampled = torch.arange(length) >= 8
    made = [
        episode_of(
            *(i, 0, i, torch.randint(VOCAB, (length,)), sampled, torch.full((length,), -11.9)), version=0, reward=i % 2
        )
        for i in range(tokens // length)
    ]
    batch = from_episodes(made, (), 0)
    batch.token |= {"old_logp": batch.token["rollout_logp"], "advantages": torch.randn(tokens, dtype=torch.float64)}
    batch.seq |= {"update": torch.zeros(len(made), dtype=torch.int64), "advantage": torch.ones(len(made))}
    algo = compose(cfg)
    objective = PolicyObjective(algo, policy, 1.0, world.data_peers, 0)
    stats = policy.update(batch, objective).reduce(lambda x, op: x, world.device)
    peak, seconds = held(gpu) - before, []
    for _ in range(3):
        began = clock()
        policy.update(batch, objective).reduce(lambda x, op: x, world.device)
        if gpu:
            torch.cuda.synchronize()
        seconds.append(clock() - began)
    row = {"way": way, "tokens": tokens, "peak_mib": peak / 2**20, "seconds": sorted(seconds)[1]}
    print(json.dumps(row | {"entropy": stats["entropy/mean"], "grad_norm": stats["grad_norm"]}))


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
    about, rows, counts = measured_on(device, args.json), [], SIZES[device]
    for tokens in counts[:1] if args.quick else counts:
        for way in WAYS:
            command = [sys.executable, __file__, "--one", way, str(tokens)]
            done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            if done.returncode:
                sys.exit(done.stderr)
            rows.append(json.loads(done.stdout.splitlines()[-1]))
            line = "{tokens:>6} tokens  {way:15} {peak_mib:>8.0f} MiB  {seconds:6.2f} s  |g| {grad_norm:.6f}"
            print(line.format(**rows[-1]), flush=True)
    spread = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a in rows for b in rows if a["tokens"] == b["tokens"])
    assert spread < 1e-3, f"the ways differ by {spread}"
    for way in WAYS[1:]:
        first, ours = (next(r for r in rows[::-1] if r["way"] == name)["peak_mib"] for name in (WAYS[0], way))
        met = "ok" if first >= TARGET * ours else "miss"
        print(f"target update-memory-all-logits-over-{way} {first / ours:.2f} {TARGET} {met}")
    save(args.json, about, rows=rows)


if __name__ == "__main__":
    main()
