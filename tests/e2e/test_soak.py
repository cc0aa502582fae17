"""200 steps of a small run: memory, open files and threads stay as they are after the warm-up."""

import pytest

from tests.long.test_soak import check, soak


@pytest.mark.timeout(600)
def test_soak_200_steps(tmp_path):
    check(soak(tmp_path / "run", 200, limit=500, every=0.2))


@pytest.mark.parametrize(
    "broken",
    [
        {"mib": 100.0, "growth": 0.03, "files": [9, 9], "threads": [4, 4]},
        {"mib": 100.0, "growth": 0.0, "files": [9, 10], "threads": [4, 4]},
        {"mib": 100.0, "growth": 0.0, "files": [9, 9], "threads": [4, 5]},
    ],
)
def test_soak_check_can_fail(broken):
    with pytest.raises(AssertionError):
        check({"ranks": 1, "processes": {"rank 0.0": broken}, "process_count": [1, 1]})
    with pytest.raises(AssertionError):
        check({"ranks": 1, "processes": {}, "process_count": [0, 0]})
