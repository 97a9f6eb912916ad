"""Prompt files: JSON lines with `prompt`, `turns` or `question`, as written by people, by Spec-Bench and by GSM8K."""

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

# Spec-Bench counts these categories, MT-Bench's own, as one task.
_MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}


@dataclass(frozen=True)
class Prompt:
    """One prompt: what the user says, turn by turn, and the set it is counted in.

    row: all of its line in the file (reference answers, Spec-Bench's ids).
    """

    set: str
    turns: tuple[str, ...]
    row: dict[str, Any] = field(default_factory=dict, compare=False, hash=False)

    @property
    def hash(self) -> str:
        """Identifies the text, so that a record says exactly what it was measured on."""
        return hashlib.sha256("\x1e".join(self.turns).encode()).hexdigest()[:16]


def read_prompts(
    paths: Iterable[str | Path], limit: int | None = None, sets: Collection[str] | None = None
) -> list[Prompt]:
    """Reads prompt files.

    Args:
        paths: JSON lines files.
        limit: the most prompts to take of each set, the first ones.
        sets: the sets to take; all, if not given.

    Raises:
        ValueError: a line that is no prompt, naming file and line; no prompt at all; or none of a set asked for.
    """
    prompts: list[Prompt] = []
    counts: dict[str, int] = {}
    for path in map(Path, paths):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            prompt = _parse(line, path.stem, f"{path.name}, line {number}")
            counts[prompt.set] = counts.get(prompt.set, 0) + 1
            if (limit is None or counts[prompt.set] <= limit) and (sets is None or prompt.set in sets):
                prompts.append(prompt)
    if missing := sorted(set(sets or ()) - set(counts)):
        raise ValueError(f"No prompts of {', '.join(missing)} in the files given; they hold {', '.join(counts)}.")
    if not prompts:
        raise ValueError("There are no prompts in the files given.")
    return prompts


def _parse(line: str, default_set: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not a JSON object with `prompt` or `turns`.")
    turns = row.get("turns") or [row.get("prompt") or row.get("question")]
    if not isinstance(turns, list) or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where} has neither `prompt` (text) nor `turns` (a list of texts).")
    category = row.get("category")
    task = "mt_bench" if category in _MT_BENCH else category
    return Prompt(row.get("set") or task or default_set, tuple(turns), row)


def conversation_ids(tokenizer: PreTrainedTokenizerBase, turns: list[str], answers: list[str]) -> list[int]:
    """Token ids of a conversation up to where the next answer begins: with the chat template, if there is one.

    Args:
        turns: what the user said, the last of them unanswered.
        answers: what the model said after each but the last.
    """
    if tokenizer.chat_template is None:
        said = [text for pair in zip(turns, answers) for text in pair] + turns[-1:]
        return tokenizer("\n".join(said))["input_ids"]
    messages = []
    for i, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        if i < len(turns) - 1:
            messages.append({"role": "assistant", "content": answers[i]})
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return encoded["input_ids"]
