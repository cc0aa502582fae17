"""Runs whose groups are made as NCCL makes them (`stub_nccl.py`): splits and collectives are the same on all ranks."""

import inspect
import warnings
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks._models import random_model
from spmdrl.config.load import from_command_line
from spmdrl.config.schema import Config, ParallelConfig
from spmdrl.spmd.mesh import scoring_world, twin, world_from_group
from spmdrl.train import train
from tests.ranks.demo import Interrupted, open_demo
from tests.ranks.harness import run_ranks
from tests.ranks.nccl_rules import counts, judge
from tests.ranks.stub_nccl import Comm, Event, Record, stub_nccl

LIMIT = timedelta(seconds=60)
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
megatron_only = pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed")


def split(rollout: int, scoring: int = 0, **axes) -> dict:
    return {"placement": "split", "rollout_ranks": rollout, "scoring_ranks": scoring} | axes


SAVED = {"checkpoint": {"every": 1, "keep": 1, "at_end": False}}
PPO = {"algo": {"preset": "ppo", "updates_per_step": 2, "kl_coef": 0.05}}
MEGATRON = {"policy": {"backend": "megatron"}}
MIXTURE = MEGATRON | {"model": {"path": "mixture"}}
AHEAD = {"rollout": {"staleness": 1}}
RUNS = {
    "fsdp 2, one hf engine": (2, {}, SAVED | {"rollout": {"tp": 2}}),
    "fsdp 2 x 2, critic": (4, {"dp_replicate": 2}, PPO),
    "fsdp sp 2 x 2, adapters": (4, {"sp": 2}, {"lora": {"rank": 4}}),
    "split 3 + 1, one step ahead": (4, split(1), AHEAD | SAVED),
    "split 2 + 1 + 1, critic, one step ahead": (4, split(1, 1), PPO | AHEAD),
    "split sp 2 + one hf engine of 2": (4, split(2, sp=2), {"rollout": {"tp": 2}}),
    "megatron tp 2": (2, {"tp": 2, "sequence_parallel": True}, MEGATRON | SAVED),
    "megatron pp 3": (3, {"pp": 3}, MEGATRON),
    "megatron pp 2 in 4 stages, cp 2": (4, {"pp": 2, "virtual_stages": 2, "cp": 2}, MIXTURE),
    "megatron ep 2, etp 2": (4, {"tp": 2, "ep": 2, "etp": 2}, MIXTURE),
    "megatron split tp 2 + 1, one step ahead": (3, split(1, tp=2), MEGATRON | SAVED | AHEAD),
    "megatron split pp 2 + 2 + 1": (5, split(1, 2, pp=2, first_stage_layers=1), MEGATRON),
}
"""Ranks, axes and settings of two steps of the demo, with evaluation; one that saves is resumed after the first."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    """A random model of four layers, two of them with experts."""
    sizes = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=32, num_hidden_layers=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=128)
    experts = dict(num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0, 2])
    folder = tmp_path_factory.mktemp("mixture")
    return str(random_model(folder, "Qwen3Moe", seed=0, **sizes, **heads, **experts))


def as_on_gpus():
    """Makes stages of a pipeline send to each other in batches, as on GPUs."""
    from spmdrl.policy.megatron import model

    made = model.transformer_config
    return patch.object(
        model, "transformer_config", lambda *args, **more: made(*args, **more | {"batch_p2p_comm": True})
    )


def recorded(world, folder: str, parallel: dict, sections: dict) -> Record:
    """Returns this rank's record of a run."""
    tp = sections.get("rollout", {}).get("tp", 1)
    sections = {"run": {"steps": 2}, "eval": {"every": 1, "prompts": 8}, "parallel": parallel} | sections
    gpus = as_on_gpus() if "policy" in sections else nullcontext()
    with stub_nccl() as recorder, gpus:
        for stop_after in (1, 0) if "checkpoint" in sections else (0,):
            here = world_from_group(ParallelConfig(**parallel), tp, torch.device("cpu"), world.rank, LIMIT)
            run = open_demo(here, folder, sections, stop_after)
            with suppress(Interrupted):
                train(run)
            run.close()
            assert run.checkpoints.start_step == ("checkpoint" in sections and not stop_after)
        return recorder.record


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=megatron_only if "megatron" in name else ()) for name in RUNS]
)
def test_lockstep_of_splits_and_collectives(name, tmp_path, mixture):
    ranks, parallel, sections = RUNS[name]
    if "model" in sections:
        sections = sections | {"model": {"path": mixture}}
    records = run_ranks(recorded, ranks, str(tmp_path / "run"), parallel, sections)
    print(name, counts(records))
    assert judge(records) == []
    # The stub is there: groups are split off, and what runs on them is seen.
    assert all(sum(e.op == "split" for e in r.events) > 3 and len(r.events) > 50 for r in records)


