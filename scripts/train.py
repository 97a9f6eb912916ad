"""Trains a drafter, or with `--lora` an adapter of one: `python scripts/train.py settings.yaml [--flag value ...]`.

See docs/training.md and docs/fine_tuning.md.
"""

import logging
from collections.abc import Sequence

from hf_domino.training.lora import DEFAULTS, LoraArguments
from hf_domino.training.run import RunArguments, train
from hf_domino.training.settings import parse_settings
from hf_domino.training.targets import load_target
from hf_domino.training.trainer import DominoTrainer, DominoTrainingArguments


def main(argv: Sequence[str] | None = None) -> DominoTrainer:
    classes = [RunArguments, LoraArguments, DominoTrainingArguments]
    run, lora, args = parse_settings(classes, argv)
    if lora.lora:
        run, lora, args = parse_settings(classes, argv, DEFAULTS)
    logging.basicConfig(level=logging.INFO if args.should_log else logging.ERROR, format="%(message)s")
    target, tokenizer = load_target(run.target, run.target_dtype, run.target_adapter, run.target_quantization)
    return train(run, args, target, tokenizer, lora)


if __name__ == "__main__":
    main()
