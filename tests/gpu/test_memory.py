"""Parking on a GPU, where `host` is another place than the device; the rest is tested in tests/ranks/test_memory.py."""

import pytest
import torch

from spmdrl.session.meter import Meter
from spmdrl.spmd.storage import PIECE, Parked

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("place", ["host", "disk"])
def test_parked_bytes_leave_the_gpu_and_return_exactly(place):
    device = torch.device("cuda")
    base = torch.randn(4, PIECE // 4 + 3, device=device)  # 256 MiB in more than four pieces
    row, want = base[2], base.cpu()
    meter = Meter(device)
    before = meter.lap()[0]
    parked = Parked([base, row, torch.ones(3)], place, device)
    away, peak = meter.lap()
    assert parked.bytes == want.nbytes and before - away > 0.95 * want.nbytes and peak >= away
    parked.bring_back()
    assert torch.equal(base.cpu(), want) and torch.equal(row.cpu(), want[2])
    assert abs(meter.lap()[0] - before) < 0.05 * want.nbytes
