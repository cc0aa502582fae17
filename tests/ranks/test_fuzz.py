"""A few configurations of the fuzzer of composed settings (`fuzz.py`); tests/long/test_fuzz.py runs hundreds."""

import copy

import pytest
import torch

from spmdrl.config.fields import leaves
from spmdrl.config.schema import Config
from tests.ranks import fuzz

NUMBERS = (1, 4, 6, 9, 13, 22, 27, 31)


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return fuzz.Bench(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("number", NUMBERS)
def test_fuzz_configuration(bench, number):
    case = fuzz.run_case(bench, number, most_without=1)
    print(case)
    assert not case.problems, case


def test_fuzz_draws_the_same_configuration_for_a_number():
    cases = [fuzz.draw(number) for number in range(300)]
    assert cases == [fuzz.draw(number) for number in range(300)]
    drawn = {name for case in cases for name in case.flags}
    assert drawn >= fuzz.SETTINGS.keys(), "each setting takes part"
    assert drawn <= leaves(Config).keys() and {case.layout for case in cases} == set(fuzz.LAYOUTS)


def test_fuzz_takes_away_what_is_refused(bench):
    case = fuzz.Case(0, "2 ranks, sp 2", {"algo.kl_coef": "-1", "reference.path": "OTHER", "algo.entropy_coef": "0.01"})
    fuzz.accepted(bench, case)
    assert "algo.kl_coef" not in case.flags and case.flags["algo.entropy_coef"] == "0.01" and not case.problems
    assert case.refused[0].startswith("1 setting to change:") and "--algo.kl-coef -1.0" in case.refused[0]


def test_fuzz_sees_what_differs():
    one = {
        "rows": [{"step": 1, "loss": 0.5, "microbatches": 2}],
        "weights": {"policy/w": torch.tensor([1.0, 2.0])},
        "before": {"policy/w": torch.tensor([1.0, 1.0])},
    }
    other = copy.deepcopy(one)
    assert not fuzz.differences(one, other, 0.0)
    other["rows"][0] |= {"loss": 0.5 + 1e-7, "microbatches": 3}
    other["weights"]["policy/w"] += 1e-6
    assert not fuzz.differences(one, other, fuzz.TOLERANCE, ("microbatches",))
    assert len(fuzz.differences(one, other, 0.0)) == 3
    other["weights"]["policy/w"] += 1e-3
    (line,) = fuzz.differences(one, other, fuzz.TOLERANCE, ("microbatches",))
    assert line.startswith("weights of policy")
    other["rows"][0]["loss"] = None
    assert any("loss: None instead of 0.5" in line for line in fuzz.differences(one, other, fuzz.TOLERANCE))
