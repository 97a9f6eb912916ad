"""Records: JSON files of what was measured, and the machine that their times belong to."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

_CPU_INFO = Path("/proc/cpuinfo")


def machine(device: torch.device) -> dict[str, Any]:
    """Processor or accelerator, threads and versions."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerate": _version("accelerate"),
        "system": f"{platform.system()} {platform.machine()}",
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
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(file)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
