"""The record's parts that do not come from measuring: environment, settings, and results kept across interruptions."""

import hashlib
import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_domino.record import machine


def environment(model: PreTrainedModel) -> dict[str, Any]:
    """Machine and versions that the times belong to."""
    from hf_domino import __version__

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hf_domino": __version__,
        **machine(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention": model.config._attn_implementation,
    }


class PartialResults:
    """Results that survive an interruption: one JSON line per finished unit, next to the record to come.

    Args:
        record_path: where the record will be written; the partial file stands beside it.
        identity: all that results depend on. Results of another identity are not continued.

    Raises:
        ValueError: the partial file was begun with other settings.
    """

    def __init__(self, record_path: str | Path, identity: dict[str, Any]):
        self.path = Path(f"{record_path}.partial.jsonl")
        fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        self.finished: dict[str, list[dict[str, Any]]] = {}
        if not self.path.exists():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps({"identity": fingerprint}) + "\n", encoding="utf-8")
            return
        lines = self.path.read_text(encoding="utf-8").splitlines()
        if not lines or json.loads(lines[0]).get("identity") != fingerprint:
            raise ValueError(
                f"{self.path} holds results of another run (other models, prompts or settings). Delete it to start "
                "afresh, or choose another --output."
            )
        kept = [lines[0]]
        for line in lines[1:]:
            try:
                unit = json.loads(line)
            except json.JSONDecodeError:  # cut off while being written
                continue
            self.finished[unit["unit"]] = unit["rows"]
            kept.append(line)
        self.path.write_text("\n".join(kept) + "\n", encoding="utf-8")

    def add(self, unit: str, rows: list[dict[str, Any]]) -> None:
        """Keeps the rows of a finished unit."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"unit": unit, "rows": rows}) + "\n")
        self.finished[unit] = rows

    def discard(self) -> None:
        """To be called when the record is written."""
        self.path.unlink()
