"""Named studies: the benchmark over one variable, as a record of points that the report draws.

Variables of the drafter become methods of one benchmark, interleaved; prompt lengths become sets of prompts; those of
the call (temperature, batch size) a benchmark each.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.record import write_record

from . import benchmark
from .methods import Contenders
from .prompts import Prompt
from .variants import variant

Value = float | str
Points = list[dict[str, Any]]


@dataclass(frozen=True)
class Study:
    """question: what the study answers. x_label: the variable. values: the ones it goes through; empty: the labels of
    the drafters given. run: (contenders, prompts, values, settings, output) -> points and a record's environment."""

    question: str
    x_label: str
    values: tuple[Value, ...]
    run: Callable[..., tuple[Points, dict[str, Any]]]
    log_x: bool = False


def run_study(
    name: str,
    contenders: Contenders,
    prompts: list[Prompt],
    output: str | Path,
    values: Sequence[float] | None = None,
    max_new_tokens: int = 128,
    seed: int = 0,
    repeats: int = 1,
) -> dict[str, Any]:
    """Runs a study and writes its record.

    Args:
        values: of the variable, instead of the study's own.
        repeats: each call is made so often, and the one of median time counts.

    Raises:
        ValueError: an unknown study, or one over drafters without any labelled ones.
    """
    if name not in STUDIES:
        raise ValueError(f"There is no study {name!r}; there are {', '.join(STUDIES)}.")
    study = STUDIES[name]
    chosen: list[Value] = list(values or study.values)
    if not study.values:
        if values:
            raise ValueError(f"The study {name!r} compares the drafters given, so it takes no values.")
        chosen = [label for label in contenders.drafters if label]
        if not chosen:
            raise ValueError(f"The study {name!r} compares drafters: give them as --drafters LABEL=PATH.")
    settings = benchmark.Settings(max_new_tokens=max_new_tokens, seed=seed, repeats=repeats)
    # 8.0 and 8 are the same setting; the drafter's configuration asks for integers.
    chosen = [int(x) if isinstance(x, float) and x.is_integer() else x for x in chosen]
    points, environment = study.run(contenders, prompts, chosen, settings, output)
    record = {
        "study": name,
        "question": study.question,
        "x_label": study.x_label,
        "log_x": study.log_x,
        "environment": environment,
        "settings": {key: value for key, value in asdict(settings).items() if key != "methods"},  # see the points
        "prompts": {label: [p.hash for p in prompts if p.set == label] for label in {p.set: None for p in prompts}},
        "points": points,
    }
    write_record(output, record)
    return record


def _over_methods(*patterns: str):
    """A benchmark with a method for each value: `{}` in the pattern. Its name in the study is the pattern's kind."""

    def run(contenders, prompts, values, settings, output):
        names = {
            (x, pattern.partition("[")[0].partition(":")[0]): pattern.format(x) for x in values for pattern in patterns
        }
        record = _benchmark(contenders, prompts, settings, output, methods=list(names.values()))
        points = [
            {
                "x": x,
                "methods": {
                    kind: record["methods"][name]["overall"]
                    for (value, kind), name in names.items()
                    if value == x and "overall" in record["methods"][name]
                },
            }
            for x in values
        ]
        return points, record["environment"]

    return run


def _over_settings(field: str, methods: tuple[str, ...]):
    """A benchmark for each value of a setting."""

    def run(contenders, prompts, values, settings, output):
        points, environment = [], {}
        for x in values:
            record = _benchmark(contenders, prompts, settings, f"{output}.{x}", methods=list(methods), **{field: x})
            points.append({"x": x, "methods": _measured(record, "overall", methods)})
            environment = record["environment"]
        for x in values:
            Path(f"{output}.{x}").unlink()
        return points, environment

    return run


