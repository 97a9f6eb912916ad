"""A tiny pair and its tokenizer."""

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
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
    core.pre_tokenizer, core.decoder = Split(Regex("."), "isolated"), Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


@pytest.fixture(scope="session")
def contenders() -> Contenders:
    target = tiny_target(context=0.2)
    drafter = skilled_drafter(target)
    # Whole drafts whatever they cost: on a tiny target no draft pays, and times must not decide what tests see.
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    return Contenders(target, tiny_tokenizer(), {"": drafter})
