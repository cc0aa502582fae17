"""Plans of published layouts, which fit, and of their mutations, which are refused: those that tests/plans leaves out.

They are here because a plan takes half a minute or more, and those of one kind go through the same code.
Record: all fit and are refused, about 20 min on two cores.
"""

import pytest

from tests.plans.test_mutations import PLANNED, name_of, refused
from tests.plans.test_published import fits
from tests.unit.test_plan_anchors import ANCHORS

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", [name for name, anchor in ANCHORS.items() if anchor.get("long")])
def test_a_published_layout_fits(name):
    fits(ANCHORS[name])


@pytest.mark.parametrize("mutation", [m for m in PLANNED if m.get("long")], ids=name_of)
def test_a_mutation_is_refused_with_its_reason(mutation):
    refused(mutation)
