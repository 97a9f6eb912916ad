"""Prompts: read from files or datasets, or drawn from the target itself."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import read_jsonl
from .generate import Generator, Request


@dataclass
class Prompt:
    """User turns, in order; the target answers each. row: its number among all prompts."""

    turns: list[str]
    row: int = -1


def read_prompts(sources: Iterable[str]) -> Iterator[Prompt]:
    """Prompts of JSONL files (`.gz` too) and of `datasets` names, numbered through.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a row without `prompt`, `turns`, `question`, `instruction` or `messages`.
    """
    number = 0
    for source in sources:
        for row in _rows(source):
            yield Prompt(user_turns(row, source), number)
            number += 1


def _rows(source: str) -> Iterable[dict[str, Any]]:
    if Path(source).is_file():
        return read_jsonl(source)
    if Path(source).suffix in (".jsonl", ".gz", ".json"):
        raise FileNotFoundError(f"No prompt file {source}.")
    from datasets import load_dataset

    name, _, split = source.partition(":")
    return load_dataset(name, split=split or "train")


def user_turns(row: dict[str, Any], source: str = "this file") -> list[str]:
    """What the user says in a row, turn by turn."""
    for key in ("prompt", "turns", "question", "instruction", "messages"):
        value = row.get(key)
        if isinstance(value, str) and value.strip():
            return [value]
        if isinstance(value, list) and value:
            if all(isinstance(turn, str) for turn in value):
                return value
            return [turn["content"] for turn in value if turn["role"] == "user"]
    raise ValueError(f"A row of {source} has none of prompt, turns, question, instruction and messages: {sorted(row)}.")


def user_turn_template(tokenizer: Any) -> tuple[list[int], int]:
    """The tokens before a user's words in the chat template, and the token that follows them.

    Raises:
        ValueError: the template does not show the user's words unchanged, or has nothing after them.
    """
    words = "domino placeholder"
    text = tokenizer.apply_chat_template([{"role": "user", "content": words}], tokenize=False)
    before, found, after = text.partition(words)
    end = tokenizer(after, add_special_tokens=False).input_ids
    if not found or not end:
        raise ValueError("User turns cannot be drawn: the chat template does not frame the user's words with tokens.")
    return tokenizer(before, add_special_tokens=False).input_ids, end[0]


def draw_prompts(
    model: Any,
    tokenizer: Any,
    count: int,
    batch_size: int = 64,
    max_new_tokens: int = 192,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """User turns that the target itself writes after the bare template, sampled at temperature 1; repeats are left out.

    Fewer than `count` come back where the target repeats itself or does not end its turns.
    """
    before, end = user_turn_template(tokenizer)
    stop = {end, tokenizer.eos_token_id}
    generator = Generator(
        model, min(batch_size, count), max_new_tokens, len(before) + max_new_tokens, stop_ids=stop, seed=seed
    )
    seen: set[str] = set()
    # A common prefix must leave a token to be fed; all rows then differ by sampling alone.
    for answer in generator.run((Request(before, 1.0) for _ in range(count)), on_step=on_step):
        text = tokenizer.decode(answer.tokens[:-1], skip_special_tokens=True).strip()
        if answer.finished and len(text.split()) >= 2 and text not in seen:
            seen.add(text)
            yield text
