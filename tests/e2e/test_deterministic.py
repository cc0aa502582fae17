"""`--deterministic`: two runs of one command are equal to the last bit, with every engine that runs here."""

import shutil

import pytest

from spmdrl.config.checks import check
from spmdrl.config.fields import ConfigError
from tests.builds import no_sglang, no_vllm
from tests.e2e.kills import differences, untimed
from tests.e2e.runner import argv
from tests.e2e.warm import run, succeed
from tests.ranks.cases import config

pytestmark = pytest.mark.timeout(600)
STEPS = 3
FLAGS = argv(
    f"--run.steps {STEPS} --rollout.prompts_per_step 8 --rollout.samples_per_prompt 4 --eval.every 2 --eval.prompts 16 "
    "--tracking.trackers jsonl --run.timeout 200 --checkpoint.every 1 --checkpoint.keep 3 "
    "--algo.updates_per_step 2 --algo.kl_coef 0.05 --rollout.max_sequences 6 --rollout.max_new_tokens 24"
)
"""Few sequences run at a time: engines take up others as some end, and sums round by the company."""
ENGINES = {"hf": "", "vllm": no_vllm(), "sglang": no_sglang()}
"""Engine -> reason why it cannot run here; empty where it can."""


@pytest.mark.parametrize("engine", ENGINES)
def test_deterministic_runs_are_bit_equal(engine, tmp_path):
    """Two runs are equal, and so is one that goes on from step 1 of another; its `latest` then points nowhere."""
    if ENGINES[engine]:
        pytest.skip(ENGINES[engine])

    def train(name: str) -> None:
        flags = [*FLAGS, "--deterministic", "--rollout.engine", engine, "--run.dir", tmp_path / name]
        succeed(flags, 280, ranks=2)

    for name in ("one", "other"):
        train(name)
    assert differences(tmp_path / "one", tmp_path / "other") == []
    shutil.copytree(tmp_path / "one", tmp_path / "resumed", symlinks=True)
    for step in range(2, STEPS + 1):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{step}")
    train("resumed")
    assert "checkpoints/step_1: step 1" in (tmp_path / "resumed" / "logs" / "rank_0.log").read_text()
    assert differences(tmp_path / "one", tmp_path / "resumed") == []
    rows = untimed(tmp_path / "one")
    assert len(rows) == STEPS and all(row["grad_norm"] > 0 for row in rows)
    settings = (tmp_path / "one" / "config.yaml").read_text()
    assert "deterministic: true" in settings and "assignment: static" in settings


def test_deterministic_refuses_what_goes_by_the_clock():
    said = run([*FLAGS, "--run.deterministic", "--rollout.assignment", "queue", "--dry-run"])
    assert said.rc == 2 and "--rollout.assignment queue: depends on timing" in "\n".join(said.err), said.show()
    cfg = config(run={"deterministic": True}, rollout={"engine": "sglang", "assignment": "static", "oversample": 1.5})
    with pytest.raises(
        ConfigError,
        match="--rollout.oversample 1.5: with sglang, a separate process, timing decides which groups are cut",
    ):
        check(cfg, 1)
