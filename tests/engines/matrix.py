"""A run whose samples are greedy and written down, for `test_matrix.py`: under torchrun, with the flags of a run.

    torchrun --nproc-per-node 2 -m tests.engines.matrix --rollout.tp 2 --run.dir /tmp/run ...

It is `spmdrl.train` with stand-ins. Requests are greedy: at temperature 0 every engine must say the same, where a draw
at the edge of two tokens need not come out alike. Sample k of a prompt may be k steps longer than sample 0: greedy
samples of equal length would be one sample, and GRPO's advantages of them cancel. And where several ranks have vLLM or
SGLang, groups are made as NCCL makes them (`tests/ranks/stub_nccl.py`), and each rank's record is left in the folder,
with the bytes that the last push brought it.
"""

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace

from spmdrl.config.load import load_or_exit
from spmdrl.session.environ import prepare

SHORTER = 2
"""Tokens by which each sample of a prompt is cut before the next one."""


def stand_ins() -> None:
    """Replaces functions as the module's text says, and writes every step's samples to the run folder on rank 0."""
    from spmdrl.rl.rollout_plan import RolloutPlan
    from spmdrl.rl.run import PolicyGradient
    from spmdrl.spmd.exchange import all_gather_text

    request, pack = RolloutPlan.request, PolicyGradient.pack

    def greedy(plan, group, sample):
        asked = request(plan, group, sample)
        shorter = SHORTER * (plan.samples - 1 - sample)
        return replace(asked, temperature=0.0, max_new_tokens=asked.max_new_tokens - shorter)

    def written(method, episodes, step):
        run = method.run
        mine = [(t.position, t.sample, t.tokens.tolist(), t.finish) for t in episodes]
        rows = sorted(
            row for text in all_gather_text(json.dumps(mine), run.world.host_group) for row in json.loads(text)
        )
        if run.world.is_first:
            with open(run.session.folder / "greedy.jsonl", "a") as file:
                file.write(json.dumps(rows) + "\n")
        return pack(method, episodes, step)

    RolloutPlan.request, PolicyGradient.pack = greedy, written


def as_nccl(inside: ExitStack) -> list:
    """Has groups made as NCCL makes them, from the world on; appends the recorder to the list."""
    from spmdrl.engines.vllm import start as vllm
    from spmdrl.spmd import mesh
    from tests.ranks.stub_nccl import BACKEND, stub_nccl

    recorders, world, engine = [], mesh.world_from_group, vllm.world_of

    def world_from_group(*args):
        recorders.append(inside.enter_context(stub_nccl()))
        return world(*args)

    def world_of(ranks):
        from vllm.platforms.cpu import CpuPlatform

        # Otherwise the group on the device looks like that on the host.
        CpuPlatform.dist_backend = BACKEND
        return engine(ranks)

    mesh.world_from_group, vllm.world_of = world_from_group, world_of
    return recorders


def main() -> None:
    """Runs `spmdrl.train` with the stand-ins."""
    loaded = load_or_exit(sys.argv[1:])
    prepare()
    import torch

    from spmdrl.session.open import open_run
    from spmdrl.train import JOB, train

    stand_ins()
    with ExitStack() as inside:
        several = int(os.environ["WORLD_SIZE"]) > 1 and loaded.config.rollout.engine != "hf"
        recorders = as_nccl(inside) if several else []
        with open_run(JOB, loaded) as run:
            train(run)
            pushed = run.memory.last_push
            (run.session.folder / f"pushed_{run.world.rank}.json").write_text(json.dumps(pushed.bytes))
            for recorder in recorders:
                torch.save(recorder.record, run.session.folder / f"record_{run.world.rank}.pt")
                torch.distributed.barrier()


if __name__ == "__main__":
    main()
