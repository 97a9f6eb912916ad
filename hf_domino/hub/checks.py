"""Looks a drafter's folder over without running its code and without reading its weights."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..drafter.checkpoint_domino import check_weight_files
from ..drafter.configuration_domino import DominoConfig
from ..drafter.modeling_domino import DominoDraftModel
from . import layout
from .checksums import wrong_checksums

_MAX_TEXT_BYTES = 4 * 2**20
_VOCABULARY = {"d2t", "t2d"}  # integers and truths: no weights
_DTYPES = {"F64", "F32", "F16", "BF16"}


@dataclass
class FolderReport:
    """What a folder holds.

    files: bytes by path. dtypes: of the weights, as safetensors names them. parameters: their number.
    problems: what keeps it from being used or published, each a sentence.
    """

    folder: Path
    files: dict[str, int] = field(default_factory=dict)
    config: DominoConfig | None = None
    dtypes: set[str] = field(default_factory=set)
    parameters: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """All files, in bytes."""
        return sum(self.files.values())

    def raise_if_refused(self) -> "FolderReport":
        """Raises:
        ValueError: there are problems; the message lists them.
        """
        if self.problems:
            listed = "\n".join(f"- {problem}" for problem in self.problems)
            raise ValueError(f"{self.folder} is refused as a drafter's folder:\n{listed}")
        return self


def inspect_folder(folder: str | Path) -> FolderReport:
    """Whether a folder, possibly a stranger's, holds a drafter and nothing else.

    Names and sizes are looked at first, then config.json, then the headers of the weights against it. No code is run,
    no pickle opened, and memory stays small whatever the files claim.
    """
    report = FolderReport(Path(folder))
    _list_files(report)
    config = _read_config(report)
    if config is not None:
        _check_auto_map(report, config)
        _build_config(report, config)
    if report.config is not None:
        _check_weights(report, report.config)
    return report


def inspect_staged(folder: str | Path) -> FolderReport:
    """`inspect_folder`, and that the folder is complete and exactly what this version would publish."""
    report = inspect_folder(folder)
    problems = report.problems
    if report.dtypes - {"BF16"}:
        problems.append(f"Weights are {', '.join(sorted(report.dtypes))}; publish bfloat16 only.")
    for name, source in layout.CODE_FILES.items():
        if name not in report.files:
            problems.append(f"{name} is missing: without the package, the drafter could not be loaded.")
        elif (report.folder / name).read_bytes() != source.read_bytes():
            problems.append(f"{name} is not this version's; stage the folder again.")
    for name in sorted(filter(layout.is_code, report.files)):
        if name not in layout.CODE_FILES and name != layout.GENERATE:
            problems.append(f"{name} is not part of this version; stage the folder again.")
    for name in (layout.GENERATE, layout.CARD, layout.RECORD, layout.CHECKSUMS):
        if name not in report.files:
            problems.append(f"{name} is missing; stage the folder again.")
    for path in report.folder.rglob("*"):
        if path.is_symlink():
            problems.append(f"{path.relative_to(report.folder)} is a link, and would be published as what it links to.")
    if layout.CHECKSUMS in report.files:
        problems += wrong_checksums(report.folder)
    return report


def _list_files(report: FolderReport) -> None:
    for path in sorted(report.folder.rglob("*")):
        if path.is_dir():
            continue
        name = path.relative_to(report.folder).as_posix()
        report.files[name] = path.stat().st_size
        if layout.WEIGHTS.fullmatch(name):
            continue
        if not layout.is_data(name) and not layout.is_code(name):
            report.problems.append(f"{name} has no place there: {_why_not(path)}.")
        elif report.files[name] > _MAX_TEXT_BYTES:
            report.problems.append(f"{name} has {report.files[name]:,} bytes, too many for what it should be.")
    if not any(layout.WEIGHTS.fullmatch(name) for name in report.files):
        report.problems.append("There are no weights: model.safetensors, or its shards, is missing.")


def _why_not(path: Path) -> str:
    if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"):
        return "pickles can run code when they are opened, and optimizer state is not published"
    if path.suffix in (".py", ".so", ".sh", ".ipynb", ".jinja", ".dll", ".exe"):
        return "it is code, and not code of this project"
    return "it is neither weights, nor configuration, nor card of a drafter"


def _read_config(report: FolderReport) -> dict[str, Any] | None:
    if layout.CONFIG not in report.files:
        report.problems.append("config.json is missing.")
        return None
    if report.files[layout.CONFIG] > _MAX_TEXT_BYTES:
        return None
    try:
        config = json.loads((report.folder / layout.CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        report.problems.append(f"config.json cannot be read: {error}.")
        return None
    if not isinstance(config, dict):
        report.problems.append("config.json is not an object.")
        return None
    return config


def _check_auto_map(report: FolderReport, config: dict[str, Any]) -> None:
    auto_map = config.get("auto_map") or {}
    if auto_map and auto_map != layout.AUTO_MAP:
        report.problems.append(f"config.json's auto_map names code that is not this project's: {auto_map}.")


def _build_config(report: FolderReport, config: dict[str, Any]) -> None:
    try:
        report.config = DominoConfig.from_dict(config)
    # A hostile file can break transformers' own reading of it anywhere.
    except Exception as error:
        report.problems.append(f"config.json: {error}")


def _check_weights(report: FolderReport, config: DominoConfig) -> None:
    names = [name for name in report.files if layout.WEIGHTS.fullmatch(name)]
    if not names:
        return
    paths = [str(report.folder / name) for name in names]
    try:
        with torch.device("meta"):
            expected = DominoDraftModel(config).state_dict()
        check_weight_files(paths, expected, config.head_type)
    except (ValueError, RuntimeError) as error:
        report.problems.append(str(error))
        return
    _check_index(report, names)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            weights = set(file.keys()) - _VOCABULARY
            report.dtypes |= {file.get_slice(name).get_dtype() for name in weights}
    report.parameters = sum(tensor.numel() for name, tensor in expected.items() if name not in _VOCABULARY)
    if report.dtypes - _DTYPES:
        report.problems.append(f"Weights are {', '.join(sorted(report.dtypes))}; a drafter's are floating point.")


def _check_index(report: FolderReport, names: list[str]) -> None:
    if layout.INDEX not in report.files:
        if names != ["model.safetensors"]:
            report.problems.append(f"The weights are in shards and {layout.INDEX} is missing.")
        return
    try:
        shards = set(json.loads((report.folder / layout.INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        report.problems.append(f"{layout.INDEX} cannot be read: {error!r}.")
        return
    if shards != set(names):
        report.problems.append(f"{layout.INDEX} names {sorted(map(str, shards))}, the folder holds {names}.")
