"""Measures the drafter beside its rivals on the same prompts and writes one JSON record.

    python scripts/benchmark.py --prompts scripts/prompts/code.jsonl scripts/prompts/prose.jsonl --output record.json

Run again after an interruption, it goes on where it was. `scripts/report.py record.json -o report` makes the pictures.
"""

import argparse
import sys
from pathlib import Path

from hf_domino.evaluation.benchmark import DEFAULT_METHODS, Settings, run
from hf_domino.evaluation.contenders import add_model_arguments, load_contenders
from hf_domino.evaluation.methods import KINDS
from hf_domino.evaluation.prompts import read_prompts
from hf_domino.evaluation.report import summary_table
from hf_domino.evaluation.spec_bench import write_answers


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="FILE.jsonl",
        help="rows with `prompt` or `turns`, and optionally `set`; Spec-Bench and GSM8K as they are",
    )
    parser.add_argument("--output", required=True, metavar="RECORD.json")
    parser.add_argument("--limit", type=int, help="at most this many prompts of each set")
    parser.add_argument("--sets", nargs="+", metavar="SET", help="these sets only")
    parser.add_argument(
        "--methods",
        nargs="+",
        default=list(DEFAULT_METHODS),
        metavar="METHOD",
        help=f"{', '.join(KINDS)}; with settings, `domino[max_tree_nodes=4]`; joined by `+`",
    )
    parser.add_argument("--block-sizes", nargs="+", type=int, default=[], help="adds `domino` with these block sizes")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="calls of each kind, of which the median one counts")
    parser.add_argument(
        "--run-code", action="store_true", help="run answers to rows with a `test` (HumanEval), in limited processes"
    )
    parser.add_argument(
        "--spec-bench-answers", metavar="FOLDER", help="also write each method's answers in Spec-Bench's format"
    )
    add_model_arguments(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    prompts = read_prompts(options.prompts, options.limit, options.sets)
    settings = Settings(
        methods=options.methods + [f"domino[block_size={size}]" for size in options.block_sizes],
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        seed=options.seed,
        batch_size=options.batch_size,
        repeats=options.repeats,
        run_code=options.run_code,
        labels={name: value for name in ("model", "drafter", "assistant") if (value := getattr(options, name))},
    )
    record = run(load_contenders(options), prompts, settings, options.output)
    if options.spec_bench_answers:
        for method, result in record["methods"].items():
            if "unavailable" not in result:
                write_answers(record["rows"], method, method, Path(options.spec_bench_answers, f"{method}.jsonl"))
    print(summary_table(record))
    for name, cost in (record["cost_of_a_draft_round"] or {}).items():
        if cost:
            print(f"{name} draft round: {cost['dispatches']} dispatches, {cost['synchronisations']} synchronisations")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"benchmark.py: {error}")
