"""Law 6: every fault in some phase ends the whole job in time, by name, with a flight record and nothing left.

A selection that touches every fault and every phase; all of them in all phases are tests/long/test_faults.py.
"""

import random

import pytest

from tests.e2e.faults import FAULTS, PHASES, run_fault
from tests.e2e.runner import Job, argv

pytestmark = pytest.mark.timeout(300)
SEED = 4


def selection() -> list[tuple[str, str]]:
    """Selects a phase for each fault; phases repeat only once all have come, and the remaining ones get `exception`."""
    draw, free, chosen = random.Random(SEED), list(PHASES), []
    for name, fault in sorted(FAULTS.items(), key=lambda item: len(item[1].phases)):
        fits = [phase for phase in fault.phases if phase in free] or list(fault.phases)
        phase = draw.choice(fits)
        chosen.append((name, phase))
        if phase in free:
            free.remove(phase)
    return chosen + [("exception", phase) for phase in free]


def test_selection_touches_every_fault_and_every_phase():
    chosen = selection()
    assert {fault for fault, _ in chosen} == set(FAULTS) and {phase for _, phase in chosen} == set(PHASES)


@pytest.mark.parametrize(("fault", "phase"), selection())
def test_fault_ends_the_job_by_name(fault, phase, tmp_path):
    outcome = run_fault(fault, phase, tmp_path / "job")
    print(f"{fault} in {phase}: {outcome.seconds:.1f} s")
    assert outcome.problems() == [], outcome.ended.show()


def test_lockstep_planted_collective_is_named_by_file_and_line_on_every_rank(tmp_path):
    """A user's loss holds `if rank == 0: all_reduce`, and the run is in debug mode."""
    loss = tmp_path / "own_loss.py"
    loss.write_text(
        "import torch\nimport torch.distributed as dist\n\n\ndef loss(x):\n    if dist.get_rank() == 0:\n"
        "        dist.all_reduce(torch.ones(5))\n    return torch.where(x.mask, -x.advantages * x.logp, 0.0), {}\n"
    )
    folder = tmp_path / "run"
    flags = argv(
        "--rollout.engine hf --run.steps 2 --rollout.prompts_per_step 4 --rollout.samples_per_prompt 4 --eval.every 0 "
        "--tracking.trackers jsonl --run.timeout 60 --run.lockstep_debug"
    )
    job = Job([*flags, "--algo.loss", f"{loss}:loss", "--run.dir", folder], ranks=2)
    try:
        ended = job.wait(200)
    finally:
        job.kill()
    assert ended.rc != 0 and not ended.left and len(ended.messages) == 1, ended.show()
    assert "LockstepError" in ended.messages[0] and "own_loss.py:7 allreduce" in ended.messages[0], ended.show()
    for rank in range(2):
        log = (folder / "logs" / f"rank_{rank}.log").read_text()
        assert "LockstepError: ranks differ at collective" in log, log
        assert f"/{loss.name}:7 allreduce" in log and "rank 0: " in log and "rank 1: " in log, log
