"""The numbers of metrics.jsonl against a second count: what a reward file wrote down, samples.jsonl, formulas."""

import json
import math
from pathlib import Path

import pytest

from spmdrl.policy.models import Models
from spmdrl.policy.objectives.reinforcement import PolicyObjective
from tests.ranks.cases import build_policy, config, scored_batch, small_model, synthetic_batch
from tests.ranks.demo import metrics, train_demo
from tests.ranks.harness import RankError, run_ranks
from tests.ranks.test_placement import split, split_demo

BODY = """
import json
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    said = {body}
    with open(Path(__file__).with_name("graded.jsonl"), "a") as file:
        file.write(json.dumps(said) + "\\n")
    return said
"""
LENGTH = 'len(set(solution_str)) / 24 + 0.01 * solution_str.count("a")'
BARE = {"run": {"steps": 1}, "eval": {"every": 0}, "tracking": {"samples": 10_000}, "rollout": {"temperature": 3.0}}
"""One step, no evaluation, every sample written down, samples of a prompt that differ in letters and length."""


def reward_in(folder: Path, body: str) -> str:
    """Writes a reward file that records its own results."""
    folder.mkdir(exist_ok=True)
    file = folder / "reward.py"
    file.write_text(BODY.format(body=body))
    return str(file)


def trained(folder: Path, n: int, body: str = "", **sections) -> tuple[list[dict], list, list[dict]]:
    """Returns lines of metrics, the reward's record of every sample, and the samples."""
    if body:
        sections["reward"] = {"function": reward_in(folder, body)} | sections.get("reward", {})
    folder.mkdir(exist_ok=True)
    run_ranks(train_demo, n, str(folder / "run"), bare(sections))
    graded = folder / "graded.jsonl"
    said = [json.loads(line) for line in graded.read_text().splitlines()] if body else []
    return metrics(folder / "run"), said, told(folder / "run")


def bare(sections: dict) -> dict:
    """Merges sections over BARE."""
    return BARE | {name: BARE.get(name, {}) | values for name, values in sections.items()}


def told(run: Path) -> list[dict]:
    """Returns the lines of samples.jsonl."""
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def mean(values) -> float:
    values = list(values)
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("n", [1, 2])
def test_layout_rewards_are_of_what_was_graded(n, tmp_path):
    """Some groups agree and are dropped: `reward/mean` includes those, `reward/trained` only the kept ones."""
    agrees = 'float(len(ground_truth) > 0 and solution_str[:1] > "f") if ord(ground_truth[0]) % 3 else 0.25'
    filtered = {"keep": "mixed", "max_rounds": 20}
    (row,), said, samples = trained(tmp_path, n, agrees, filter=filtered)
    assert row["filter/dropped_prompts"] > 0 and 0.25 in said
    assert row["reward/mean"] == pytest.approx(mean(said), abs=1e-12)
    if n == 1:
        assert len(samples) == 32
        assert row["reward/trained"] == pytest.approx(mean(s["reward"] for s in samples), abs=1e-12)
    assert abs(row["reward/mean"] - row["reward/trained"]) > 0.01


def test_reward_mean_is_of_the_sampled_batch_where_it_is_resampled(tmp_path):
    (row,), said, samples = trained(tmp_path, 1, LENGTH, filter={"resample": "max_min"}, run={"seed": 1})
    assert len(said) == len(samples) == 32
    assert row["reward/mean"] == pytest.approx(mean(said), abs=1e-12)
    assert abs(row["reward/trained"] - row["reward/mean"]) > 0.005
    assert min(said) < row["reward/trained"] < max(said), "only the best and the worst were drawn"


def test_cut_responses_count_with_their_length_though_they_leave_the_loss(tmp_path):
    short = {"rollout": {"max_new_tokens": 6}, "reward": {"function": reward_in(tmp_path, LENGTH)}}
    cut = short | {"shaping": {"mask_cut": True}}
    runs = {"whole": trained(tmp_path / "whole", 1, **short), "cut": trained(tmp_path / "cut", 1, **cut)}
    run_ranks(split_demo, 2, str(tmp_path / "split"), split(1), bare(cut))
    runs["split"] = metrics(tmp_path / "split"), [], told(tmp_path / "split")
    (whole,), _, texts = runs["whole"]
    assert 0.1 < whole["response_length/cut"] < 1 and whole["response_length/max"] == 6
    for name in ("cut", "split"):
        (row,), _, samples = runs[name]
        for key in ("response_length/mean", "response_length/max", "response_length/cut"):
            assert row[key] == pytest.approx(whole[key], abs=1e-12), (name, key)
        first, second = (sorted((s["index"], s["sample"], s["completion"]) for s in x) for x in (samples, texts))
        assert first == second, name
    # These groups also leave the loss.
    assert runs["cut"][0][0]["advantage/nonzero"] < whole["advantage/nonzero"]


