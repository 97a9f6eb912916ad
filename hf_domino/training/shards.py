"""Writing shards of training text (the format is data.py's), so that a killed run loses one shard at most."""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from .data import PROVENANCE, SHARD_PATTERN
from .objective import Teacher


class Text(NamedTuple):
    """A sequence of training text: prompt and answer as token ids.

    states: tapped states `[S, M·H]` or `[S - 1, M·H]`, if wanted. teacher: the target's distributions of the answer's
    tokens, `[n, k]`, if wanted.
    """

    prompt: list[int]
    answer: list[int]
    states: torch.Tensor | None = None
    teacher: Teacher | None = None

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


class ShardWriter:
    """Collects sequences and writes them shard by shard, with `data.json` kept up to date.

    Args:
        folder: made if need be; shards that are there already are kept and counted.
        settings: what the data depends on; must equal what the folder's `data.json` holds.
        shard_tokens: a shard is written when it holds this many tokens.

    Raises:
        ValueError: the folder holds data made with other settings.
    """

    def __init__(self, folder: str | Path, settings: dict[str, Any], shard_tokens: int = 65536):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.shard_tokens = shard_tokens
        self.settings = json.loads(json.dumps(settings))
        self.counts = {"sequences": 0, "tokens": 0, "supervised_tokens": 0}
        self.extra: dict[str, Any] = {}
        self._sequences: list[tuple[Text, int]] = []
        self.done: set[int] = set()
        self._check_settings()
        self._count_existing()

    def _check_settings(self) -> None:
        path = self.folder / PROVENANCE
        if path.exists():
            found = json.loads(path.read_text(encoding="utf-8"))["settings"]
            changed = sorted(k for k in found.keys() | self.settings.keys() if found.get(k) != self.settings.get(k))
            if changed:
                raise ValueError(
                    f"{self.folder} holds data made with other settings ({', '.join(changed)}). Give the same settings "
                    "to go on, or another folder to start anew."
                )
        elif list(self.folder.glob(SHARD_PATTERN)):
            raise ValueError(f"{self.folder} holds shards of unknown origin (no {PROVENANCE}); use another folder.")

    def _count_existing(self) -> None:
        for file in sorted(self.folder.glob(SHARD_PATTERN)):
            with safe_open(file, framework="pt") as shard:
                mask, rows = shard.get_tensor("loss_mask"), shard.get_tensor("source_rows").tolist()
            self._count(len(rows), mask.numel(), int(mask.sum()))
            self.done.update(rows)
        self._next = len(list(self.folder.glob(SHARD_PATTERN)))

    def _count(self, sequences: int, tokens: int, supervised: int) -> None:
        self.counts["sequences"] += sequences
        self.counts["tokens"] += tokens
        self.counts["supervised_tokens"] += supervised

    def add(self, sequences: list[Text], source_row: int) -> None:
        """Adds the sequences of one prompt: they come into the same shard, so that it is done or not."""
        self._sequences += [(Text(*text), source_row) for text in sequences]
        if sum(text.length for text, _ in self._sequences) >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes what has been collected as a shard, and `data.json`."""
        if self._sequences:
            self._write()
        record = {"settings": self.settings, "counts": self.counts, **self.extra}
        _replace(self.folder / PROVENANCE, lambda path: path.write_text(json.dumps(record, indent=2) + "\n", "utf-8"))

    def _write(self) -> None:
        ids, masks, offsets, states, teacher_ids, teacher_probs, rows = [], [], [0], [], [], [], []
        for text, row in self._sequences:
            ids += text.prompt + text.answer
            masks += [0] * len(text.prompt) + [1] * len(text.answer)
            offsets.append(len(ids))
            rows.append(row)
            if text.states is not None:
                # The last token's state is never a context; a row of zeros keeps the lengths equal.
                states.append(F.pad(text.states.bfloat16(), (0, 0, 0, text.length - text.states.shape[0])))
            if text.teacher is not None:
                # The answer's first token was chosen after the prompt's last; nothing follows the answer's last.
                around = (0, 0, len(text.prompt) - 1, 1)
                teacher_ids.append(F.pad(text.teacher.ids.int(), around))
                teacher_probs.append(F.pad(text.teacher.probs.bfloat16(), around))
        tensors = {
            "input_ids": torch.tensor(ids, dtype=torch.int32),
            "loss_mask": torch.tensor(masks, dtype=torch.uint8),
            "offsets": torch.tensor(offsets),
            "source_rows": torch.tensor(rows),
        }
        if states:
            tensors["tapped_states"] = torch.cat(states)
        if teacher_ids:
            tensors |= {"teacher_ids": torch.cat(teacher_ids), "teacher_probs": torch.cat(teacher_probs)}
        _replace(self.folder / SHARD_PATTERN.replace("*", f"{self._next:05d}"), lambda path: save_file(tensors, path))
        self._next += 1
        self._count(len(rows), len(ids), sum(masks))
        self.done.update(rows)
        self._sequences = []


def _replace(path: Path, write) -> None:
    """Writes beside the file and renames, so that it is there whole or not at all."""
    unfinished = path.with_name(path.name + ".tmp")
    write(unfinished)
    os.replace(unfinished, path)
