"""Answers a prompt with a drafter's help; with --compare also without it, and says what the drafter was good for.

python scripts/generate.py "Why is the sky blue?"
python scripts/generate.py --compare "Why is the sky blue?"
python scripts/generate.py --compare --prompts scripts/everyday_prompts.jsonl --output record.json
python scripts/generate.py --compare --compile --prompts scripts/everyday_prompts.jsonl
"""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hf_domino.demo import load_default_pair
from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.evaluation.measuring import Measurement, measure
from hf_domino.evaluation.methods import Method, Unavailable, compiled_arguments
from hf_domino.evaluation.metrics.output_agreement.output_agreement import first_difference
from hf_domino.evaluation.near_ties import near_tie
from hf_domino.evaluation.prompts import conversation_ids, read_prompts
from hf_domino.evaluation.record import environment
from hf_domino.record import write_record

WARM_UP_TOKENS = 48  # enough rounds for the drafter to have measured what the target's forwards cost


@dataclass
class Options:
    prompts: str | None = field(
        default=None, metadata={"help": "JSON lines with `prompt` or `turns` (the first turn is asked)."}
    )
    max_new_tokens: int = field(default=200, metadata={"help": "The most tokens of an answer."})
    temperature: float = field(default=0.0, metadata={"help": "0 takes the best token, above 0 samples."})
    model: str | None = field(default=None, metadata={"help": "Path or Hub id of the target (default: SmolLM2-135M)."})
    drafter: str | None = field(default=None, metadata={"help": "Path or Hub id of the drafter (default: ours)."})
    dtype: str = field(default="bfloat16", metadata={"help": "Of the target: bfloat16, float32, float16."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads (default: torch's choice)."})
    always_draft: bool = field(
        default=False, metadata={"help": "Verify full drafts in every round, also where that does not pay here."}
    )
    seed: int = field(default=0, metadata={"help": "Set before each answer that is sampled."})
    output: str | None = field(
        default=None, metadata={"help": "With --compare: a JSON file for all that was measured."}
    )
    compile: bool = field(default=False, init=False)

    def generation(self) -> dict[str, Any]:
        """Arguments of `generate` that both ways share."""
        arguments: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "do_sample": self.temperature > 0}
        return arguments | ({"temperature": self.temperature} if self.temperature > 0 else {})


@dataclass
class Comparison:
    """One prompt, answered both ways.

    Rates are tokens per second of the whole call. acceptance_length: mean tokens per target forward. drafter_share:
    time in the drafter over time of the verifying forwards. difference: `None` where the tokens are the same, else
    where they part and, if greedy, the target's top-two margin there.
    """

    prompt: str
    plain_tokens_per_second: float
    drafted_tokens_per_second: float
    acceptance_length: float
    drafter_share: float
    tokens: int
    rounds: int
    difference: dict[str, Any] | None

    @property
    def ratio(self) -> float:
        return self.drafted_tokens_per_second / self.plain_tokens_per_second

    def __str__(self) -> str:
        return (
            f"{self.ratio:.2f}x ({self.plain_tokens_per_second:.1f} -> {self.drafted_tokens_per_second:.1f} tokens/s), "
            f"acceptance length {self.acceptance_length:.2f}, drafter {self.drafter_share:.0%} of verifying, "
            f"{describe_difference(self.difference)}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser(Options, description=__doc__.splitlines()[0])
    # Not fields of the dataclass: HfArgumentParser has no positionals, and its flags would take the prompt as a value.
    parser.add_argument("prompt", nargs="?", help="What to ask.")
    parser.add_argument("--compare", action="store_true", help="Also answer without the drafter.")
    compile_help = "Use a static cache and torch.compile, also without the drafter; compiling takes minutes on a CPU."
    parser.add_argument("--compile", action="store_true", help=compile_help)
    options, called = parser.parse_args_into_dataclasses(arguments)
    options.compile = called.compile
    if (called.prompt is None) == (options.prompts is None):
        parser.error("give either a prompt or --prompts FILE")
    if options.output and not called.compare:
        parser.error("--output keeps what --compare measures: add --compare")
    dtype = getattr(torch, options.dtype, None)
    if not isinstance(dtype, torch.dtype):
        parser.error(f"--dtype {options.dtype} is no torch dtype; use bfloat16, float32 or float16")
    texts = [called.prompt] if options.prompts is None else [p.turns[0] for p in read_prompts([options.prompts])]
    if options.threads:
        torch.set_num_threads(options.threads)

    pair = load_default_pair(dtype, options.model, options.drafter)
    if options.compile:
        try:
            compiled_arguments(pair[0])
        except Unavailable as error:
            parser.error(str(error))
    if options.always_draft:
        pair[2].generation_config.num_assistant_tokens_schedule = "constant"
    if not called.compare:
        for text in texts:
            if len(texts) > 1:
                print(f"> {text}")
            answer(*pair, text, options)
        return
    comparisons = compare(*pair, texts, options)
    if options.output:
        rows = [asdict(comparison) | {"ratio": comparison.ratio} for comparison in comparisons]
        record = {"environment": environment(pair[0]), "settings": asdict(options), "prompts": rows}
        write_record(options.output, record)


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, drafter: DominoDraftModel, text: str, options: Options
) -> Measurement:
    """Streams one answer, drafted."""
    return _run(model, tokenizer, Method({"assistant_model": drafter}, drafter), text, options, stream=True)


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DominoDraftModel,
    texts: list[str],
    options: Options,
) -> list[Comparison]:
    """Answers each prompt both ways, one right after the other, and prints what came of it."""
    methods = {"without the drafter": Method(), "with the drafter": Method({"assistant_model": drafter}, drafter)}
    # A static cache is compiled for one length: the longest prompt's, which later calls then share.
    longest = texts[0]
    if options.compile:
        longest = max(texts, key=lambda text: len(conversation_ids(tokenizer, [text], [])))
    tokens = options.max_new_tokens if options.compile else min(WARM_UP_TOKENS, options.max_new_tokens)
    for method in methods.values():
        _run(model, tokenizer, method, longest, options, max_new_tokens=tokens)
    comparisons = []
    for number, text in enumerate(texts, 1):
        runs = {}
        # Each goes first every other time, so that a machine that grows slower or faster favours neither.
        for name in sorted(methods, reverse=number % 2 == 1):
            if len(texts) == 1:
                print(f"--- {name}")
            runs[name] = _run(model, tokenizer, methods[name], text, options, stream=len(texts) == 1)
        plain, drafted = (runs[name] for name in methods)
        prompt_ids = conversation_ids(tokenizer, [text], [])
        comparison = _comparison(model, text, prompt_ids, plain, drafted, greedy=options.temperature == 0)
        comparisons.append(comparison)
        print(f"--- {comparison}" if len(texts) == 1 else f"{number:3} {comparison}", flush=True)
    if len(comparisons) > 1:
        print(summary(comparisons))
    return comparisons


def summary(comparisons: list[Comparison]) -> str:
    """Medians over prompts; acceptance length over all rounds together."""
    same = sum(comparison.difference is None for comparison in comparisons)
    rounds = sum(comparison.rounds for comparison in comparisons)
    emitted = sum(comparison.acceptance_length * comparison.rounds for comparison in comparisons)
    return (
        f"{len(comparisons)} prompts: median {statistics.median(c.ratio for c in comparisons):.2f}x, "
        f"acceptance length {emitted / rounds if rounds else 1.0:.2f}, "
        f"drafter {statistics.median(c.drafter_share for c in comparisons):.0%} of verifying, same tokens in {same}"
    )


def describe_difference(difference: dict[str, Any] | None) -> str:
    if difference is None:
        return "same tokens"
    where = f"tokens differ from the {difference['position'] + 1}. on"
    margin = difference.get("margin")
    return where if margin is None else f"{where} (the target's top two were {margin:.3g} apart there)"


def _run(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    text: str,
    options: Options,
    stream: bool = False,
    **overrides: Any,
) -> Measurement:
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
    generation = options.generation() | (compiled_arguments(model) if options.compile else {}) | overrides
    prompt_ids = conversation_ids(tokenizer, [text], [])
    return measure(model, method, [prompt_ids], seed=options.seed, streamer=streamer, **generation)


def _comparison(
    model: PreTrainedModel, text: str, prompt_ids: list[int], plain: Measurement, drafted: Measurement, greedy: bool
) -> Comparison:
    before, after = plain.tokens[0], drafted.tokens[0]
    if greedy:
        difference = near_tie(model, prompt_ids, before, after)
    else:
        position = first_difference(after, before)
        difference = None if position is None else {"position": position}
    rounds = len(drafted.accepted)
    return Comparison(
        prompt=text,
        plain_tokens_per_second=len(before) / plain.seconds,
        drafted_tokens_per_second=len(after) / drafted.seconds,
        acceptance_length=1.0 + sum(drafted.accepted) / rounds if rounds else 1.0,
        drafter_share=(drafted.draft_seconds or 0.0) / drafted.verify_seconds if drafted.verify_seconds else 0.0,
        tokens=len(after),
        rounds=rounds,
        difference=difference,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
