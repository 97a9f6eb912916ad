"""One test for each fault that was found, by the property test or by reading."""

import copy
import warnings

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_domino.drafter.target_domino import fingerprint
from tests.contract.pairs import Recorder, assert_same, outcome, pair
from tests.tiny import PAD, VOCAB_SIZE, prompt_ids, skilled_drafter, tiny_drafter, tiny_target

GREEDY = dict(do_sample=False, pad_token_id=PAD, eos_token_id=None)


def test_a_sequence_left_alone_by_its_batch_does_not_see_the_empty_slots_of_the_others(happened):
    """A chain of the last sequence went without a mask although its cache had gaps."""
    target, drafter = pair("llama")
    drafter.config.max_tree_nodes = 3
    for seed in range(12):
        arguments = dict(max_new_tokens=24, do_sample=False, pad_token_id=PAD, eos_token_id=list(range(3, 12)))
        ids = prompt_ids(5, seed, batch=4)
        plain = target.generate(ids, **arguments)
        assert_same(target.generate(ids, assistant_model=drafter, **arguments), plain, f"seed {seed}")
    assert happened["calls"] == 12 and happened["accepted"]


def test_a_batch_gives_a_streamer_whole_steps():
    """Sequences that get ahead of each other would give it single tokens."""
    target, drafter = pair("llama")
    streamers = Recorder(), Recorder()
    for streamer, extra in zip(streamers, ({}, {"assistant_model": drafter}), strict=True):
        target.generate(prompt_ids(5, 5, batch=3), streamer=streamer, max_new_tokens=9, **GREEDY, **extra)
    assert_same(streamers[1].given, streamers[0].given)


class LongerThan(StoppingCriteria):
    def __init__(self, length: int):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] > self.length


