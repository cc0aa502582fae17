"""Measures memory as reported by the operating system or CUDA, for comparison with the table of owners."""

from contextlib import suppress

import psutil
import torch


class Meter:
    """Measures this rank's memory usage, and its peak between two calls of `lap`."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last: tuple[int, int] | None = None
        self.lap()

    def lap(self) -> tuple[int, int]:
        """Return the bytes in use now, and the peak since the last call.

        On a CPU, this is the resident memory of the process, including Python and its libraries. On a GPU, it is the
        device's used memory minus torch's unused cache, so it includes the CUDA context, CUDA graphs, NCCL buffers and
        other processes.
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
        # Writing 5 resets the peak (VmHWM). If writing is not permitted, the peak since process start is returned.
        with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        return now, max(now, peak)

    def _cuda(self) -> tuple[int, int]:
        """Measure a GPU. The peak is the memory in use at the last call plus the growth of torch's peak since then.

        vLLM's sleep mode unmaps memory that torch still counts as allocated, so torch's absolute numbers are too large.
        The growth of these numbers since the last call is correct, because sleeping and waking do not change them.
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
