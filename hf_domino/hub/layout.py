"""What a published drafter's repo holds: the only list of its files."""

import re
from pathlib import Path

from .. import drafter

CARD = "README.md"
CHECKSUMS = "SHA256SUMS"
RECORD = "card_record.json"
GENERATE = "custom_generate/generate.py"
# Everything that runs at inference, as flat siblings; without the package, transformers imports it from there.
CODE_FILES = {path.name: path for path in sorted(Path(drafter.__file__).parent.glob("*_domino.py"))}
GENERATE_SOURCE = Path(__file__).with_name("custom_generate.py")
AUTO_MAP = {
    "AutoConfig": "configuration_domino.DominoConfig",
    "AutoModel": "modeling_domino.DominoDraftModel",
    "AutoModelForCausalLM": "modeling_domino.DominoDraftModel",
}

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
DATA_FILES = {
    CONFIG,
    INDEX,
    CARD,
    CHECKSUMS,
    RECORD,
    "generation_config.json",
    "training.json",
    "LICENSE",
    "NOTICE",
    ".gitattributes",
}
PICTURES = re.compile(r"(?:[\w-]+/)?[\w.-]+\.(?:png|svg)")


def is_code(path: str) -> bool:
    """Whether this file (by its path in the repo) is the code that our repos carry."""
    return path == GENERATE or re.fullmatch(r"[a-z_]+_domino\.py", path) is not None


def is_data(path: str) -> bool:
    """Whether this file is one of the weights and texts that our repos carry."""
    return path in DATA_FILES or any(kind.fullmatch(path) for kind in (WEIGHTS, PICTURES))
