"""SHA256SUMS of a folder, in the format that `sha256sum --check` reads."""

import hashlib
import re
from pathlib import Path

from .layout import CHECKSUMS

_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def sha256(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    return digest.hexdigest()


def write_checksums(folder: Path) -> None:
    """Writes the checksums of all other files of the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKSUMS)
    lines = [f"{sha256(path)}  {path.relative_to(folder).as_posix()}\n" for path in paths]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def wrong_checksums(folder: Path, only_present: bool = False) -> list[str]:
    """What of a folder differs from its SHA256SUMS, a sentence each.

    Args:
        only_present: files that are listed and not there are no fault (of a partial download).
    """
    problems, listed = [], {CHECKSUMS}
    for line in (folder / CHECKSUMS).read_text(encoding="utf-8").splitlines():
        match = _LINE.fullmatch(line)
        if match is None or ".." in Path(match[2]).parts or Path(match[2]).is_absolute():
            return [f"{CHECKSUMS} cannot be read: {line[:80]!r}."]
        path = folder / match[2]
        listed.add(match[2])
        if not path.is_file():
            if not only_present:
                problems.append(f"{match[2]} is listed in {CHECKSUMS} and missing.")
        elif sha256(path) != match[1]:
            problems.append(f"{match[2]} differs from its checksum in {CHECKSUMS}.")
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return problems + [f"{name} is not listed in {CHECKSUMS}." for name in sorted(present - listed)]
