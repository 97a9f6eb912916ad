"""Runs a named study: one variable changed, everything else as a user has it; one record, drawn by `report.py`.

    python scripts/studies.py tree --prompts scripts/prompts/code.jsonl --output tree.json

Studies over drafters trained differently (taps, curriculum, head, vocabulary) take them as --drafters LABEL=PATH.
"""

import argparse
import sys

from hf_domino.evaluation.contenders import add_model_arguments, load_contenders
from hf_domino.evaluation.prompts import read_prompts
from hf_domino.evaluation.studies import STUDIES, run_study


def main(arguments: list[str] | None = None) -> None:
    names = "\n".join(f"  {name:12} {study.question}" for name, study in STUDIES.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nStudies:\n{names}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--output", required=True, metavar="RECORD.json")
    parser.add_argument("--limit", type=int, help="at most this many prompts of each set")
    parser.add_argument("--sets", nargs="+", metavar="SET", help="these sets only")
    parser.add_argument("--values", nargs="+", type=float, help="other values of the variable than the study's own")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="calls of each kind, of which the median one counts")
    add_model_arguments(parser)
    options = parser.parse_args(arguments)
    prompts = read_prompts(options.prompts, options.limit, options.sets)
    run_study(
        options.study,
        load_contenders(options),
        prompts,
        options.output,
        values=options.values,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        repeats=options.repeats,
    )


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"studies.py: {error}")
