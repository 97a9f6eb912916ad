"""The benchmark: methods side by side on the same prompts, one after another on each, to one record."""

import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from hf_domino.record import write_record

from .dispatches import count_round, count_straightforward_round
from .measuring import Measurement, measure
from .methods import Contenders, Method, Unavailable, build_method
from .near_ties import near_tie
from .prompts import Prompt, conversation_ids
from .quality import check_program
from .record import PartialResults, environment
from .summary import summarise

DEFAULT_METHODS = (
    "plain",
    "domino",
    "domino-chain",
    "base",
    "native-dflash",
    "prompt-lookup",
    "assisted",
    "plain-compiled",
    "domino-compiled",
)


@dataclass
class Settings:
    """What is measured. All of it stands in the record.

    methods: names as in `methods.build_method`; `plain` is always measured. temperature: 0 for greedy.
    batch_size: prompts per call; above 1, only the first turn of each prompt is used. run_code: whether answers to
    prompts that come with a test are run. repeats: each call is made so often, and the one of median time counts.
    """

    methods: list[str] = field(default_factory=lambda: list(DEFAULT_METHODS))
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0
    batch_size: int = 1
    repeats: int = 1
    run_code: bool = False
    labels: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.methods = list(dict.fromkeys(["plain", *self.methods]))
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens must be at least 2: the prefill gives one, got {self.max_new_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative, got {self.temperature}.")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}.")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}.")

    @property
    def generation(self) -> dict[str, Any]:
        """The arguments of `generate` that all methods share."""
        sampling = {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}
        return {"max_new_tokens": self.max_new_tokens, **sampling}


def run(
    contenders: Contenders, prompts: list[Prompt], settings: Settings, output: str | Path, seconds: float | None = None
) -> dict[str, Any]:
    """Measures, and writes the record.

    For each prompt the methods follow one another, in an order that is drawn anew, so that drifts of the machine meet
    all alike. The first call of each method, on the longest prompt, is left out. A prompt that is finished is kept
    in a file beside the record; the same call again goes on after it.

    Args:
        seconds: begin no further prompt after so long; `None`: measure all of them.

    Returns:
        The record, with the rows of single calls under "rows".
    """
    surroundings = environment(contenders.model)
    identity = {
        "settings": asdict(settings),
        "prompts": _hashes(prompts),
        "environment": {key: value for key, value in surroundings.items() if key != "date"},
    }
    partial = PartialResults(output, identity)
    started = time.monotonic()
    methods, unavailable = _available(contenders, prompts, settings)
    units = _units(prompts, settings.batch_size)
    rows: list[dict[str, Any]] = []
    finished: list[Prompt] = []
    for number, unit in enumerate(tqdm(units, desc="prompts", unit="prompt")):
        name = f"{number}:{'+'.join(prompt.hash for prompt in unit)}"
        if rows and seconds is not None and time.monotonic() - started > seconds:
            break
        if name not in partial.finished:
            partial.add(name, _measure_unit(name, unit, contenders, methods, settings))
        rows += partial.finished[name]
        finished += unit
    drafter = contenders.drafters.get("")
    record: dict[str, Any] = {
        "environment": surroundings,
        "settings": asdict(settings),
        "prompts": _hashes(finished),
        "cost_of_a_draft_round": None
        if drafter is None
        else {
            "domino": asdict(count_round(contenders.model, drafter)),
            "straightforward": asdict(count_straightforward_round(contenders.model, drafter)),
        },
        "methods": summarise(rows, greedy=settings.temperature == 0)
        | {name: {"unavailable": reason} for name, reason in unavailable.items()},
        "rows": rows,
    }
    for name, method in methods.items():
        if method.note:
            record["methods"][name]["note"] = method.note
    write_record(output, record)
    partial.discard()
    return record


def _hashes(prompts: list[Prompt]) -> dict[str, list[str]]:
    hashes: dict[str, list[str]] = {}
    for prompt in prompts:
        hashes.setdefault(prompt.set, []).append(prompt.hash)
    return hashes


