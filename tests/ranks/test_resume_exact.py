"""N steps are k steps, a kill, and N - k steps: bit for bit on the same world, within 1e-5 on another one.

A run that is not interrupted saves after step k. What it has written by then, and the lines of later steps that a
killed job leaves, is copied to where another run of the same settings goes on.
"""

import json
import random
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

from spmdrl.checkpoint import treefile
from spmdrl.checkpoint.manifest import write_manifest
from spmdrl.data.episode import Episode, episode_of, prompt_segment
from spmdrl.data.pack import from_episodes, to_episodes
from spmdrl.data.prompts import Prompt, PromptSet
from spmdrl.data.step_batch import ReplayBuffer
from spmdrl.rl.rollout_plan import Experience, PromptGroup
from spmdrl.rl.sampler import Sampler
from spmdrl.rl.state import RankState, dealt
from spmdrl.spmd import generators
from spmdrl.train import train
from tests.ranks.cases import config, full_weights
from tests.ranks.demo import STEPS, metrics, open_demo, train_demo, untimed
from tests.ranks.harness import run_ranks

K = 2
DRAWING = """
import random

import numpy
import torch

from spmdrl.algos.losses import LOSSES


def drawing(inputs, **settings):
    per_token, stats = LOSSES["ppo"].function(inputs, **settings)
    noise = torch.rand(()).item() + random.random() + numpy.random.rand()
    return per_token * (1 + 0.1 * noise), stats | {"noise": torch.full_like(per_token, noise)}
"""
CUT = {"oversample": 1.75, "partial_steps": 2, "max_sequences": 12, "temperature": 3.0, "max_new_tokens": 16}
SPLIT = {"placement": "split", "rollout_ranks": 1}
CASES = {
    "generators": {"algo": {"loss": "FOLDER/loss.py:drawing"}},
    "partial rollouts": {"rollout": CUT},
    "replay": {"filter": {"resample": "pow", "replay_steps": 2}},
    "ppo": {"algo": {"preset": "ppo", "kl_coef": 0.05, "kl_target": 0.1, "kl_horizon": 200.0}},
    "filter": {"filter": {"keep": "accuracy_range", "low": 0.05, "high": 0.95}},
    "filter, partial": {
        "rollout": CUT | {"temperature": 2.0},
        "filter": {"keep": "accuracy_range", "low": 0.01, "high": 0.99, "max_rounds": 40},
    },
    "ahead": {"parallel": SPLIT, "rollout": {"staleness": 1}},
    "two ahead, partial": {"parallel": SPLIT, "rollout": CUT | {"staleness": 2}},
}
HELD = {
    "partial rollouts": ("carried",),
    "filter, partial": ("carried",),
    "replay": ("replay",),
    "ahead": ("ready",),
    "two ahead, partial": ("ready", "carried"),
}


def held_in(folder: Path) -> set[str]:
    """Names of the entries that are not empty in a checkpoint's files of ranks."""
    found = set()
    for file in (folder / "state" / "ranks").iterdir():
        tree = treefile.read(file)
        found |= {name for name, value in ((tree["ahead"] or {}) | {"replay": tree["replay"]}).items() if value}
    return found


def finish(world, folder, sections):
    """Trains to the end; returns the first step and, on rank 0, the weights."""
    # Any state is fine, as long as it is not the one that the run left.
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(world.rank)
    run = open_demo(world, str(folder), sections)
    first = run.checkpoints.start_step
    train(run)
    run.close()
    weights = {}
    if run.models.policy:
        models = {"policy": run.models.policy, **run.models.trained()}
        weights = {f"{name}/{n}": w for name, model in models.items() for n, w in full_weights(model).items()}
    return first, weights if world.rank == 0 else None


def go_on(source: Path, folder: Path) -> None:
    """Copies a run as a kill after the checkpoint of step K leaves it."""
    shutil.copytree(source, folder, symlinks=True)
    for later in folder.glob("checkpoints/step_*"):
        if later.name != f"step_{K}":
            shutil.rmtree(later)


def both(world, root, sections):
    """Makes a run, and one that goes on in its middle."""
    root = Path(root)
    _, whole = finish(world, root / "whole", sections)
    if world.is_first:
        go_on(root / "whole", root / "resumed")
    torch.distributed.barrier()
    first, resumed = finish(world, root / "resumed", sections)
    return whole, first, resumed


