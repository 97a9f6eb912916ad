"""How far memory rises."""

import ctypes
import gc
from pathlib import Path

import torch

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """How far memory rises above what is in use on entering, in MB: the process's on CPUs (Linux; `None` elsewhere),
    the allocator's on a GPU."""

    def __init__(self, device: torch.device):
        self._gpu = device if device.type == "cuda" else None
        self.megabytes: int | None = None

    def __enter__(self) -> "Peak":
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)
            self._before = torch.cuda.memory_allocated(self._gpu)
        elif _CLEAR.exists():
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)  # what has been freed would hide what comes next
            _CLEAR.write_text("5", encoding="utf-8")  # resets the high-water mark
            self._before = _status("VmRSS")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._gpu is not None:
            self.megabytes = round((torch.cuda.max_memory_allocated(self._gpu) - self._before) / 2**20)
        elif _CLEAR.exists():
            self.megabytes = round((_status("VmHWM") - self._before) / 2**20)


def _status(name: str) -> int:
    lines = _STATUS.read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