def test_parts_stand_apart_from_other_numbers(tmp_path):
    names = ("mean", "model", "shaped", "process", "timeouts", "trained")
    parts = ", ".join(f'"{name}": {i + 2}.0 + len(solution_str)' for i, name in enumerate(names))
    (row,), said, _ = trained(tmp_path, 1, f'{{"score": {LENGTH}, {parts}}}')
    assert row["reward/mean"] == pytest.approx(mean(s["score"] for s in said), abs=1e-12)
    assert row["reward/timeouts"] == 0 and abs(row["reward/shaped"]) < 2 and row["reward/trained"] < 2
    for name in names:
        assert row[f"reward/part/{name}"] == pytest.approx(mean(s[name] for s in said), abs=1e-12), name


def test_parts_are_columns_of_the_samples(tmp_path):
    """Each sample has its own: a part that it lacks is not there. One rank for all, or others that sample."""
    body = SOME.format(LENGTH)
    _, said, samples = trained(tmp_path / "one", 1, body)
    cfg = bare({"reward": {"function": reward_in(tmp_path, body)}})
    run_ranks(split_demo, 2, str(tmp_path / "split"), split(1), cfg)
    assert len(samples) == len(said) == 32
    assert sorted(s["even"] for s in said if "even" in s) == sorted(s["part/even"] for s in samples if "part/even" in s)
    for row in samples:
        assert row.get("part/even") == (len(row["completion"]) if len(set(row["completion"])) % 2 == 0 else None)
    by = {(s["index"], s["sample"]): s for s in samples}
    for row in told(tmp_path / "split"):
        assert row == by[row["index"], row["sample"]]


SOME = '{{"score": {0}, "even": float(len(solution_str))}} if len(set(solution_str)) % 2 == 0 else {{"score": {0}}}'


def test_a_part_that_some_samples_lack_is_no_zero(tmp_path):
    """The mean is over the samples that have it, and training on it is refused by name."""
    body = SOME.format(LENGTH)
    (row,), said, _ = trained(tmp_path / "told", 1, body)
    have = [s["even"] for s in said if "even" in s]
    assert 0 < len(have) < len(said) and row["reward/part/even"] == pytest.approx(mean(have), abs=1e-12)
    refusals = {
        "gdpo": ({"algo": {"advantage": "gdpo"}}, "--algo.part-weights.* even"),
        "weights": ({"algo": {"advantage": "gdpo", "part_weights": ("even=1",)}}, "--algo.part-weights even"),
        "cost": ({"safety": {"cost": "even"}, "algo": {"advantage": "rloo"}}, "--safety.cost even"),
        "filter": ({"filter": {"keep": "mixed", "metric": "even"}}, "--filter.metric even"),
    }
    for name, (sections, message) in refusals.items():
        with pytest.raises(
            RankError, match=f"{message}: the reward does not give this part for prompt [0-9]+, sample [0-9]"
        ):
            trained(tmp_path / name, 1, body, **sections)
    # The score alone is there for all.
    alone = {"advantage": "gdpo", "part_weights": ("score=1",)}
    (row,), _, _ = trained(tmp_path / "score", 1, body, algo=alone)
    assert row["grad_norm"] > 0


def test_a_part_may_appear_later_than_the_steps_that_are_replayed(tmp_path):
    """The first step of 32 samples has none; the second draws from both."""
    body = SOME.format(LENGTH).replace(
        "% 2 == 0", '>= 0 and len(open(__file__[:-9] + "graded.jsonl").readlines()) >= 32'
    )
    (tmp_path / "graded.jsonl").touch()
    replayed = {"filter": {"replay_steps": 1}, "run": {"steps": 3}}
    rows, said, _ = trained(tmp_path, 1, body, **replayed)
    assert all("even" not in s for s in said[:32]) and all("even" in s for s in said[32:])
    assert "reward/part/even" not in rows[0] and rows[1]["reward/part/even"] > 0


def test_a_grading_that_timed_out_is_zero_in_its_parts_too(tmp_path):
    """The first letter decides the sample that hangs; the filter looks at a part that a stopped grading never gave."""
    slow = '{"score": 1.0, "long": 1.0} if solution_str[:1] > "d" else __import__("time").sleep(60)'
    hangs = {"timeout": 0.3, "on_timeout": "zero", "workers": 2}
    sections = {
        "rollout": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 3},
        "filter": {"keep": "mixed", "metric": "long", "max_rounds": 20},
        "reward": hangs,
    }
    (row,), said, samples = trained(tmp_path, 1, slow, **sections)
    assert row["reward/timeouts"] > 0 and len(said) > 0
    assert row["reward/mean"] == pytest.approx(len(said) / (len(said) + row["reward/timeouts"]), abs=1e-12)
    assert row["reward/part/long"] == pytest.approx(mean(s["reward"] for s in samples), abs=1e-12) != 1.0


