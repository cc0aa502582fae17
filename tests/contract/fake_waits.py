"""Counts the calls in which a real GPU would make the host wait (`fake_cuda.py`).

While the host waits for work that it gave the device last, it gives no further work, and the device runs dry. So a wait
for an event counts only if the device was given nothing after the event.
"""

import sys
from typing import Any

import torch

from tests.contract.fake_labels import place

SIZES = (
    *("aten.nonzero", "aten.masked_select", "aten.unique", "aten._unique", "aten.bincount", "aten.argwhere"),
    *("aten._local_scalar_dense", "aten.equal.", "aten.is_nonzero"),
)
"""Beginnings of the names of operations that return a number, or a tensor whose size depends on values."""
BY_MASK = ("aten.index.", "aten._unsafe_index.", "aten.index_put", "aten._index_put_impl_")
"""Operations that count the true elements of a mask among their indices, and copy indices from the host."""
DATA = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "new_tensor")
"""Functions that make a tensor from numbers of the host."""
NOT_OURS = ("/torch/", "/tests/contract/fake_", "/contextlib.py", "/functools.py")


class Waits(list):
    """The waits so far, as (kind, place): the place is the innermost line outside of torch, as `file:function`."""

    def add(self, kind: str) -> None:
        """Records a wait of the code that runs."""
        frame: Any = sys._getframe(1)
        while frame.f_back and any(part in frame.f_code.co_filename for part in NOT_OURS):
            frame = frame.f_back
        code = frame.f_code
        self.append((kind, f"{'/'.join(code.co_filename.split('/')[-2:])}:{code.co_name}"))

    def operation(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Records a wait if an operation over tensors on the device makes the host wait."""
        short = name.removeprefix("aten.").partition(".")[0]
        if (
            name.startswith(SIZES)
            or name.startswith("aten.repeat_interleave.Tensor")
            and kwargs.get("output_size") is None
        ):
            self.add(short)
        elif name.startswith(BY_MASK):
            indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
            masks = [x for x in indices if x.dtype in (torch.bool, torch.uint8)]
            # One number under a mask is written without counting.
            fills = "put" in name and args[2].numel() == 1
            if (masks and not fills) or any(place(x) == "cpu" and x.dim() for x in indices):
                self.add(short)

    def copy(self, source: str | None, into: str | None, non_blocking: bool, pinned: bool) -> None:
        """Records a wait for a copy between host and device; `pinned` is about a source on the host."""
        if {source, into} == {"cpu", "cuda"} and not (non_blocking and (pinned or into == "cpu")):
            self.add("to the device" if into == "cuda" else "to the host")
