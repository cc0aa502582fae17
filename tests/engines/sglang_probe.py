"""Real SGLang beside a real FSDP2 policy, measured; `test_sglang.py` holds the measurements to the laws.

    python -m tests.engines.sglang_probe /tmp/facts.json

One process and one engine for everything: an engine takes 10 s to start. `Probe` and what can be asked of any engine
come from `probe.py`.
"""

import json
import sys
import traceback
from pathlib import Path

import psutil
import torch

from spmdrl.config.schema import Config
from tests.engines.probe import Probe, interrupted, limits, neighbours, outcome, replaced, stale


def processes(p: Probe) -> list[psutil.Process]:
    """Finds the server and its scheduler."""
    server = psutil.Process(p.engine.process.child.pid)
    return [server, *(child for child in server.children(recursive=True) if "scheduler" in child.name())]


def samples(p: Probe) -> dict:
    """Sends the same requests to this and to the HF engine with equal weights: greedy, at two temperatures, top-p.

    They are asked together, so that one batch holds greedy and drawn rows.
    """
    from spmdrl.engines.build import stop_tokens
    from spmdrl.engines.hf.engine import HFEngine
    from spmdrl.hub.build import DTYPES
    from spmdrl.hub.resolve import resolve
    from spmdrl.session.transfer import Transfer

    p.awake()
    stop = stop_tokens(resolve(p.cfg.model.path), p.run.tokenizer)
    hf = HFEngine(p.cfg, p.run.world, stop)
    Transfer(p.run.world, p.policy, hf, DTYPES[p.cfg.model.dtype], 1 << 20).push(p.policy.version)
    kinds = {"greedy": (0.0, 1.0), "T 1": (1.0, 1.0), "T 1.7": (1.7, 1.0), "top-p": (1.0, 0.6)}
    requests = []
    for place, (temperature, top_p) in enumerate(kinds.values()):
        for i, prompt in enumerate(p.prompts(16)):
            # 63-bit seeds, as a run's are.
            seed = (1 << 62) + 977 * i + place
            requests.append(p.request(prompt, position=i, sample=place, seed=seed, temperature=temperature))
            requests[-1].top_p = top_p
    mine = p.drain(requests)
    p.engine, kept = hf, p.engine
    theirs = p.drain(requests)
    p.engine = kept
    facts = {}
    for place, kind in enumerate(kinds):
        pairs = [(mine[i, place], theirs[i, place]) for i in range(16)]
        gaps = [abs(a - b) for x, y in pairs if x.tokens == y.tokens for a, b in zip(x.logp, y.logp, strict=True)]
        facts[kind] = {
            "same": sum(x.tokens == y.tokens and x.finish == y.finish for x, y in pairs),
            "logp": max(gaps, default=9.0),
            "different": len({tuple(x.tokens) for x, _ in pairs}),
            "finish": sorted({x.finish for x, _ in pairs}),
        }
    return facts


def corrupt(p: Probe) -> dict:
    """Corrupts pushes: a bit turns on the way or in the memory the engine reads; a tensor never arrives."""
    from spmdrl.engines.sglang.transport import SharedMemory

    prompt = p.prompts(1)[0]
    p.awake()
    facts = {}
    load, call = p.engine.load, p.engine.process.call

    def turned(buckets, version):
        def given():
            for bucket in buckets:
                name, tensor = list(bucket.items())[-1]
                bucket[name] = tensor.clone()
                bucket[name].view(-1).view(torch.uint8)[5] ^= 1
                yield bucket

        load(given(), version)

    def meddle(do, **what):
        if do == "load":
            (order,) = what["workers"]
            with open(order["file"], "r+b") as f:
                f.seek(order["entries"][1]["at"] + 3)
                byte = f.read(1)[0]
                f.seek(-1, 1)
                f.write(bytes([byte ^ 1]))
            facts["name in memory"] = order["entries"][1]["name"]
        return call(do, **what)

    def attempt(name: str) -> None:
        p.shake(0.02)
        facts[name] = [outcome(p.push), p.engine.version, outcome(lambda: p.engine.submit(p.request(prompt)))]

    p.engine.load = turned
    attempt("turned bit")
    p.engine.load = load
    p.engine.process.call = meddle
    attempt("turned in memory")
    p.engine.process.call = call
    lost = SharedMemory.put

    def without(self, tensors, parts):
        return lost(self, {k: v for k, v in tensors.items() if "layers.1.mlp.down_proj" not in k}, parts)

    SharedMemory.put = without
    attempt("lost tensor")
    SharedMemory.put = lost
    p.push()
    facts["mended"] = outcome(lambda: p.drain([p.request(prompt)]))
    facts["agreement after"] = p.agree(p.prompts(4))
    return facts


