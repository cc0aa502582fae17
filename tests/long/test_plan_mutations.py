"""Mutations of published layouts whose plans take more than half a minute each; the others: tests/plans.

Record: all are refused, 9 min on two cores.
"""

import pytest

from tests.plans.test_mutations import PLANNED, name_of, refused


@pytest.mark.parametrize("mutation", [m for m in PLANNED if m.get("long")], ids=name_of)
def test_a_slow_mutation_is_refused_with_its_reason(mutation):
    refused(mutation)
