"""Pairs for contract tests: every family of target, with a drafter that is often right, and what a call came to."""

import functools
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

from hf_domino import DominoDraftModel
from tests.tiny import FAMILIES, VOCAB_SIZE, skilled_drafter, tiny_target

WINDOW = 12
_MIXED_LAYERS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CONTRACT_FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = FAMILIES | {
    "gemma3": (*FAMILIES["gemma3"][:2], FAMILIES["gemma3"][2] | _MIXED_LAYERS),
    # Soft caps on attention (eager only) and output, scaled embeddings, a tied head.
    "gemma2": (
        Gemma2Config,
        Gemma2ForCausalLM,
        _MIXED_LAYERS
        | {
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
        },
    ),
    "qwen3_sliding": (Qwen3Config, Qwen3ForCausalLM, _MIXED_LAYERS | {"use_sliding_window": True}),
}


def pair(family: str, attention: str = "sdpa", window: int = WINDOW) -> tuple[PreTrainedModel, DominoDraftModel]:
    """A target of two layers and its drafter. Drafts are whole trees, whatever they cost, until a test says else."""
    target, drafter = _built(family, attention, window)
    # As new, whatever the test before has set.
    target._previous_max_cache_length = -1
    drafter.use_tree, drafter.config.max_tree_nodes = True, 16
    drafter.generation_config = GenerationConfig(num_assistant_tokens_schedule="constant")
    return target, drafter


@functools.cache
def _built(family: str, attention: str, window: int) -> tuple[PreTrainedModel, DominoDraftModel]:
    shape = {"num_hidden_layers": 2}
    if "sliding_window" in CONTRACT_FAMILIES[family][2]:
        shape["sliding_window"] = window
    with patch.dict(FAMILIES, CONTRACT_FAMILIES):
        target = tiny_target(family, seed=3, context=0.3, **shape)
    target.set_attn_implementation(attention)
    return target, skilled_drafter(target)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, as many as the tiny targets have."""
    words = ["<pad>", "</s>", "<s>", *(chr(ord("0") + i) for i in range(VOCAB_SIZE - 3))]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = Split(Regex("."), "isolated"), Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


class Recorder(BaseStreamer):
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.given.append(value.clone())

    def end(self) -> None:
        self.ends += 1


@dataclass
class Outcome:
    """What a `generate` call came to: its result or its error, and the state of the random numbers after it."""

    result: Any
    error: BaseException | None
    random_state: torch.Tensor


def outcome(target: PreTrainedModel, ids: torch.Tensor, seed: int = 0, **arguments: Any) -> Outcome:
    torch.manual_seed(seed)
    result, error = None, None
    try:
        result = target.generate(ids, **arguments)
    except (ValueError, RuntimeError, TypeError, IndexError) as raised:
        error = raised
    return Outcome(result, error, torch.get_rng_state())


def assert_same(drafted: Any, plain: Any, path: str = "") -> None:
    """Compares nested results: ids exactly, floats up to the noise of another order of summation, which grows with the
    largest numbers that are summed (some of Gemma's hidden states are thousands of times the rest)."""
    if plain is None or drafted is None:
        assert plain is drafted, f"{path}: only one is None"
    elif isinstance(plain, torch.Tensor):
        assert drafted.shape == plain.shape, f"{path}: {tuple(drafted.shape)} for {tuple(plain.shape)}"
        if plain.dtype.is_floating_point:
            largest = float(plain[plain.isfinite()].abs().max()) if plain.isfinite().any() else 0.0
            noise = {"atol": max(2e-4, 2e-6 * largest), "rtol": 1e-3}
            torch.testing.assert_close(drafted, plain, **noise, msg=lambda text: f"{path}: {text}")
        else:
            assert torch.equal(drafted, plain), f"{path}:\n{drafted.tolist()} for\n{plain.tolist()}"
    else:
        assert len(drafted) == len(plain), f"{path}: {len(drafted)} for {len(plain)} entries"
        for i, (d, p) in enumerate(zip(drafted, plain, strict=True)):
            assert_same(d, p, f"{path}[{i}]")
