"""Malformed settings, data files and model folders: a clear message or a correct read; `tests/long` has 500 of them."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit import malformed

EXAMPLES = {"settings": 30, "data": 25, "model": 10}


@pytest.mark.parametrize("kind", EXAMPLES)
def test_malformed_input_is_read_or_refused_by_name(kind):
    @settings(
        max_examples=EXAMPLES[kind],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def run(data):
        malformed.one_case(data.draw, kind)

    run()
    # It must not be all refused, nor all accepted.
    assert malformed.outcomes[kind, "refused"] >= EXAMPLES[kind] // 10


def test_malformed_judge_can_fail():
    """The cases above rely on this: a library's own error, a message without a name and a hang are faults."""

    def raised(error):
        raise error

    named = malformed.re.compile("--flag")
    assert malformed.judged(lambda: raised(ValueError("--flag x: no")), ValueError, named) == "refused"
    for error in (KeyError("x"), ValueError("no"), RecursionError("x"), SystemExit(1)):
        with pytest.raises(AssertionError):
            malformed.judged(lambda error=error: raised(error), ValueError, named)
    with pytest.raises(malformed.Hang), malformed.limited(1):
        while True:
            pass