def _units(prompts: list[Prompt], batch_size: int) -> list[list[Prompt]]:
    """What is generated together: prompts of one set."""
    by_set: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_set.setdefault(prompt.set, []).append(prompt)
    return [group[i : i + batch_size] for group in by_set.values() for i in range(0, len(group), batch_size)]


def _available(
    contenders: Contenders, prompts: list[Prompt], settings: Settings
) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that work here, warmed up, and why the others do not."""
    batch = [conversation_ids(contenders.tokenizer, [prompt.turns[0]], []) for prompt in prompts]
    batch = sorted(batch, key=len)[-settings.batch_size :]
    methods, unavailable = {}, {}
    for name in tqdm(settings.methods, desc="warm-up", unit="method"):
        try:
            method = build_method(name, contenders)
        except Unavailable as reason:
            unavailable[name] = str(reason)
            continue
        try:
            measure(contenders.model, method, batch, settings.seed, **settings.generation)
        except Exception as error:  # whatever transformers refuses a method with belongs in the record
            if name.partition("[")[0].partition(":")[0] in ("plain", "domino"):
                raise
            unavailable[name] = f"{type(error).__name__}: {error}"
            continue
        methods[name] = method
    return methods, unavailable


def _measure_unit(
    name: str, unit: list[Prompt], contenders: Contenders, methods: dict[str, Method], settings: Settings
) -> list[dict[str, Any]]:
    turns = len(unit[0].turns) if len(unit) == 1 and settings.batch_size == 1 else 1
    order = random.Random(f"{settings.seed}:{name}")
    rows: list[dict[str, Any]] = []
    answers: list[Any] = []
    for turn in range(turns):
        batch = [conversation_ids(contenders.tokenizer, list(p.turns[: turn + 1]), answers) for p in unit]
        calls: dict[str, list[Measurement]] = {method: [] for method in methods}
        for _ in range(settings.repeats):
            for method in order.sample(list(methods), len(methods)):
                measured = measure(contenders.model, methods[method], batch, settings.seed, **settings.generation)
                calls[method].append(measured)
        middle = {method: sorted(made, key=_seconds)[len(made) // 2] for method, made in calls.items()}
        plain = middle["plain"]
        for method, chosen in middle.items():
            row = _row(name, unit, turn, method, chosen, plain, batch, contenders, settings)
            if settings.repeats > 1:
                row["seconds_of_repeats"] = list(map(_seconds, calls[method]))
            rows.append(row)
        # All methods go on from the plain answer, so that they meet the same prompt in the next turn too.
        answers.append(contenders.tokenizer.decode(plain.tokens[0], skip_special_tokens=True))
    return rows


def _seconds(measured: Measurement) -> float:
    return measured.seconds


def _row(
    name: str,
    unit: list[Prompt],
    turn: int,
    method: str,
    measured: Measurement,
    plain: Measurement,
    batch: list[list[int]],
    contenders: Contenders,
    settings: Settings,
) -> dict[str, Any]:
    texts = [contenders.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in measured.tokens]
    row = {
        "unit": name,
        "method": method,
        "set": unit[0].set,
        "turn": turn,
        "prompt_tokens": sum(map(len, batch)),
        "tokens": sum(map(len, measured.tokens)),
        "seconds": measured.seconds,
        "drafted": measured.drafted,
        "accepted": measured.accepted,
        "draft_seconds": measured.draft_seconds,
        "verify_seconds": measured.verify_seconds,
        "identical": [ours == reference for ours, reference in zip(measured.tokens, plain.tokens, strict=True)],
        "difference": None,
        "text": texts[0] if len(texts) == 1 else texts,
    }
    if settings.temperature == 0:
        found = (near_tie(contenders.model, *parts) for parts in zip(batch, plain.tokens, measured.tokens, strict=True))
        row["difference"] = next((difference for difference in found if difference), None)
    if len(unit) == 1:
        source = unit[0].row
        row |= {key: source[key] for key in ("question_id", "category") if key in source}
        if turn == 0 and isinstance(source.get("answer"), str) and "####" in source["answer"]:
            row["answer"] = source["answer"]
        if turn == 0 and settings.run_code and "test" in source:
            row["passed"] = check_program(source, texts[0])
    return row
