"""A process group and the device of its collectives."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from spmdrl.spmd.copies import to_device
from spmdrl.spmd.exchange import all_gather_rows, all_reduce


@dataclass(frozen=True)
class Peers:
    """A process group and the device of its collectives."""

    group: dist.ProcessGroup | None
    """The process group, or None for a single rank."""
    device: torch.device

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks. The result is on the device. Collective."""
        return all_reduce(to_device(x, self.device), "sum", self.group)

    def most(self, number: int) -> int:
        """Return the maximum of a number over all ranks. Collective."""
        if self.group is None:
            return number
        # Fill the tensor on the device: a copy from the host would synchronize with it.
        return int(all_reduce(torch.full((), number, device=self.device), "max", self.group))

    def rows(self, x_nK: torch.Tensor) -> list[torch.Tensor]:
        """Gather the rows of every rank, on the device, in rank order. Collective."""
        return all_gather_rows(to_device(x_nK, self.device), self.group)

    @property
    def index(self) -> int:
        """This rank's index in the group."""
        return 0 if self.group is None else dist.get_group_rank(self.group, dist.get_rank())
