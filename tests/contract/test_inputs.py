"""What is passed in: embeddings, positions, masks, prompts of every length, and options given in other ways."""

import pytest
import torch
from transformers import GenerationConfig, SynthIDTextWatermarkingConfig

from tests.contract.pairs import assert_same, outcome, pair
from tests.tiny import PAD, prompt_ids

GREEDY = dict(do_sample=False, pad_token_id=PAD, eos_token_id=None, max_new_tokens=14)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_input_embeddings(family, with_ids, batch):
    target, drafter = pair(family)
    ids = prompt_ids(5, 5, batch=batch)
    arguments = GREEDY | {"inputs_embeds": target.get_input_embeddings()(ids)}
    if with_ids:
        arguments["input_ids"] = ids
    assert_same(target.generate(**arguments, assistant_model=drafter), target.generate(**arguments))


@pytest.mark.parametrize("positions", [range(7, 12), [0, 0, 0, 1, 2], [3, 9, 1, 4, 20]])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", ["llama", "mistral_sliding"])
def test_position_ids(family, batch, positions, happened):
    target, drafter = pair(family)
    arguments = GREEDY | {"position_ids": torch.tensor([list(positions)] * batch)}
    ids = prompt_ids(5, 5, batch=batch)
    assert_same(target.generate(ids, assistant_model=drafter, **arguments), target.generate(ids, **arguments))


@pytest.mark.parametrize("mask", [[0, 1, 1, 1, 1, 1], [1, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 0, 1]])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral_sliding", "gemma3"])
def test_holes_in_the_attention_mask(family, mask, happened):
    target, drafter = pair(family)
    arguments = GREEDY | {"attention_mask": torch.tensor([mask])}
    ids = prompt_ids(6, 5)
    assert_same(target.generate(ids, assistant_model=drafter, **arguments), target.generate(ids, **arguments))
    assert happened["rounds"]


def test_no_prompt_starts_from_the_beginning_of_text(happened):
    target, drafter = pair("llama")
    assert_same(target.generate(assistant_model=drafter, **GREEDY), target.generate(**GREEDY))
    assert happened["rounds"]


def test_a_prompt_without_tokens_is_the_error_of_plain_generation():
    target, drafter = pair("llama")
    nothing = torch.zeros(1, 0, dtype=torch.long)
    plain, drafted = (outcome(target, nothing, **GREEDY, **extra) for extra in ({}, {"assistant_model": drafter}))
    assert plain.error is not None and str(drafted.error) == str(plain.error)


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
def test_prompts_of_one_and_two_tokens(length, batch, happened):
    target, drafter = pair("llama")
    ids = prompt_ids(length, 5, batch=batch)
    assert_same(target.generate(ids, assistant_model=drafter, **GREEDY), target.generate(ids, **GREEDY))
    assert happened["rounds"]


@pytest.mark.parametrize("window", [1, 8])
def test_prompts_far_longer_than_the_context_window(window, happened, monkeypatch):
    target, drafter = pair("llama")
    monkeypatch.setattr(drafter.config, "context_window", window)
    for ids in (prompt_ids(120, 5), prompt_ids(60, 5, batch=3)):
        arguments = GREEDY | {"max_new_tokens": 40}
        assert_same(target.generate(ids, assistant_model=drafter, **arguments), target.generate(ids, **arguments))
    assert happened["rounds"]


def test_a_generation_config_object(happened):
    target, drafter = pair("llama")
    config = GenerationConfig(max_new_tokens=9, do_sample=True, top_k=7, pad_token_id=PAD, eos_token_id=[1, 9])
    plain = outcome(target, prompt_ids(5), generation_config=config)
    assert_same(outcome(target, prompt_ids(5), generation_config=config, assistant_model=drafter).result, plain.result)


@pytest.mark.parametrize("batch", [1, 2])
def test_watermarks_that_keep_a_state(batch):
    target, drafter = pair("llama")
    marks = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
    arguments = dict(do_sample=True, max_new_tokens=12, pad_token_id=PAD, watermarking_config=marks)
    plain, drafted = (
        outcome(target, prompt_ids(5, batch=batch), **arguments, **extra)
        for extra in ({}, {"assistant_model": drafter})
    )
    assert_same(drafted.result, plain.result)


def test_classifier_free_guidance_runs_the_target_beside_it(happened):
    target, drafter = pair("llama")
    arguments = GREEDY | {"guidance_scale": 1.7, "negative_prompt_ids": prompt_ids(3, 8)}
    assert_same(
        target.generate(prompt_ids(5), assistant_model=drafter, **arguments),
        target.generate(prompt_ids(5), **arguments),
    )
    assert happened["rounds"]


def test_options_without_assisted_generation_are_transformers_own_errors():
    target, drafter = pair("llama")
    for options, message in (
        ({"num_return_sequences": 2, "do_sample": True}, "num_return_sequences has to be 1"),
        ({"max_new_tokens": 0}, "must be greater than 0"),
        ({"nonsense": 1}, "not used by the model"),
    ):
        drafted = outcome(target, prompt_ids(5), assistant_model=drafter, **options)
        assert isinstance(drafted.error, ValueError) and message in str(drafted.error)
    # Beams are not drafted for, as with any assistant.
    arguments = GREEDY | {"num_beams": 2}
    assert_same(
        target.generate(prompt_ids(5), assistant_model=drafter, **arguments),
        target.generate(prompt_ids(5), **arguments),
    )