def test_remax_leaves_out_prompts_whose_greedy_response_has_no_reward(tmp_path):
    odd = f'float("nan") if len(set(solution_str)) % 3 == 0 else {LENGTH}'
    sections = {"algo": {"advantage": "remax", "kl_coef": 0.0}, "filter": {"bad_sample": "skip"}}
    (row,), said, samples = trained(tmp_path, 1, odd, **sections)
    bad = sum(isinstance(s, float) and math.isnan(s) for s in said)
    assert len(said) == 40 and bad > 0
    # Samples of a prompt whose greedy response is bad go with it, and that one is no sample itself.
    assert len(samples) == 32 - row["filter/bad_samples"] and row["grad_norm"] > 0
    assert row["reward/mean"] == pytest.approx(mean(s["reward"] for s in samples), abs=1e-12)


def test_a_sample_that_is_alone_of_its_group_is_left_out(tmp_path):
    """Of some prompts one response alone has a reward, a large one: there is nothing to compare it with."""
    first = 'float("nan") if ground_truth in seen else seen.add(ground_truth) or 50.0'
    seen = 'compute_score.__dict__.setdefault("seen", set())'
    odd = f"{LENGTH} if ord(ground_truth[0]) % 2 else ({first.replace('seen', seen)})"
    skip = {"filter": {"bad_sample": "skip"}}
    (row,), said, samples = trained(tmp_path / "grpo", 1, odd, **skip)
    alone = said.count(50.0)
    assert 0 < alone < 8 and len(said) == 32 and len(samples) == 32 - 4 * alone == 32 - row["filter/bad_samples"]
    assert (
        row["reward/trained"] == pytest.approx(mean(s["reward"] for s in samples), abs=1e-12) and row["grad_norm"] > 0
    )
    assert row["reward/mean"] == pytest.approx(mean(s for s in said if not math.isnan(s)), abs=1e-12), "of all graded"
    # An advantage that compares nothing learns from it.
    alone_too = {"algo": {"advantage": "reinforce_plus_plus"}}
    (row,), _, samples = trained(tmp_path / "alone", 1, odd, **skip, **alone_too)
    assert row["filter/bad_samples"] == 3 * alone and sum(s["reward"] == 50.0 for s in samples) == alone


def losses(world, path: str, updates: int):
    """Returns the metric, and the loss of each optimizer step, summed over its micro-batches."""
    cfg = config(model={"path": path}, algo={"updates_per_step": updates, "advantage": "per_token"})
    policy = build_policy(cfg, world)
    algo, batch, _ = scored_batch(cfg, world, Models(policy), synthetic_batch())
    parts: list[float] = []

    class Watched(PolicyObjective):
        def loss(self, *args):
            result = super().loss(*args)
            parts.append(result.loss.item())
            return result

        def token_loss(self, *args):
            return None

    stats = policy.update(batch, Watched(algo, policy, 1.0, world.data_peers, -1), updates)
    return stats.reduce(lambda x, op: x)["loss"], parts


def test_loss_is_a_mean_over_optimizer_steps(tmp_path):
    path = small_model(tmp_path)
    for updates in (1, 4):
        ((got, parts),) = run_ranks(losses, 1, path, updates)
        assert abs(got) > 1e-3 and got == pytest.approx(math.fsum(parts) / updates, rel=1e-9), updates


def test_entropy_is_of_every_sampled_token_whatever_the_update_leaves_out(tmp_path):
    """The pass of the policy before the update, where there is one, gives it; half of the prompts agree here."""
    body = f"({LENGTH}) if ord(ground_truth[0]) % 2 else 0.5"
    rows = []
    for skip in (False, True):
        algo = {"skip_zero_advantage": skip, "kl_coef": 0.0, "entropy_coef": 0.0}
        (row,), _, _ = trained(tmp_path / str(skip), 1, body, algo=algo)
        rows.append(row)
    assert 0.1 < rows[1]["advantage/nonzero"] < 0.9
    for name in ("entropy/mean", "loss", "grad_norm", "reward/mean", "reward/trained", "response_length/mean"):
        assert rows[0][name] == pytest.approx(rows[1][name], rel=1e-5, abs=1e-7), name
    assert rows[0]["entropy/mean"] > 0.1


def test_the_last_line_keeps_both_of_its_evaluations(tmp_path):
    """One comes before the last step and one after it: the first equals that of a longer run at the same weights."""
    sections = {"run": {"steps": 2}, "eval": {"every": 1, "prompts": 16}, "optimizer": {"schedule": "constant"}}
    longer = sections | {"run": {"steps": 3}}
    run_ranks(train_demo, 1, str(tmp_path / "two"), sections)
    run_ranks(train_demo, 1, str(tmp_path / "three"), longer)
    two, three = metrics(tmp_path / "two"), metrics(tmp_path / "three")
    for name in ("accuracy", "score"):
        assert two[1][f"eval_before/{name}"] == three[1][f"eval/{name}"]
        assert two[1][f"eval/{name}"] == three[2][f"eval_before/{name}"]
        assert f"eval_before/{name}" not in three[1]
    assert two[1]["eval/score"] != two[1]["eval_before/score"]