def sleep_memory(p: Probe) -> dict:
    """Measures the bytes that the engine's processes really give back."""
    prompts = p.prompts(8)

    def greedy() -> list[list[int]]:
        done = p.drain([p.request(prompt, position=i, temperature=0.0) for i, prompt in enumerate(prompts)])
        return [done[i, 0].tokens for i in range(len(prompts))]

    def mapped() -> float:
        # The resident size is no measure: pages of the cache that no token reached are not resident.
        return processes(p)[1].memory_info().vms / 2**20

    def held() -> list[int]:
        return list(p.engine.bytes_by_owner().values())

    p.awake()
    before = greedy()
    facts = {"held": [held()], "mapped": [mapped()]}
    p.engine.sleep(1)
    facts["held"].append(held())
    facts["mapped"].append(mapped())
    p.awake()
    facts["mapped"].append(mapped())
    facts["same"] = before == greedy()
    p.engine.sleep(2)
    facts["held"].append(held())
    p.awake()
    facts["held"].append(held())
    facts["same after level 2"] = before == greedy()
    facts["greedy"] = before
    return facts


def abort(p: Probe) -> dict:
    """Cuts two of four off while they run, also one that has ended already and one that nobody asked for."""
    p.awake()
    prompts = p.prompts(5)

    def asked(new: int) -> list:
        return [p.request(x, position=i, seed=50 + i, new=new, temperature=9.0) for i, x in enumerate(prompts)]

    whole = p.drain(asked(90))
    requests = asked(90)
    requests[4].max_new_tokens = 2
    for request in requests:
        p.engine.submit(request)
    done: dict = {}
    while not p.engine.process.done and not done:
        line = p.engine.process.take(1.0)  # the short one has ended, and nobody has asked for it
        assert line is None, line
    cut = {c.key: c for c in p.engine.abort([(0, 0), (1, 0), (4, 0), (9, 9)])}
    for _ in range(400):
        done |= {c.key: c for c in p.engine.poll()}
    again = {c.key: c for c in p.engine.abort([(0, 0), (2, 0)])}
    return {
        "cut": [[list(k), c.finish, c.tokens, c.logp, c.version] for k, c in sorted(cut.items())],
        "whole": [[whole[i, 0].finish, whole[i, 0].tokens, whole[i, 0].logp] for i in range(5)],
        "version": p.policy.version,
        "others": sorted(done),
        "again": len(again),
        "left": len(p.engine.running),
        "after": outcome(lambda: p.drain(asked(3))),
    }


def measure(folder: Path, facts: dict) -> None:
    p = Probe(
        replaced(
            Config(),
            run={"dir": str(folder), "steps": 6},
            eval={"every": 0},
            checkpoint={"at_end": False},
            tracking={"trackers": ("jsonl",), "console": "plain"},
            optimizer={"lr": 2.5e-4},
            rollout={"engine": "sglang", "prompts_per_step": 8, "samples_per_prompt": 4, "kv_cache_gib": 0.25},
        ),
        facts,
    )
    p.compute_exactly()
    p.train(p.prompts(16))
    for part in (samples, neighbours, stale, limits, sleep_memory, abort, corrupt, interrupted):
        facts[part.__name__] = part(p)
    facts["killed"], facts["left behind"] = killed(p)


def killed(p: Probe) -> tuple[str, list[int]]:
    """Kills the scheduler in the middle of sampling; returns what a poll says, and what is left after `close`."""
    from spmdrl.engines.sglang import process as sglang_process

    sglang_process.GRACE_SECONDS = 1000.0  # or the watching thread ends this process
    mine = processes(p)
    p.awake()
    for i in range(8):
        p.engine.submit(p.request(p.prompts(1)[0], sample=i, new=100, temperature=9.0))
    mine[1].kill()

    def polls() -> None:
        while True:
            p.engine.poll()

    told = outcome(polls)
    p.engine.close()
    return told, [process.pid for process in psutil.wait_procs(mine, timeout=5)[1]]


def main() -> None:
    file = Path(sys.argv[1])
    facts: dict = {}
    try:
        measure(file.with_suffix(""), facts)
    except BaseException:
        facts["failed"] = traceback.format_exc()
    file.write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
