"""Training and evaluation prompts must share no text: the check, and what it found."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NGRAM = 13
_SHORTEST_CONTAINED = 5


class Exclusion:
    """Tells which prompts share text with evaluation prompts.

    Text is shared when 13 words in a row are, in the same order, whatever their case and punctuation. Evaluation
    prompts shorter than that count as a whole: inside a prompt, or, below 5 words, as the whole prompt.
    """

    def __init__(self, prompts: Iterable[str]):
        self._long: set[tuple[str, ...]] = set()
        self._short: dict[int, set[tuple[str, ...]]] = {}
        self._whole: set[tuple[str, ...]] = set()
        self.count = 0
        for prompt in prompts:
            found = words(prompt)
            self.count += 1
            if len(found) >= NGRAM:
                self._long.update(_windows(found, NGRAM))
            elif len(found) >= _SHORTEST_CONTAINED:
                self._short.setdefault(len(found), set()).add(tuple(found))
            elif found:
                self._whole.add(tuple(found))

    def shares(self, prompt: str) -> bool:
        """Whether a prompt shares text with an evaluation prompt."""
        found = words(prompt)
        if tuple(found) in self._whole:
            return True
        by_length = {NGRAM: self._long, **self._short}
        return any(window in wanted for size, wanted in by_length.items() for window in _windows(found, size))


def words(text: str) -> list[str]:
    """Lower-case words, without punctuation."""
    return re.findall(r"\w+", text.lower())


def _windows(found: list[str], size: int) -> Iterable[tuple[str, ...]]:
    return (tuple(found[i : i + size]) for i in range(len(found) - size + 1))


def file_digest(path: str | Path) -> dict[str, Any]:
    """Name and SHA-256 of a file, for the record."""
    return {"file": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}