# ── groups of the large ones ─────────────────────────────────────────────────

JOBS = {"qwen3_235b": 32, "deepseek_671b": 96, "dapo_671b": 512}
"""GPUs of the configs that need more than 8."""
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
MOST_SPLITS = 40
"""Splits that a rank enters: each takes all ranks of the job."""


def on_paper(_, names: list[str]) -> dict[str, list[Record]]:
    """Returns config -> records of ranks of its job, made in this process one after the other."""
    warnings.simplefilter("ignore")
    dist.destroy_process_group()
    found = {}
    for name in names:
        cfg, size = from_command_line(["--config", str(CONFIGS / f"{name}.yaml")]).config, JOBS.get(name, 8)
        # Neighbours, the end, and places that differ on every axis.
        ranks = sorted({*range(8), *range(0, size, max(1, size // 7)), size - 1})
        found[name] = [forming(cfg, rank, size) for rank in ranks]
    return found


def forming(cfg: Config, rank: int, size: int) -> Record:
    """Returns the record of one rank while the groups of its job are made."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    with stub_nccl(paper=True) as recorder:
        world = world_from_group(cfg.parallel, cfg.rollout.tp, torch.device("cpu"), rank, LIMIT)
        if cfg.policy.backend == "megatron":
            from megatron.core import parallel_state

            from spmdrl.policy.megatron.model import initialize
            from spmdrl.policy.megatron.policy import layout_of

            parallel_state._global_process_group_list = None
            initialize(layout_of(cfg))
        scoring_world(world, cfg.parallel, LIMIT)
        twin(world, LIMIT)
    dist.destroy_process_group()
    return recorder.record


def test_lockstep_of_the_splits_of_every_config():
    has = bool(find_spec("megatron"))
    names = [n for n in NAMES if has or "megatron" not in (CONFIGS / f"{n}.yaml").read_text()]
    (found,) = run_ranks(on_paper, 1, names)
    for name, records in found.items():
        assert judge(records) == [], name
        splits = {sum(e.op == "split" for e in r.events) for r in records}
        print(f"{name}, {JOBS.get(name, 8)} ranks: {splits} splits,", counts(records)[0])
        assert len(splits) == 1 and max(splits) <= MOST_SPLITS, "each is a collective of the whole job"


# ── the judge can fail ───────────────────────────────────────────────────────


def crossed(world) -> Record:
    """Makes two collectives that do not wait, on two communicators, in another order on rank 1."""
    with stub_nccl() as recorder:
        groups = dist.new_group([0, 1]), dist.new_group([0, 1])
        here = groups[:: 1 - 2 * world.rank]
        for work in [dist.all_reduce(torch.ones(2), group=group, async_op=True) for group in here]:
            work.wait()
        return recorder.record


def some_only(world) -> Record:
    """Makes a group by rank 1 alone."""
    with stub_nccl() as recorder:
        if world.rank == 1:
            dist.new_group([1], use_local_synchronization=True)
        dist.all_reduce(torch.ones(2), group=dist.new_group([0, 1]))
        return recorder.record


def host(world) -> Record:
    """Makes a group of the host like any other."""
    with stub_nccl() as recorder:
        dist.new_group([0], backend="gloo")
        return recorder.record


def line_of(function, text: str) -> str:
    """Returns `ranks/test_nccl_order.py:LINE` of the line of a function that holds the text."""
    lines, first = inspect.getsourcelines(function)
    return f"ranks/test_nccl_order.py:{first + next(i for i, line in enumerate(lines) if text in line)} "


@pytest.mark.parametrize(
    ("program", "wrong", "lines"),
    [
        (crossed, "ranks wait for each other", ["all_reduce", "all_reduce"]),
        (some_only, "ranks [0] of [0, 1] enter the split", ["dist.all_reduce", "dist.new_group([1]"]),
        (host, "not all come", ["", "dist.new_group"]),
    ],
)
def test_lockstep_that_is_lost_is_found_by_rank_and_line(program, wrong, lines):
    found = judge(run_ranks(program, 2))[0].splitlines()
    assert wrong in found[0]
    for rank, (line, text) in enumerate(zip(found[1:], lines, strict=True)):
        place = line_of(program, text) if text else "nothing more"
        assert line.startswith(f"  rank {rank}: {place}"), (line, place)


def record(rank: int, *events: Event) -> Record:
    comms = {name: Comm(name, (0, 1), {"all": "default"}.get(name, name)) for name in ("all", "own", "host")}
    numbered = enumerate(events, 1)
    return Record(rank, comms, [replace(e, launch=e.launch or i, thread=e.thread or "Main") for i, e in numbered])


def reduce_of(size: int, comm: str = "all", **more) -> Event:
    return Event(comm, "allreduce_", "run.py:1", (("sum", size),), **more)


def sent(peer: int, size: int, receive: bool = False, **more) -> Event:
    return Event("all", "recv_" if receive else "send", "run.py:2", ((size, "float32"),), peer=peer, **more)


def shuffled(sends: tuple, receives: tuple) -> Event:
    return Event("all", "alltoall_base_", "run.py:3", ("float32",), sends, receives)


WRONG = {
    "sizes": ([reduce_of(2)], [reduce_of(3)], "other collectives or arguments"),
    "one fewer": ([reduce_of(2), reduce_of(2)], [reduce_of(2)], "not all come"),
    "on the host": ([reduce_of(2, "host")], [reduce_of(3, "host")], "other collectives or arguments"),
    "parts": ([shuffled((1, 2), (1, 4))], [shuffled((4, 5), (3, 5))], "sends 2 elements to that at 1"),
    "message of another size": ([sent(1, 2)], [sent(0, 3, True)], "message 0 from rank 0 to rank 1"),
    "nobody receives": ([sent(1, 2)], [], "message 0 from rank 0 to rank 1"),
    "both send first": ([sent(1, 2), sent(1, 2, True)], [sent(0, 2), sent(0, 2, True)], "wait for each other"),
    "a message beside a sum": ([sent(1, 2), reduce_of(2)], [reduce_of(2), sent(0, 2, True)], "wait for each other"),
    "threads": ([reduce_of(2), reduce_of(2, thread="T")], [reduce_of(2)] * 2, "collectives of several threads"),
}
RIGHT = {
    "parts": ([shuffled((1, 2), (1, 4))], [shuffled((4, 5), (2, 5))]),
    "both send, in one launch": (
        [sent(1, 2, launch=1), sent(1, 2, True, launch=1)],
        [sent(0, 2, launch=1), sent(0, 2, True, launch=1)],
    ),
    "the host on its own": ([reduce_of(2), reduce_of(2, "host")], [reduce_of(2, "host"), reduce_of(2)]),
    "a communicator of its own": ([reduce_of(2, "own")], [reduce_of(2, "own")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_lockstep_rules_see_what_is_wrong(name):
    one, other, why = WRONG[name]
    found = judge([record(0, *one), record(1, *other)])
    assert any(why in text.splitlines()[0] for text in found), found
    assert "rank 0: run.py" in "".join(found)


@pytest.mark.parametrize("name", RIGHT)
def test_lockstep_rules_let_pass_what_is_right(name):
    assert judge([record(rank, *events) for rank, events in enumerate(RIGHT[name])]) == []
