"""What else a call returns: scores, logits, states, attentions, the cache, and a second turn that goes on from it."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.contract.pairs import CONTRACT_FAMILIES, WINDOW, assert_same, outcome, pair
from tests.tiny import PAD, prompt_ids

BEFORE_AND_AFTER_THE_WINDOW_FILLS = [3, WINDOW + 2]


@pytest.mark.parametrize("length", BEFORE_AND_AFTER_THE_WINDOW_FILLS)
@pytest.mark.parametrize("family", CONTRACT_FAMILIES)
def test_every_returned_part_is_that_of_plain_generation(family, length, happened):
    _every_returned_part_is_that_of_plain_generation(family, length, 16, happened)


@pytest.mark.parametrize("slots", [None, 40])  # of which a window's layers have fewer
@pytest.mark.parametrize("family, length, tokens", [("llama", 3, 16), ("qwen3", 14, 5), ("gemma3", 3, WINDOW - 3)])
def test_every_part_returned_with_a_static_cache_is_that_of_plain_generation(family, length, tokens, slots, happened):
    options = {"cache_implementation": "static", "max_cache_len": slots}
    _every_returned_part_is_that_of_plain_generation(family, length, tokens, happened, **options)


def _every_returned_part_is_that_of_plain_generation(family, length, tokens, happened, **options):
    target, drafter = pair(family, "eager")
    arguments = options | dict(
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=PAD, return_dict_in_generate=True,
        output_scores=True, output_logits=True, output_hidden_states=True, output_attentions=True,
    )  # fmt: skip
    plain, drafted = (
        target.generate(prompt_ids(length, 5), **arguments, **extra) for extra in ({}, {"assistant_model": drafter})
    )
    assert happened["accepted"]
    assert type(drafted) is type(plain)
    for name in ("sequences", "scores", "logits", "hidden_states", "attentions"):
        assert_same(drafted[name], plain[name], name)
    for layer, (mine, theirs) in enumerate(zip(drafted.cache.layers, plain.cache.layers, strict=True)):
        filled = theirs.get_seq_length()
        assert mine.get_seq_length() == filled
        parts = [[part.keys, part.values] for part in (mine, theirs)]
        if options:  # behind them, a static cache holds what was refused
            parts = [[states[:, :, :filled] for states in part] for part in parts]
        assert_same(*parts, f"cache layer {layer}")


@pytest.mark.parametrize("second_turn", ["drafted", "plain"])
@pytest.mark.parametrize("passed", ["whole text", "new ids"])
@pytest.mark.parametrize("length", BEFORE_AND_AFTER_THE_WINDOW_FILLS)
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "mistral_sliding", "gemma3"])
def test_a_second_turn_goes_on_from_the_returned_cache(family, length, passed, second_turn, happened):
    target, drafter = pair(family)

    def two_turns(first, second):
        arguments = dict(max_new_tokens=12, do_sample=False, pad_token_id=PAD, return_dict_in_generate=True)
        turn = target.generate(prompt_ids(length, 5), **arguments, **first)
        text = torch.cat([turn.sequences, prompt_ids(4, 9)], dim=1)
        if passed == "new ids":
            second = second | {"attention_mask": torch.ones_like(text)}
            text = text[:, turn.cache.get_seq_length() :]
        turn = target.generate(text, cache=turn.cache, **arguments, **second)
        return turn.sequences, turn.cache.get_seq_length()

    plain = two_turns({}, {})
    drafted = two_turns({"assistant_model": drafter}, {"assistant_model": drafter} if second_turn == "drafted" else {})
    assert_same(drafted[0], plain[0], "second turn")
    assert drafted[1] == plain[1]
    assert happened["calls"] == (2 if second_turn == "drafted" else 1) and happened["rounds"]


@pytest.mark.parametrize("length", BEFORE_AND_AFTER_THE_WINDOW_FILLS)
@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3"])
def test_a_cache_made_without_the_targets_configuration_holds_everything(family, length, happened):
    target, drafter = pair(family)
    arguments = dict(max_new_tokens=16, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    plain = target.generate(prompt_ids(length, 5), cache=DynamicCache(), **arguments)
    cache = DynamicCache()
    drafted = target.generate(prompt_ids(length, 5), cache=cache, assistant_model=drafter, **arguments)
    assert_same(drafted, plain)
    assert cache.get_seq_length() == drafted.shape[1] - 1 and happened["calls"] == 1


def test_a_batch_fills_the_users_cache_as_plain_generation_does(happened):
    target, drafter = pair("llama")
    arguments = dict(max_new_tokens=12, do_sample=False, pad_token_id=PAD, eos_token_id=list(range(3, 9)))
    ids, mine, theirs = prompt_ids(5, 5, batch=3), DynamicCache(), DynamicCache()
    plain = target.generate(ids, cache=theirs, **arguments)
    assert_same(target.generate(ids, cache=mine, assistant_model=drafter, **arguments), plain)
    assert_same([layer.keys for layer in mine.layers], [layer.keys for layer in theirs.layers], "keys")
    assert not happened["calls"]  # our loop would have taken finished sequences out of it


@pytest.mark.parametrize("length, tokens", [(3, 16), (WINDOW + 2, 16), (3, WINDOW - 3)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding", "gemma3"])
def test_static_caches_hold_trees_unless_the_text_outgrows_a_window(family, length, tokens, happened):
    target, drafter = pair(family)
    arguments = dict(max_new_tokens=tokens, do_sample=False, pad_token_id=PAD, cache_implementation="static")
    plain = target.generate(prompt_ids(length, 5), **arguments)
    assert_same(target.generate(prompt_ids(length, 5), assistant_model=drafter, **arguments), plain)
    outgrown = family in ("mistral_sliding", "gemma3") and length + tokens > WINDOW
    assert happened["calls"] == (not outgrown) == bool(happened["accepted"])


@pytest.mark.parametrize("slots", [4, 8, 10, 11, 30])
@pytest.mark.parametrize("family", ["mistral_sliding", "llama"])
def test_a_static_cache_that_is_too_short_is_as_in_plain_generation(family, slots, happened):
    """A layer whose window is all of it slides on; any other is an error."""
    target, drafter = pair(family)
    arguments = dict(max_new_tokens=8, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    plain, drafted = (
        outcome(
            target, prompt_ids(4, 5), cache=StaticCache(config=target.config, max_cache_len=slots), **arguments, **extra
        )
        for extra in ({}, {"assistant_model": drafter})
    )
    assert type(drafted.error) is type(plain.error)
    assert_same(drafted.result, plain.result)
    assert happened["calls"] == (slots >= 11)


def test_a_static_cache_of_the_users_own_goes_on_from_call_to_call(happened):
    target, drafter = pair("llama")
    texts, caches = [], []
    for extra in ({}, {"assistant_model": drafter}):
        cache = StaticCache(config=target.config, max_cache_len=30)
        text = prompt_ids(4, 5)
        for _ in range(2):
            text = target.generate(text, cache=cache, max_new_tokens=9, do_sample=False, pad_token_id=PAD, **extra)
        texts.append(text)
        caches.append(cache)
    assert_same(*texts)
    plain, drafted = caches
    length = int(plain.get_seq_length())
    assert int(drafted.get_seq_length()) == length and happened["calls"] == 2
    for mine, theirs in zip(drafted.layers, plain.layers, strict=True):
        assert_same([mine.keys[:, :, :length]], [theirs.keys[:, :, :length]], "keys")


@pytest.mark.parametrize("options, message", [
    ({"use_cache": False}, "requires a cache"),
    ({"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}, "cache that can be cropped"),
])  # fmt: skip
def test_caches_that_cannot_go_back_are_refused_by_transformers(options, message):
    target, drafter = pair("llama")
    drafted = outcome(target, prompt_ids(5), assistant_model=drafter, max_new_tokens=4, **options)
    assert message in str(drafted.error)