class AddsByTurns(LogitsProcessor):
    """Keeps count of the tokens that it has seen chosen."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, 7 * self.calls % VOCAB_SIZE] += 3.0
        return scores


@pytest.mark.parametrize(
    "stateful",
    [
        lambda: {"stopping_criteria": StoppingCriteriaList([LongerThan(10)])},
        lambda: {"logits_processor": LogitsProcessorList([AddsByTurns()])},
    ],
    ids=["criterion", "processor"],
)
@pytest.mark.parametrize("why", ["prefill in chunks", "asked for"])
def test_transformers_loop_is_not_used_where_it_overruns_a_criterion_or_misleads_a_processor(stateful, why):
    """It asks criteria after whole blocks only, and processors about drafts that it then drops."""
    target, drafter = pair("gemma3" if why == "asked for" else "llama")
    drafter.use_tree = why != "asked for"
    arguments = GREEDY | {"max_new_tokens": 20}
    if why == "prefill in chunks":
        arguments["prefill_chunk_size"] = 2
    plain = target.generate(prompt_ids(5, 5), **arguments, **stateful())
    drafted = target.generate(prompt_ids(5, 5), assistant_model=drafter, **arguments, **stateful())
    assert_same(drafted, plain)


class ExcludesAll(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf) if input_ids.shape[1] > 7 else scores


def test_sampling_from_nothing_is_an_error_as_in_plain_generation():
    target, drafter = pair("llama")
    for extra in ({}, {"assistant_model": drafter}):
        with pytest.raises(RuntimeError, match="nan"):
            target.generate(
                prompt_ids(5),
                do_sample=True,
                pad_token_id=PAD,
                max_new_tokens=9,
                logits_processor=LogitsProcessorList([ExcludesAll()]),
                **extra,
            )


def test_sampling_does_not_depend_on_the_default_dtype(happened):
    target, drafter = pair("llama")
    arguments = dict(do_sample=True, pad_token_id=PAD, max_new_tokens=12)
    plain = outcome(target, prompt_ids(5), **arguments)
    torch.set_default_dtype(torch.float64)
    try:
        drafted = outcome(target, prompt_ids(5), assistant_model=drafter, **arguments)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(drafted.result, plain.result)


def test_dropout_in_a_drafter_uses_none_of_the_samplings_random_numbers():
    target = tiny_target(context=0.3, num_hidden_layers=2)
    drafter = skilled_drafter(target, attention_dropout=0.5).train()
    arguments = dict(do_sample=True, pad_token_id=PAD, max_new_tokens=12)
    plain = outcome(target, prompt_ids(5), **arguments)
    drafted = outcome(target, prompt_ids(5), assistant_model=drafter, **arguments)
    assert_same(drafted.result, plain.result)
    assert torch.equal(drafted.random_state, plain.random_state)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_vocabulary_padded_for_speed_fits(batch, happened):
    """The target's 64 rows are the drafter's 61 and padding; the padding is never drafted but may be chosen."""
    target = tiny_target(context=0.3, num_hidden_layers=2)
    drafter = skilled_drafter(target)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    target.resize_token_embeddings(64, mean_resizing=False)
    arguments = dict(do_sample=True, pad_token_id=PAD, max_new_tokens=16)
    plain = outcome(target, prompt_ids(5, batch=batch), **arguments)
    drafted = outcome(target, prompt_ids(5, batch=batch), assistant_model=drafter, **arguments)
    assert_same(drafted.result, plain.result)
    assert happened["rounds"]


def _never_runs(model: torch.nn.Module) -> None:
    for module in model.modules():
        module.register_forward_pre_hook(lambda *args: pytest.fail("a forward ran before the refusal"))


def test_an_encoder_decoder_is_refused_before_its_encoder_runs():
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB_SIZE, d_model=32, d_ff=8, num_layers=2, num_heads=2, d_kv=8, decoder_start_token_id=0)
    )
    _never_runs(t5)
    with pytest.raises(ValueError, match="decoder-only"):
        t5.generate(prompt_ids(4), assistant_model=tiny_drafter(tiny_target()), max_new_tokens=3)


def test_a_recurrent_target_is_refused_before_its_first_forward():
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=4, state_size=4))
    _never_runs(mamba)
    with pytest.raises(ValueError, match="recurrent"):
        mamba.generate(prompt_ids(4), assistant_model=tiny_drafter(tiny_target()), max_new_tokens=3)


def test_another_vocabulary_is_refused_with_both_sizes_and_not_by_asking_for_tokenizers():
    target = tiny_target(vocab_size=67)
    _never_runs(target)
    with pytest.raises(ValueError, match="vocabulary size: the target has 67, the drafter was made for 61"):
        target.generate(prompt_ids(4), assistant_model=tiny_drafter(tiny_target()), max_new_tokens=3)


def test_a_drafter_trained_for_another_target_warns_once():
    theirs, mine = tiny_target(seed=0), tiny_target(seed=1)
    drafter = tiny_drafter(
        mine, target_fingerprint=fingerprint(theirs.get_input_embeddings().weight), target_name="some/target"
    )
    with pytest.warns(UserWarning, match="trained for some/target.*expect little or no speed-up"):
        mine.generate(prompt_ids(4), assistant_model=drafter, max_new_tokens=2, **GREEDY)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*trained for.*")
        mine.generate(prompt_ids(4), assistant_model=drafter, max_new_tokens=2, **GREEDY)
        theirs.generate(prompt_ids(4), assistant_model=drafter, max_new_tokens=2, **GREEDY)


@pytest.mark.parametrize("use_tree", [True, False])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_mask_without_any_real_token_is_served_as_plain_generation_does(batch, use_tree):
    """The drafter had no context at all then, and a product of nothing has no shape."""
    target, drafter = pair("llama")
    drafter.use_tree = use_tree
    ids = prompt_ids(6, 5, batch=batch)
    arguments = GREEDY | {"attention_mask": torch.zeros_like(ids), "max_new_tokens": 12, "eos_token_id": [1, 9]}
    assert_same(target.generate(ids, assistant_model=drafter, **arguments), target.generate(ids, **arguments))


def test_attentions_that_sdpa_does_not_give_are_left_out_as_in_plain_generation(happened):
    target, drafter = pair("llama", "sdpa")
    arguments = GREEDY | {"max_new_tokens": 12, "return_dict_in_generate": True, "output_attentions": True}
    plain = target.generate(prompt_ids(6, 5), **arguments)
    drafted = target.generate(prompt_ids(6, 5), assistant_model=drafter, **arguments)
    assert drafted.attentions == plain.attentions and happened["accepted"]
    assert_same(drafted.sequences, plain.sequences)


@pytest.mark.parametrize("use_tree", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_for_the_target_and_not_for_drafting(dtype, use_tree):
    """A step of the head mixes no dtypes."""
    target, drafter = pair("llama")
    drafter = copy.deepcopy(drafter).to(dtype)
    drafter.use_tree = use_tree
    arguments = GREEDY | {"max_new_tokens": 12}
    with torch.autocast("cpu", torch.bfloat16):
        plain = target.generate(prompt_ids(6, 5), **arguments)
        drafted = target.generate(prompt_ids(6, 5), assistant_model=drafter, **arguments)
    assert_same(drafted, plain)
    assert sum(drafter.drafting_stats.drafted)
