"""Trains a drafter: `python scripts/train.py settings.yaml [--flag value ...]`. See docs/training.md."""

import logging
from collections.abc import Sequence

from hf_domino.training.run import RunArguments, train
from hf_domino.training.settings import parse_settings
from hf_domino.training.targets import load_target
from hf_domino.training.trainer import DominoTrainer, DominoTrainingArguments


def main(argv: Sequence[str] | None = None) -> DominoTrainer:
    run, args = parse_settings([RunArguments, DominoTrainingArguments], argv)
    logging.basicConfig(level=logging.INFO if args.should_log else logging.ERROR, format="%(message)s")
    target, tokenizer = load_target(run.target, run.target_dtype)
    return train(run, args, target, tokenizer)


if __name__ == "__main__":
    main()
