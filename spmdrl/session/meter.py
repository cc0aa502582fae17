"""Measures memory as the system counts it, for comparison with the table of owners."""

from contextlib import suppress

import psutil
import torch


class Meter:
    """Measures the memory that this rank uses, and its peak between two calls."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last: tuple[int, int] | None = None
        self.lap()

    def lap(self) -> tuple[int, int]:
        """Return the bytes in use, and the most bytes in use since the last call.

        CPU: resident memory of this process, Python and its libraries included. GPU: used memory of the device without
        torch's unused cache; the CUDA context, graphs, NCCL's buffers and other processes are included.
        """
        if self.device.type == "cuda":
            return self._cuda()
        status = {}
        with suppress(OSError), open("/proc/self/status") as f:
            status = dict(line.split(":", 1) for line in f)
        if "VmRSS" not in status:
            now = psutil.Process().memory_info().rss
            return now, now
        now, peak = (int(status[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))
        # 5 resets the high-water mark. If that is forbidden, the peak is that of the whole process.
        with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        return now, max(now, peak)

    def _cuda(self) -> tuple[int, int]:
        """Add the growth of torch's own peak to the device's figure.

        vLLM's sleep unmaps memory that torch still counts as allocated, so torch's sum is too large. Its growth since
        the last call is right: sleep and wake do not change it, and the device's figure contains them.
        """
        torch.cuda.synchronize(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        now = total - free - (torch.cuda.memory_reserved(self.device) - allocated)
        before, start = self.last or (now, allocated)
        grown = torch.cuda.max_memory_allocated(self.device) - start
        torch.cuda.reset_peak_memory_stats(self.device)
        self.last = now, allocated
        return now, max(now, before + grown)
