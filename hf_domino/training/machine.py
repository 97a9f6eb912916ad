"""The machine that times and memory figures belong to, and the records that they stand in."""

import ctypes
import gc
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_CPU_INFO = Path("/proc/cpuinfo")


def machine(device: torch.device) -> dict[str, Any]:
    """Processor or accelerator, threads and versions."""
    model = platform.processor() or platform.machine()
    if _CPU_INFO.exists():
        lines = _CPU_INFO.read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def record_at(path: str | Path, head: dict[str, Any], part: str) -> dict[str, Any]:
    """The record at a path, to go on with, or a new one: `head`, with an empty list of `part`.

    Raises:
        ValueError: the record there has another head.
    """
    file = Path(path)
    record = json.loads(json.dumps(head)) | {part: []}
    if not file.exists():
        return record
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if found | {part: []} != record:
        raise ValueError(f"{file} was made with other settings or on another machine; name another, or remove it.")
    return found


def write_record(path: str | Path, record: dict[str, Any]) -> None:
    """Writes a record whole or not at all."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(file)


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
