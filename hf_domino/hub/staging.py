"""Makes a folder that is ready to be published from a checkpoint: weights in bf16, code, card, checksums."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import validate_repo_id

from ..drafter.modeling_domino import DominoDraftModel
from . import layout
from .cards import drafter_card
from .checks import FolderReport, inspect_staged
from .checksums import write_checksums


def stage(
    checkpoint: str | Path, folder: str | Path, record: Mapping[str, Any], max_shard_size: str = "5GB"
) -> FolderReport:
    """Writes a complete, checked repo of a drafter.

    It is made beside `folder` and takes its place only when all checks have passed.

    Args:
        checkpoint: the drafter: a folder or a Hub id, in any layout that `DominoDraftModel` loads.
        folder: where the staged repo goes; replaced if it is one already.
        record: the card's record (see cards.py); its `repo_id` is where the drafter will be published.
        max_shard_size: of the weights' files.

    Raises:
        ValueError: the checkpoint, the record or the result is not right; the message says what.
        FileExistsError: `folder` is something other than a staged repo.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / layout.CHECKSUMS).exists():
        raise FileExistsError(f"{folder} is not empty and not a staged repo; give another folder, or empty it.")
    drafter = DominoDraftModel.from_pretrained(str(checkpoint), dtype=torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workplace:
        staged = Path(workplace, folder.name)
        drafter.save_pretrained(staged, max_shard_size=max_shard_size)
        complete(staged, record)
        _check_reloading(drafter, staged)
        if folder.exists():
            folder.rename(Path(workplace, "replaced"))
        staged.rename(folder)
    return inspect_staged(folder)


def complete(folder: str | Path, record: Mapping[str, Any]) -> FolderReport:
    """Adds code, card and checksums, of this version, to a folder that holds config.json and weights in bf16.

    Raises:
        ValueError: the folder or the record is not right; the message says what.
    """
    folder = Path(folder)
    validate_repo_id(record["repo_id"])
    for path in folder.glob("*_domino.py"):
        path.unlink()
    for name, source in layout.CODE_FILES.items():
        shutil.copyfile(source, folder / name)
    generate = layout.GENERATE_SOURCE.read_text(encoding="utf-8").replace("{{repo_id}}", record["repo_id"])
    _write(folder / layout.GENERATE, generate)
    config_path = folder / layout.CONFIG
    config = json.loads(config_path.read_text(encoding="utf-8")) | {"auto_map": layout.AUTO_MAP}
    # Trained from a folder, the drafter knows that folder's name.
    config["domino_config"] = {**(config.get("domino_config") or {}), "target_name": record["target"]["name"]}
    _write(config_path, json.dumps(config, indent=2, sort_keys=True) + "\n")
    _write(folder / layout.RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n")
    drafter_card(config, record).save(folder / layout.CARD)
    write_checksums(folder)
    return inspect_staged(folder).raise_if_refused()


def _check_reloading(drafter: DominoDraftModel, staged: Path) -> None:
    """What users will load is what was trained, in bfloat16."""
    reloaded = DominoDraftModel.from_pretrained(staged, dtype=torch.bfloat16).state_dict()
    changed = [name for name, tensor in drafter.state_dict().items() if not torch.equal(tensor, reloaded[name])]
    if changed:
        raise ValueError(f"Loading the staged drafter changes {', '.join(changed)}; it is not staged.")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
