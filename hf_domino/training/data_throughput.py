"""How fast training text comes: the constant, refilled batch of `generate.py` against plain batched `generate`.

    python -m hf_domino.training.data_throughput --prompts prompts.jsonl --record docs/records/data_throughput.json

Both answer the same prompts greedily, in turns, and the tokens of the answers are counted up to their end.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.record import machine, record_at, write_record

from .data import chat_tokens
from .generate import Generator, Request
from .prompts import read_prompts
from .settings import parse_settings
from .targets import load_target

_UNTOLD = ("record", "target", "rounds")  # what does not belong to the figures


@dataclass
class DataThroughputArguments:
    """What `python -m hf_domino.training.data_throughput` takes."""

    prompts: list[str] = field(metadata={"help": "JSONL files of prompts."})
    record: str = field(metadata={"help": "The JSON record to write."})
    target: str | None = field(default=None, metadata={"help": "Path or Hub id; default: the embedded one."})
    dtype: str = field(default="bfloat16", metadata={"help": "The target's dtype."})
    limit: int = field(default=128, metadata={"help": "Use that many prompts, spread over the files."})
    batch_size: int = field(default=32, metadata={"help": "Sequences decoded together."})
    max_new_tokens: int = field(default=96, metadata={"help": "The longest answer."})
    max_length: int = field(default=256, metadata={"help": "Longer prompts with their answers are left out."})
    rounds: int = field(default=3, metadata={"help": "Turns of each, in all; those in the record are kept."})
    device: str = field(default="cpu", metadata={"help": "cpu or cuda."})


def measure(arguments: DataThroughputArguments, target: PreTrainedModel, tokenizer: Any) -> dict[str, Any]:
    """The record: tokens and seconds of each turn, written as they come. Run again, it goes on."""
    texts = [prompt.turns[0] for prompt in read_prompts(arguments.prompts)]
    prompts = [chat_tokens(tokenizer, text)[0] for text in texts]
    prompts = [ids for ids in prompts if len(ids) + arguments.max_new_tokens <= arguments.max_length]
    prompts = prompts[:: max(1, len(prompts) // arguments.limit)][: arguments.limit]
    settings = {key: value for key, value in vars(arguments).items() if key not in _UNTOLD}
    settings |= {"prompts": [Path(name).name for name in arguments.prompts], "answered": len(prompts)}
    record = record_at(arguments.record, {"machine": machine(target.device), "settings": settings}, "rounds")
    while len(record["rounds"]) < arguments.rounds:
        turn = {}
        for name, answer in (("plain", plain), ("refilled", refilled)):
            start = time.perf_counter()
            tokens = answer(arguments, target, prompts)
            turn[name] = {"tokens": tokens, "seconds": round(time.perf_counter() - start, 3)}
        record["rounds"].append(turn)
        write_record(arguments.record, record)
    return record


def speeds(record: dict[str, Any]) -> dict[str, float]:
    """Tokens a second of each way, and their ratio: medians over the turns."""
    rounds = record["rounds"]
    found = {name: median(turn[name]["tokens"] / turn[name]["seconds"] for turn in rounds) for name in rounds[0]}
    return found | {"ratio": found["refilled"] / found["plain"]}


@torch.no_grad()
def plain(arguments: DataThroughputArguments, target: PreTrainedModel, prompts: list[list[int]]) -> int:
    """Answers by `generate`, batch after batch, each of prompts of similar length. Returns the answers' tokens."""
    eos = target.generation_config.eos_token_id
    stops = torch.tensor(eos if isinstance(eos, list) else [] if eos is None else [eos], device=target.device)
    ordered = sorted(prompts, key=len)
    tokens = 0
    for first in range(0, len(ordered), arguments.batch_size):
        batch = ordered[first : first + arguments.batch_size]
        longest = max(map(len, batch))
        rows = [[0] * (longest - len(ids)) + ids for ids in batch]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch]
        output = target.generate(
            torch.tensor(rows, device=target.device),
            attention_mask=torch.tensor(mask, device=target.device),
            do_sample=False,
            max_new_tokens=arguments.max_new_tokens,
        )[:, longest:]
        ended = torch.isin(output, stops).cumsum(-1)
        tokens += int(((ended == 0) | (torch.isin(output, stops) & (ended == 1))).sum())
    return tokens


def refilled(arguments: DataThroughputArguments, target: PreTrainedModel, prompts: list[list[int]]) -> int:
    """The same answers by the constant batch. Returns their tokens."""
    generator = Generator(target, arguments.batch_size, arguments.max_new_tokens, arguments.max_length)
    return sum(len(answer.tokens) for answer in generator.run(Request(ids) for ids in prompts))


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    (arguments,) = parse_settings([DataThroughputArguments], argv)
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    target.to(arguments.device)
    record = measure(arguments, target, tokenizer)
    print(*(f"{name} {value:.2f}" for name, value in speeds(record).items()), sep="  ")
    return record


if __name__ == "__main__":
    main()
