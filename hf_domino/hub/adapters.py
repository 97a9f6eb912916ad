"""Makes a folder that is ready to be published from a PEFT adapter of a drafter.

It holds weights, configuration, card and checksums: what PEFT reads, and text, but no code. `hf upload` publishes it as
one commit.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError, safe_open

from . import layout
from .cards import adapter_card
from .checksums import write_checksums, wrong_checksums

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
_OPTIONAL = ("training.json",)
_NEEDED = (WEIGHTS, CONFIG, layout.CARD, layout.RECORD, layout.CHECKSUMS)


def stage_adapter(adapter: str | Path, folder: str | Path, record: Mapping[str, Any]) -> dict[str, int]:
    """Writes a complete, checked repo of an adapter. It takes its place only when it is whole.

    Args:
        adapter: the folder that PEFT, or a training run, wrote.
        folder: where the staged repo goes; replaced if it is one already.
        record: the card's record (`adapter_card`); its `drafter.name` becomes the adapter's base model.

    Returns:
        Bytes of each file.

    Raises:
        ValueError: the adapter or the record is not right; the message says what.
        FileExistsError: `folder` is something other than a staged repo.
    """
    adapter, folder = Path(adapter), Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / layout.CHECKSUMS).exists():
        raise FileExistsError(f"{folder} is not empty and not a staged repo; give another folder, or empty it.")
    validate_repo_id(record["repo_id"])
    card = adapter_card(record)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workplace:
        staged = Path(workplace, folder.name)
        staged.mkdir()
        for name in (WEIGHTS, *_OPTIONAL):
            if (adapter / name).exists():
                shutil.copyfile(adapter / name, staged / name)
        _write(staged / CONFIG, _published_config(adapter, record))
        _write(staged / layout.RECORD, dict(record))
        card.save(staged / layout.CARD)
        write_checksums(staged)
        files = inspect_staged_adapter(staged)
        if folder.exists():
            folder.rename(Path(workplace, "replaced"))
        staged.rename(folder)
    return files


def inspect_staged_adapter(folder: str | Path) -> dict[str, int]:
    """Bytes of each file of a staged adapter.

    Raises:
        ValueError: something is missing, does not belong there, is damaged or differs from its checksum.
    """
    folder = Path(folder)
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    problems = [f"{name} is missing." for name in _NEEDED if name not in files]
    problems += [f"{name} has no place there." for name in sorted(files.keys() - {*_NEEDED, *_OPTIONAL})]
    if WEIGHTS in files:
        try:
            with safe_open(folder / WEIGHTS, framework="pt") as weights:
                if not list(weights.keys()):
                    problems.append(f"{WEIGHTS} holds no tensor.")
        except SafetensorError as error:
            problems.append(f"{WEIGHTS} is damaged: {error}.")
    if layout.CHECKSUMS in files:
        problems += wrong_checksums(folder)
    if problems:
        raise ValueError(f"{folder} is refused as an adapter's folder:\n" + "\n".join(f"- {p}" for p in problems))
    return dict(sorted(files.items()))


def _published_config(adapter: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Trained from a folder, an adapter knows that folder's name; users need the drafter's repo."""
    path = adapter / CONFIG
    if not path.exists():
        raise ValueError(f"{adapter} holds no {CONFIG}: it is no PEFT adapter (scripts/train.py --lora makes one).")
    base = record["drafter"]
    # PEFT reads a branch, tag or commit here.
    revision = base["revision"] if base["revision"] != "main" else None
    config = json.loads(path.read_text(encoding="utf-8"))
    return config | {"base_model_name_or_path": base["name"], "revision": revision}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
