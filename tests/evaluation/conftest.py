"""A tiny pair, saved with a tokenizer, as the scripts load it."""

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedTokenizerFast

from hf_domino.evaluation.methods import Contenders
from tests.tiny import skilled_drafter, tiny_target

CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; ids 0 to 2 are padding, end and beginning, as in the tiny targets."""
    words = ["<pad>", "</s>", "<s>", "<unk>", *CHARACTERS]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def contenders() -> Contenders:
    target = tiny_target(context=0.2)
    return Contenders(target, tiny_tokenizer(), {"": skilled_drafter(target)})


@pytest.fixture(scope="session")
def saved_pair(contenders, tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    contenders.model.save_pretrained(folder / "model")
    contenders.tokenizer.save_pretrained(folder / "model")
    contenders.drafters[""].save_pretrained(folder / "drafter")
    return {"model": str(folder / "model"), "drafter": str(folder / "drafter")}