def _over_prompt_lengths(methods: tuple[str, ...]):
    """A set of prompts for each length in tokens, made of the given ones."""

    def run(contenders, prompts, values, settings, output):
        made = [prompt for length in values for prompt in prompts_of_length(contenders, prompts, int(length))]
        record = _benchmark(contenders, made, settings, output, methods=list(methods))
        points = [
            {
                "x": x,
                "methods": {
                    name: record["methods"][name]["sets"][str(int(x))]
                    for name in methods
                    if "sets" in record["methods"][name]
                },
            }
            for x in values
        ]
        return points, record["environment"]

    return run


def prompts_of_length(contenders: Contenders, prompts: list[Prompt], length: int) -> list[Prompt]:
    """Each prompt with the texts of the others before it, as many tokens as asked, in the set named by the length.

    The question itself stays whole at the end, so that the answers stay comparable.
    """
    tokenizer = contenders.tokenizer
    made = []
    for i, prompt in enumerate(prompts):
        question = prompt.turns[0]
        missing = length - len(tokenizer(question, add_special_tokens=False)["input_ids"])
        filler = "\n\n".join(other.turns[0] for other in prompts[i + 1 :] + prompts[:i]) or question
        ids = tokenizer(filler + "\n\n", add_special_tokens=False)["input_ids"]
        if missing > 0:
            ids = (ids * (missing // len(ids) + 1))[:missing]
            question = f"{tokenizer.decode(ids)}\n\n{question}"
        made.append(Prompt(str(length), (question,), prompt.row))
    return made


def _over_fixed_lengths(contenders, prompts, values, settings, output):
    """Drafts as long as they pay, and for each value drafts of always so many tokens, all in one benchmark.

    A fixed draft is the `n` most probable nodes, at most `n` deep: never worse than a chain of `n`. What drafts as long
    as it pays has no length; it stands at every point, as a level line.
    """
    drafter = contenders.drafters[""]
    fixed = {str(n): fixed_length(drafter, n) for n in values}
    names = {n: f"domino:{n}" for n in values}
    record = _benchmark(
        replace(contenders, drafters={"": adaptive(drafter)} | fixed),
        prompts,
        settings,
        output,
        methods=["domino", *names.values()],
    )
    points = []
    for n, name in names.items():
        kinds = {"always that many": name, "as many as pay": "domino", "plain": "plain"}
        measured = {kind: record["methods"][method] for kind, method in kinds.items()}
        points.append(
            {
                "x": n,
                "methods": {kind: figures["overall"] for kind, figures in measured.items()},
                "sets": {kind: figures["sets"] for kind, figures in measured.items()},
            }
        )
    return points, record["environment"]


def _without_help(contenders, prompts, values, settings, output):
    """A drafter that knows nothing, against none, for each number of new tokens; alone, and beside the text's branches.

    ratios: tokens per second over plain's, prompt by prompt; worst: of the prompt that loses most.
    """
    points, environment = [], {}
    for tokens in values:
        # Measured times belong to a drafter, so each number of tokens begins with new ones.
        stranger = untrained(contenders.drafters[""])
        kinds = {
            "drafter alone": variant(stranger, draft_sources="drafter"),
            "with the text's branches": variant(stranger, draft_sources="both"),
        }
        record = _benchmark(
            replace(contenders, drafters={"": stranger} | kinds),
            prompts,
            replace(settings, max_new_tokens=tokens),
            f"{output}.{tokens}",
            methods=[f"domino:{kind}" for kind in kinds],
        )
        rate = {(row["unit"], row["method"]): row["tokens"] / row["seconds"] for row in record["rows"]}
        units = [unit for unit, method in rate if method == "plain"]
        ratios = {k: [round(rate[u, f"domino:{k}"] / rate[u, "plain"], 3) for u in units] for k in kinds}
        points.append(
            {
                "x": tokens,
                "methods": {kind: record["methods"][f"domino:{kind}"]["overall"] for kind in kinds},
                "ratios": ratios,
                "worst": {kind: min(found) for kind, found in ratios.items()},
            }
        )
        environment = record["environment"]
    for tokens in values:
        Path(f"{output}.{tokens}").unlink()
    return points, environment


def fixed_length(drafter: DominoDraftModel, tokens: int) -> DominoDraftModel:
    """The drafter, made to have always so many draft tokens verified."""
    return variant(
        drafter, max_tree_nodes=tokens, num_assistant_tokens=tokens, num_assistant_tokens_schedule="constant"
    )


def adaptive(drafter: DominoDraftModel) -> DominoDraftModel:
    """The drafter as it comes, whatever its owner has set."""
    made = variant(drafter)
    made.generation_config = GenerationConfig()
    return made


def untrained(drafter: DominoDraftModel, seed: int = 0) -> DominoDraftModel:
    """A drafter of the same shape that knows nothing: random weights, on the same device, in the same dtype."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = DominoDraftModel(copy.deepcopy(drafter.config))
    buffers = dict(drafter.named_buffers())
    made.load_state_dict({name: buffers[name] for name in ("d2t", "t2d") if name in buffers}, strict=False)
    return made.to(drafter.device, drafter.dtype).eval()


def _benchmark(contenders, prompts, settings, output, **changes) -> dict[str, Any]:
    return benchmark.run(contenders, prompts, benchmark.Settings(**(asdict(settings) | changes)), output)


def _measured(record: dict[str, Any], part: str, methods: tuple[str, ...]) -> dict[str, Any]:
    return {name: record["methods"][name][part] for name in methods if part in record["methods"][name]}


_RIVALS = ("domino", "domino-chain", "base", "prompt-lookup")

STUDIES: dict[str, Study] = {
    "block-size": Study(
        "How long a block pays?",
        "block size",
        (4, 8, 16, 32),
        _over_methods("domino[block_size={}]", "base[block_size={}]"),
        log_x=True,
    ),
    "pool": Study(
        "How many candidates per position need the head?",
        "candidates per position",
        (4, 8, 16, 32, 64, 256),
        _over_methods("domino[candidate_pool_size={}]"),
        log_x=True,
    ),
    "tree": Study(
        "How large a tree pays?",
        "largest number of tree nodes",
        (1, 2, 4, 8, 16, 32, 64),
        _over_methods("domino[max_tree_nodes={}]", "base-tree[max_tree_nodes={}]"),
        log_x=True,
    ),
    "head": Study(
        "What does the head add, and which one?",
        "drafter",
        (),
        _over_methods("domino:{}", "domino-chain:{}", "base:{}"),
    ),
    "taps": Study("Which of the target's layers should be tapped?", "taps", (), _over_methods("domino:{}", "base:{}")),
    "curriculum": Study(
        "Does the base-anchored curriculum help, against final-only and base-only training?",
        "curriculum",
        (),
        _over_methods("domino:{}", "base:{}"),
    ),
    "vocabulary": Study(
        "How many tokens does the drafter's training vocabulary need?", "vocabulary", (), _over_methods("domino:{}")
    ),
    "batch": Study(
        "Does drafting pay in batches?",
        "batch size",
        (1, 2, 4, 8, 16),
        # transformers' assisted generation serves single sequences only, so no rival can take part.
        _over_settings("batch_size", ("domino", "domino[draft_sources=text]")),
        log_x=True,
    ),
    "temperature": Study(
        "What does sampling cost the drafter?",
        "temperature",
        (0.0, 0.3, 0.5, 0.7, 1.0),
        _over_settings("temperature", _RIVALS),
    ),
    "draft-length": Study(
        "Does drafting as many tokens as pay keep up with the best fixed number?",
        "draft tokens",
        (1, 2, 4, 8),
        _over_fixed_lengths,
        log_x=True,
    ),
    "no-help": Study("How much does a drafter that cannot help lengthen a call?", "new tokens", (128,), _without_help),
    "length": Study(
        "Does the drafter hold on long prompts?",
        "prompt tokens",
        (128, 256, 512, 1024, 2048, 4096, 8192),
        _over_prompt_lengths(_RIVALS),
        log_x=True,
    ),
}
