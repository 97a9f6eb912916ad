"""Makes training data: `python scripts/prepare_data.py [settings.yaml] --output FOLDER --prompts FILE ...`.

See docs/training.md.
"""

from collections.abc import Sequence

from hf_domino.training.prepare import PrepareArguments, prepare
from hf_domino.training.settings import parse_settings
from hf_domino.training.targets import load_target


def main(argv: Sequence[str] | None = None) -> dict[str, int]:
    (arguments,) = parse_settings([PrepareArguments], argv)
    target, tokenizer = load_target(arguments.target, arguments.dtype)
    counts = prepare(arguments, target, tokenizer)
    print(
        f"{arguments.output}: {counts['sequences']} sequences, {counts['tokens']} tokens, "
        f"{counts['supervised_tokens']} of them the target's answers."
    )
    return counts


if __name__ == "__main__":
    main()