def sections_of(case: str, root: Path) -> dict:
    (root / "loss.py").write_text(DRAWING)
    sections = json.loads(json.dumps(CASES[case]).replace("FOLDER", str(root)))
    if case != "generators":
        sections["eval"] = {"every": 0}
    return sections | {"checkpoint": {"every": K, "keep": 9, "at_end": False}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns case -> (settings, folder, weights at the end, start of the second run, its weights), each made once."""
    made = {}

    def of(case: str, tp: int = 1):
        if (case, tp) not in made:
            root = tmp_path_factory.mktemp("exact")
            sections = sections_of(case, root)
            if tp > 1:
                sections["rollout"] = sections.get("rollout", {}) | {"tp": tp}
            ranks = run_ranks(both, 2, str(root), sections, rollout_tp=tp, parallel=sections.get("parallel"))
            made[case, tp] = sections, root, *ranks[0]
        return made[case, tp]

    return of


@pytest.mark.parametrize(("case", "tp"), [*((case, 1) for case in CASES), ("partial rollouts", 2)])
def test_resume_is_exact_on_the_same_world(runs, case, tp):
    _, root, whole, first, resumed = runs(case, tp)
    assert first == K and set(HELD.get(case, ())) <= held_in(root / "whole" / "checkpoints" / f"step_{K}")
    want, got = untimed(metrics(root / "whole")), untimed(metrics(root / "resumed"))
    assert [row["step"] for row in got] == list(range(1, STEPS + 1))
    assert got == want
    assert all(abs(row["grad_norm"]) > 0 for row in got[K:])
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[n], resumed[n]) for n in whole)


OTHER = [("replay", 1, {}), ("ppo", 1, {}), ("filter", 3, {}), ("ahead", 3, {"rollout_ranks": 2})]


@pytest.mark.parametrize(("case", "n", "changes"), OTHER)
def test_resume_on_another_world_goes_on_alike(runs, tmp_path, case, n, changes):
    sections, root, whole, *_ = runs(case)
    if changes:
        sections = sections | {"parallel": sections["parallel"] | changes}
    go_on(root / "whole", tmp_path / "run")
    first, weights = run_ranks(finish, n, str(tmp_path / "run"), sections, parallel=sections.get("parallel"))[0]
    want, got = untimed(metrics(root / "whole")), untimed(metrics(tmp_path / "run"))
    assert first == K and len(want) == len(got)
    for a, b in zip(want, got, strict=True):
        assert a.keys() == b.keys()
        for name in [name for name in a if not name.endswith("microbatches")]:
            assert abs(a[name] - b[name]) <= 1e-5 * max(1.0, abs(a[name])), (a["step"], name)
    assert max((whole[n] - weights[n]).abs().max().item() for n in whole) <= 1e-5


def test_resume_can_fail_to_be_exact(runs, tmp_path):
    """Without the files of ranks a run goes on too, reports what it lacks, and ends elsewhere."""
    for case in ("generators", "replay", "ahead"):
        sections, root, whole, *_ = runs(case)
        folder = tmp_path / case
        go_on(root / "whole", folder)
        step = folder / "checkpoints" / f"step_{K}"
        shutil.rmtree(step / "state" / "ranks")
        write_manifest(step, K, 2)
        first, weights = run_ranks(finish, 2, str(folder), sections, parallel=sections.get("parallel"))[0]
        assert first == K and len(metrics(folder)) == STEPS
        assert max((whole[n] - weights[n]).abs().max().item() for n in whole) > 1e-5, case


# ── dealt out to other worlds ────────────────────────────────────────────────


@pytest.mark.parametrize("before", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("now", [1, 2, 3, 4, 6, 7])
def test_resume_deals_everything_once(before, now):
    things = {(holder, i) for holder in range(before) for i in range(5)}
    taken = []
    for mine in range(now):
        numbers, share, shares = dealt(mine, now, before)
        taken += [(holder, i) for holder in numbers for i in range(5)[share::shares]]
        if now == before:
            assert (numbers, share, shares) == ([mine], 0, 1)
    assert len(taken) == len(set(taken)) and set(taken) == things


PROMPTS = PromptSet([Prompt(3 * i + 1, [i, i + 1], "x", "s", {}, "t") for i in range(40)], 0, "made")


def episode(position: int, sample: int) -> Episode:
    tokens = torch.arange(3 + sample)
    mask = tokens > 1
    return episode_of(position, sample, position, tokens, mask, mask * -0.5, 1, "stop", parts={"a": 0.1 * position})


def holder(rank: int, size: int, tp: int = 1, **changes):
    """Makes the state of one rank of a world that is only inspected."""
    cfg = config(rollout={"tp": tp, "partial_steps": 2, "staleness": 1} | changes, filter={"replay_steps": 2})
    world = SimpleNamespace(
        rank=rank,
        size=size,
        samples=True,
        roles=SimpleNamespace(samplers=tuple(range(size))),
        engine_index=rank // tp,
        engine_count=size // tp,
        engine_tp_rank=rank % tp,
        device=torch.device("cpu"),
    )
    # Nothing is sampled here.
    sampler = Sampler(cfg, world, None, PROMPTS, None, None, None, step=4)  # type: ignore[arg-type]
    return RankState(cfg, world, PROMPTS, sampler, ReplayBuffer(cfg.filter, 8), False)


def filled(rank: int, size: int, tp: int):
    """Makes the same state with content: groups 100, 101, .. cut short, a step ahead, two steps to be replayed."""
    held = holder(rank, size, tp)
    engine, engines, leads = rank // tp, size // tp, rank % tp == 0
    for i in range(engine, 6, engines):
        prompt = PROMPTS.prompts[i]
        first, second = (Episode(prompt.index, n, 100 + i, [prompt_segment(prompt.tokens)]) for n in range(2))
        first.experts = torch.full((4, 2), i, dtype=torch.int16)
        first.add_sampled([5, 6], [-0.1, -1 / 3], 3)
        first.add_observed([8, 9], state=12)
        first.add_sampled([i], [-0.7], 4)
        second.add_sampled([7], [-2.0], 4)
        second.finish = "stop"
        held.sampler.carried.append(PromptGroup(100 + i, prompt, 3, [first, second]))
    mine = [episode(p, s) for p in range(engine, 8, engines) for s in range(2)] if leads else []
    done = Experience(mine, 11, bad_samples=leads)
    done.stats.add("filter/rounds", 2)
    held.sampler.ready, held.sampler.step, held.sampler.draws = deque([done]), 5, 77
    for step in (2, 3):
        batch = from_episodes([episode(p, step) for p in range(rank, 8, size)], ("a",))
        held.replay.buffer.append(step, [batch])
    return held


@pytest.mark.parametrize(("before", "now"), [((2, 1), (1, 1)), ((1, 1), (3, 1)), ((4, 2), (4, 1)), ((3, 1), (4, 2))])
def test_resume_hands_on_whole_groups_to_other_worlds(before, now, tmp_path):
    (old, old_tp), (new, tp) = before, now
    files = [tmp_path / f"rank_{rank:05d}.safetensors" for rank in range(old)]
    for rank, file in enumerate(files):
        treefile.write(file, filled(rank, old, old_tp).tree())
    held = [holder(rank, new, tp) for rank in range(new)]
    for one in held:
        said = one.restore(files)
        assert ("states of generators" in said) == (old != new)
        assert (one.sampler.step, one.sampler.draws, one.sampler.ready[0].drawn) == (5, 77, 11)
        assert one.sampler.ready[0].stats.dump() == [("filter/rounds", "mean", 2.0, 1.0)]
    leaders = held[::tp]
    for one in held:
        same = leaders[one.world.engine_index].sampler.carried
        assert [g.position for g in one.sampler.carried] == [g.position for g in same]
        if one.world.engine_tp_rank:
            assert not one.sampler.ready[0].episodes and not one.sampler.ready[0].bad_samples
    groups = sorted((g for one in leaders for g in one.sampler.carried), key=lambda g: g.position)
    assert [(g.position, g.prompt, g.born) for g in groups] == [(100 + i, PROMPTS.prompts[i], 3) for i in range(6)]
    for i, group in enumerate(groups):
        first, second = group.episodes
        prompt = PROMPTS.prompts[i].tokens
        assert first.tokens.tolist() == [*prompt, 5, 6, 8, 9, i] and first.response == [i]
        assert [(s.turn, s.state, s.version, s.sampled) for s in first.segments] == [
            (0, 0, 0, False),
            (0, 0, 3, True),
            (1, 12, 0, False),
            (1, 12, 4, True),
        ]
        logp = [-0.1, -1 / 3, 0.0, 0.0, -0.7]
        assert torch.equal(first.rollout_logp, torch.tensor([0.0] * len(prompt) + logp))
        assert torch.equal(first.experts, torch.full((4, 2), i, dtype=torch.int16)) and first.finish == ""
        assert (second.response, second.finish, second.experts) == ([7], "stop", None)
    by_engine = [{t.position for t in one.sampler.ready[0].episodes} for one in leaders]
    assert sum(map(len, by_engine)) == 8 and set.union(*by_engine) == set(range(8)), "a group is with one engine"
    ready = [t for one in leaders for t in one.sampler.ready[0].episodes]
    assert len(ready) == 16 and all(t.parts == {"a": 0.1 * t.position} for t in ready)
    assert sum(one.sampler.ready[0].bad_samples for one in held) == old // old_tp
    for age, step in ((0, 3), (1, 2)):
        rows = [t for one in held for batch in one.replay.buffer.aged(age) for t in to_episodes(batch)]
        assert sorted((t.position, t.sample) for t in rows) == [(p, step) for p in range(8)]


def test_resume_says_what_does_not_fit(tmp_path):
    file = tmp_path / "rank_00000.safetensors"
    treefile.write(file, filled(0, 1, 1).tree())
    other = holder(0, 1, samples_per_prompt=3)
    said = other.restore([file])
    assert said.startswith("not resumed: groups that were cut short, exp")
    assert said.endswith("(these differ: --rollout.samples-per-prompt)")
    assert not other.sampler.carried and not other.sampler.ready and other.sampler.step == 4
    said = holder(0, 1).restore([])
    assert said.startswith("not resumed: ") and said.endswith(
        "number generators (the checkpoint has no files of ranks)"
    )
    late = holder(0, 1)
    late.sampler.step = 6
    with pytest.raises(ValueError, match="experience for step 4 was saved, but the run continues at 6"):
        late.restore([file])
    with pytest.raises(ValueError, match="holds files of another number of ranks: 2 instead of 1"):
        holder(0, 1).restore([file, file])
    tree = treefile.read(file)
    del tree["ahead"]["draws"]
    treefile.write(file, tree)
    with pytest.raises(ValueError, match="another version of this program"):
        holder(0, 1).restore([file])


def test_resume_generators_go_on_where_they_were(tmp_path):
    def draw():
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), numpy.random.randn(3).tolist()

    cpu = torch.device("cpu")
    numpy.random.randn()  # One of a pair is kept.
    random.gauss(0, 1)
    treefile.write(tmp_path / "x", generators.generator_states(cpu))
    want, other = draw(), draw()
    generators.set_generator_states(treefile.read(tmp_path / "x"), cpu)
    assert draw() == want != other


# ── settings and prompts that are not the run's ──────────────────────────────


def set_anew(world, folder):
    """Makes a run of two steps; returns the starts of further runs with other settings."""
    reward = Path(folder).with_name("reward.py")
    reward.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0\n")
    sections = {"checkpoint": {"every": 1}, "run": {"steps": 2}, "eval": {"every": 0}}
    sections["reward"] = {"function": str(reward), "workers": 1}
    adaptive = {"kl_target": 0.1, "kl_coef": 0.05}
    train_demo(world, folder, sections | {"algo": adaptive})
    told = {}
    for name, algo in {"as it was": adaptive, "set anew": adaptive | {"kl_coef": 0.5}}.items():
        run = open_demo(world, folder, sections | {"algo": algo})
        told[name] = (run.checkpoints.start_step, run.algo.state["kl_coef"])
        run.close()
    try:
        open_demo(world, folder, sections | {"data": {"limit": 32}})
    except ValueError as error:
        told["other prompts"] = str(error)
    run = open_demo(world, folder, sections | {"data": {"limit": 32}, "run": {"steps": 2, "allow_changes": True}})
    told["allowed"] = run.checkpoints.start_step
    run.close()
    reward.write_text(reward.read_text().replace("1.0", "2.0"))
    for name, allow in {"other reward": False, "allowed reward": True}.items():
        try:
            run = open_demo(world, folder, sections | {"run": {"steps": 2, "allow_changes": allow}})
            told[name] = run.checkpoints.start_step
            run.close()
        except ValueError as error:
            told[name] = str(error)
    settings = (Path(folder) / "checkpoints" / "latest" / "state" / "config.yaml").read_text()
    return told, settings


def test_resume_with_other_settings_takes_those_and_other_prompts_or_files_are_refused(tmp_path):
    told, settings = run_ranks(set_anew, 1, str(tmp_path / "run"))[0]
    step, coef = told["as it was"]
    assert step == 2 and coef not in (0.05, 0.5), "steered by two steps"
    assert told["set anew"] == (2, 0.5) and told["allowed"] == 2
    assert "trained on other prompts" in told["other prompts"] and "--run.fresh" in told["other prompts"]
    said = f"--reward.function {tmp_path}/reward.py has changed since {tmp_path}/run/checkpoints/step_2"
    assert told["other reward"].startswith(said) and "--run.allow-changes" in told["other reward"]
    assert told["allowed reward"] == 2
    assert "allow_changes: true" not in settings
