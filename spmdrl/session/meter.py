"""Memory as the system counts it, to hold a table of owners against: resident on a CPU, of the device on a GPU."""

from contextlib import suppress

import psutil
import torch


class Meter:
    """Memory that this rank uses at a moment, and the most since it was last read."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last: tuple[int, int] | None = None
        self.lap()

    def lap(self) -> tuple[int, int]:
        """(bytes in use, most bytes in use since the last call).

        CPU: resident memory of this process, so Python and its libraries too. GPU: what the device says is taken less
        what torch keeps for itself unused, so the CUDA context, graphs and NCCL's buffers too, and other processes'.
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
        # 5: start the high-water mark anew. Where that is forbidden the peak is that of the whole process.
        with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        return now, max(now, peak)

    def _cuda(self) -> tuple[int, int]:
        """vLLM's sleep unmaps memory that torch still counts as allocated, so torch's own sum says too much.

        Its growth since the last call is right: sleep and wake leave it alone, and the device's figure has them.
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
