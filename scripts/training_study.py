"""Trains drafters in several ways and compares them. See docs/training.md.

python scripts/training_study.py [settings.yaml] --study NAME --data FOLDER --record RECORD.json [--flag value ...]
"""

from collections.abc import Sequence
from typing import Any

from hf_domino.training.run import RunArguments
from hf_domino.training.settings import parse_settings
from hf_domino.training.study import StudyArguments, run_study, table
from hf_domino.training.targets import load_target
from hf_domino.training.trainer import DominoTrainingArguments


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    study, run, args = parse_settings([StudyArguments, RunArguments, DominoTrainingArguments], argv)
    target, tokenizer = load_target(run.target, run.target_dtype)
    record = run_study(study, run, args, target, tokenizer)
    print(table(record))
    return record


if __name__ == "__main__":
    main()
