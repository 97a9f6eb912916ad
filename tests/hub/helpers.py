"""What the tests of the Hub share: a card's record, a tokenizer, and calls made in another process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny import BOS, EOS, PAD, VOCAB_SIZE

TARGET = "org/tiny-target"
DRAFTER = "org/tiny-target-Domino"
NEW = "org/new-Domino"  # not on the server
ROOT = Path(__file__).parents[2]

CHARACTERS = "abcdefghijklmnopqrstuvwxyzWT0123456789 .,?!:;'-()"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def record(repo_id: str = DRAFTER, **changes: Any) -> dict[str, Any]:
    """A card's record with every field filled."""
    return {
        "repo_id": repo_id,
        "license": "apache-2.0",
        "language": ["en"],
        "summary": "A drafter for tests.",
        "target": {"name": TARGET, "revision": "main", "chat_template": "the target's own", "thinking_mode": "none"},
        "training": {
            "data": [{"name": "own text", "description": "100 answers of the target"}],
            "settings": {"steps": 10, "learning rate": 6e-4},
            "hardware": "one CPU",
            "duration": "one second",
            "commands": ["python scripts/train.py config.yaml"],
        },
        "results": [benchmark()],
        "not_established": ["anything beyond tests"],
        **changes,
    }


def adapter_record() -> dict[str, Any]:
    return record(
        "org/tiny-lora",
        drafter={"name": DRAFTER, "revision": "main"},
        target={"name": TARGET, "revision": "main", "adapter": "none"},
        adapter={"method": "LoRA", "rank": 8, "modules": ["q_proj", "fc"]},
    )


def benchmark(tau: float = 2.5) -> dict[str, Any]:
    """A benchmark record with the conditions that a card asks for."""
    figures = {
        "tokens_per_second": 40.0,
        "speedup": 1.8,
        "speedup_ci95": [1.7, 1.9],
        "acceptance_length": tau,
        "identical": 1.0,
    }
    plain = {"tokens_per_second": 22.2, "speedup": 1.0}
    return {
        "engine": "transformers 5.24",
        "hardware": "two CPU cores",
        "dtype": "bfloat16",
        "temperature": 0,
        "max_new_tokens": 128,
        "command": "python scripts/benchmark.py --prompts gsm8k.jsonl --output record.json",
        "methods": {
            "plain": {"overall": plain, "sets": {"gsm8k": plain}},
            "domino": {"overall": figures, "sets": {"gsm8k": figures}},
        },
    }


def raw_benchmark(tau: float = 2.5) -> dict[str, Any]:
    """A record as scripts/benchmark.py writes it."""
    return {
        "environment": {
            "transformers": "5.24.0",
            "torch": "2.13.0",
            "processor": "A CPU",
            "threads": 2,
            "device": "cpu",
            "dtype": "bfloat16",
        },
        "settings": {"methods": ["plain", "domino"], "max_new_tokens": 128, "temperature": 0.0, "seed": 0},
        "prompts": {"gsm8k": ["0123"]},
        "methods": benchmark(tau)["methods"] | {"native-dflash": {"unavailable": "another row convention"}},
        "rows": [{"method": "plain"}],
    }


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, with a chat template."""
    vocabulary = {"<pad>": PAD, "<eos>": EOS, "<bos>": BOS}
    vocabulary |= {character: i + 3 for i, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="."))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    assert len(vocabulary) <= VOCAB_SIZE
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", chat_template=TEMPLATE
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """Content by path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def hub_environment(url: str, home: Path, **changes: str) -> dict[str, str]:
    """The variables of a process that knows no other Hub, and nothing of this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON", "TRANSFORMERS_"))}
    return kept | {
        "HF_ENDPOINT": url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONPATH": "",
        "HF_HUB_ETAG_TIMEOUT": "5",
        **changes,
    }


class Refused(Exception):
    """What a call in the client process raised. kinds: the names of its class and that one's bases."""

    def __init__(self, kinds: list[str], message: str):
        super().__init__(kinds, message)
        self.kinds = kinds

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.args[1]}"


def call_and_report(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return function(*arguments)
    # Exceptions of HTTP clients hold open connections and cannot travel between processes.
    except Exception as error:
        raise Refused([kind.__name__ for kind in type(error).__mro__], str(error)) from None
