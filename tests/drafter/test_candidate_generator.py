"""The drafter in transformers' own assisted loop: the same tokens, the caps and the counts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from hf_domino.drafter.candidate_generator_domino import DominoCandidateGenerator, DraftingStats
from hf_domino.drafter.target_domino import Target
from tests.tiny import EOS, FAMILIES, PAD, drafted_text, plain_text, prompt_ids, tiny_drafter, tiny_target

pytestmark = pytest.mark.usefixtures("transformers_loop")


def always_draft(drafter, tokens=None):
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    drafter.generation_config.num_assistant_tokens = tokens
    return drafter


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_same(family, skilled_pair):
    target, drafter = skilled_pair(family)
    always_draft(drafter)
    accepted = []
    for seed, length, new in ((0, 1, 17), (1, 5, 26), (2, 14, 20)):
        ids = prompt_ids(length, seed=50 + seed)
        arguments = dict(max_new_tokens=new, eos_token_id=None)
        assert torch.equal(drafted_text(target, drafter, ids, **arguments), plain_text(target, ids, **arguments))
        accepted += drafter.drafting_stats.accepted
    assert sum(accepted) >= 5 and max(accepted) >= 2  # else nothing was put to the test


@pytest.mark.parametrize(
    "head_type, fields",
    [
        ("attention", {}),
        ("gru", {"shift_label": False}),
        ("gru", {"candidate_pool_size": 8}),
        ("gru", {"context_window": 4}),
        ("attention", {"shift_label": False, "candidate_pool_size": 3}),
    ],
    ids=str,
)
def test_greedy_text_is_the_same_with_every_kind_of_drafter(head_type, fields, skilled_pair):
    target, drafter = skilled_pair("llama", head_type, **fields)
    always_draft(drafter)
    accepted = []
    for seed in (61, 62):
        ids = prompt_ids(4, seed)
        arguments = dict(max_new_tokens=24, eos_token_id=None)
        assert torch.equal(drafted_text(target, drafter, ids, **arguments), plain_text(target, ids, **arguments))
        accepted += drafter.drafting_stats.accepted
    assert sum(accepted) >= 1


def oracle(monkeypatch, text, wrong_at=()):
    """Drafts are the text's own next tokens, but for a wrong one at some positions of the text."""
    from hf_domino.drafter.drafting_domino import DraftingSession, DraftLevels

    def propose(self, anchors_B, depth, width):
        position = self._seen[0] + 1
        depth = min(depth, self.config.max_drafts)
        tokens = [int(text[0, p]) if p < text.shape[1] else PAD for p in range(position, position + depth)]
        tokens = [(t + 1) % self.config.vocab_size if p in wrong_at else t for p, t in enumerate(tokens, position)]
        tokens = torch.tensor(tokens)[None, :, None]
        return DraftLevels(tokens, torch.zeros_like(tokens), torch.zeros(tokens.shape))

    monkeypatch.setattr(DraftingSession, "propose", propose)


@pytest.mark.parametrize("position", range(8))
def test_eos_anywhere_in_a_block_ends_the_text(position, monkeypatch):
    target = tiny_target(context=1.0)
    drafter = always_draft(tiny_drafter(target))
    ids = prompt_ids(5, seed=3)
    text = plain_text(target, ids, max_new_tokens=20, eos_token_id=None)
    eos = int(text[0, 5 + position])
    plain = plain_text(target, ids, max_new_tokens=20, eos_token_id=eos)
    oracle(monkeypatch, text)
    assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=20, eos_token_id=eos), plain)
    assert plain.shape[1] - 5 == text[0, 5:].tolist().index(eos) + 1


@pytest.mark.parametrize("new", range(1, 17))
def test_max_length_anywhere_in_a_block(new, monkeypatch):
    target = tiny_target(context=1.0)
    drafter = always_draft(tiny_drafter(target))
    ids = prompt_ids(5, seed=3)
    plain = plain_text(target, ids, max_new_tokens=17, eos_token_id=None)
    longest = []
    plain_forward = target.forward
    monkeypatch.setattr(target, "forward", lambda *a, **k: _watch(plain_forward, longest, *a, **k))
    oracle(monkeypatch, plain)
    drafted = drafted_text(target, drafter, ids, max_new_tokens=new, eos_token_id=None)
    assert torch.equal(drafted, plain[:, : 5 + new])
    stats = drafter.drafting_stats
    assert all(accepted == drafted for accepted, drafted in zip(stats.accepted, stats.drafted, strict=True))
    assert len(stats.drafted) == -(-(new - 1) // 7)  # six drafts and the bonus token a round
    assert max(longest) <= 5 + new - 1  # the last token is never fed, and no draft lies past it


def _watch(forward, longest, *args, **kwargs):
    output = forward(*args, **kwargs)
    longest.append(output.cache.get_seq_length())
    return output


@pytest.mark.parametrize("wrong_at", [{8}, {6, 13}, {7, 8, 9}, set(range(6, 30, 2)), set(range(30))])
@pytest.mark.parametrize("family", ["llama", "mistral_sliding", "gemma3"])
def test_every_number_of_accepted_drafts(family, wrong_at, monkeypatch):
    target = tiny_target(family)
    drafter = always_draft(tiny_drafter(target))
    ids = prompt_ids(5, seed=4)
    plain = plain_text(target, ids, max_new_tokens=20, eos_token_id=None)
    oracle(monkeypatch, plain, wrong_at)
    assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=20, eos_token_id=None), plain)
    position = 6  # of the first draft; the prefill gave the token before
    for accepted, drafted in zip(drafter.drafting_stats.accepted, drafter.drafting_stats.drafted, strict=True):
        expected = next((i for i in range(drafted) if position + i in wrong_at), drafted)
        assert accepted == expected
        position += accepted + 1


@pytest.mark.parametrize("cap", [1, 3, 6, 50])
def test_a_constant_schedule_drafts_the_cap(cap, skilled_pair):
    target, drafter = skilled_pair()
    always_draft(drafter, cap)
    drafted_text(target, drafter, prompt_ids(4), max_new_tokens=30, eos_token_id=None)
    stats, length = drafter.drafting_stats, 4 + 1
    for drafted, accepted in zip(stats.drafted, stats.accepted, strict=True):
        assert drafted == min(cap, 6, 34 - length - 1)
        length += accepted + 1
    assert length == 34


@pytest.mark.parametrize("cap", [1, 4])
def test_other_schedules_stay_below_the_cap(cap, skilled_pair):
    target, drafter = skilled_pair()
    drafter.generation_config.num_assistant_tokens = cap
    drafted_text(target, drafter, prompt_ids(4), max_new_tokens=30, eos_token_id=None)
    assert max(drafter.drafting_stats.drafted) <= cap


def test_a_confidence_threshold_shortens_drafts(skilled_pair):
    target, drafter = skilled_pair()
    drafter.generation_config.assistant_confidence_threshold = 1.1  # no token is that probable
    plain = plain_text(target, prompt_ids(4), max_new_tokens=9, eos_token_id=None)
    assert torch.equal(drafted_text(target, drafter, prompt_ids(4), max_new_tokens=9, eos_token_id=None), plain)
    assert set(drafter.drafting_stats.drafted) == {0}


def test_a_cap_below_one_is_refused(skilled_pair):
    target, drafter = skilled_pair()
    with pytest.raises(ValueError, match="num_assistant_tokens must be at least 1"):
        drafted_text(target, always_draft(drafter, 0), prompt_ids(4), max_new_tokens=4)


def test_stats_add_up_to_the_text(skilled_pair):
    target, drafter = skilled_pair()
    text = drafted_text(target, always_draft(drafter), prompt_ids(4), max_new_tokens=25, eos_token_id=None)
    stats = drafter.drafting_stats
    assert all(type(n) is int for n in stats.drafted + stats.accepted)
    assert all(0 <= a <= d for a, d in zip(stats.accepted, stats.drafted, strict=True))
    assert text.shape[1] - 4 == 1 + sum(stats.accepted) + len(stats.accepted)  # the prefill, drafts, bonus tokens
    assert stats.acceptance_length == pytest.approx(1 + sum(stats.accepted) / len(stats.accepted))
    assert stats.draft_seconds > 0 and stats.verify_seconds > 0
    assert DraftingStats().acceptance_length == 1.0


def test_no_state_between_calls(skilled_pair):
    target, drafter = skilled_pair()
    always_draft(drafter)
    tensors = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    config = copy.deepcopy(drafter.config.to_dict())
    runs = []
    for seed in (1, 2, 1, 1):
        text = drafted_text(target, drafter, prompt_ids(6, seed), max_new_tokens=12, eos_token_id=None)
        runs.append((text.tolist(), drafter.drafting_stats.drafted, drafter.drafting_stats.accepted))
    assert runs[0] == runs[2] == runs[3] and runs[0] != runs[1]
    assert drafter.config.to_dict() == config
    torch.testing.assert_close(drafter.state_dict(), tensors, rtol=0, atol=0)
    assert not [name for name, value in vars(drafter).items() if isinstance(value, torch.Tensor)]


def test_a_call_broken_off_leaves_nothing_behind(skilled_pair):
    target, drafter = skilled_pair()
    always_draft(drafter)
    ids = prompt_ids(6, 1)
    expected = drafted_text(target, drafter, ids, max_new_tokens=12, eos_token_id=None)

    def stop(input_ids, scores, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafted_text(target, drafter, prompt_ids(9, 2), max_new_tokens=12, stopping_criteria=[stop])
    assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=12, eos_token_id=None), expected)


@pytest.mark.parametrize("size", [1, 2, 16, 61, 1000])
def test_the_pool_changes_drafts_and_never_outputs(size, skilled_pair):
    target, drafter = skilled_pair()
    ids, arguments = prompt_ids(5, 9), dict(max_new_tokens=20, eos_token_id=None)
    plain = plain_text(target, ids, **arguments)
    always_draft(drafter)
    whole = (drafted_text(target, drafter, ids, **arguments), drafter.drafting_stats.accepted)
    drafter.config.candidate_pool_size = size
    try:
        text, accepted = drafted_text(target, drafter, ids, **arguments), drafter.drafting_stats.accepted
    finally:
        drafter.config.candidate_pool_size = None
    assert torch.equal(text, plain) and torch.equal(whole[0], plain)
    if size >= 61:
        assert accepted == whole[1] and sum(accepted) > 0


def test_left_padding_is_no_context(skilled_pair):
    target, drafter = skilled_pair()
    always_draft(drafter)
    ids = prompt_ids(6, 5)
    padded = torch.cat([torch.full((1, 4), PAD), ids], dim=1)
    mask = (torch.arange(10) >= 4).long()[None]
    text = target.generate(padded, attention_mask=mask, assistant_model=drafter, max_new_tokens=14, eos_token_id=None)
    with_padding = drafter.drafting_stats.accepted
    assert torch.equal(text[:, 4:], drafted_text(target, drafter, ids, max_new_tokens=14, eos_token_id=None))
    assert with_padding == drafter.drafting_stats.accepted


def test_mixing_the_drafters_distribution_in_is_refused():
    target = tiny_target()
    drafter = tiny_drafter(target)
    config = GenerationConfig(max_length=9)
    config.assistant_ensemble_weight = 0.5
    with pytest.raises(ValueError, match="assistant_ensemble_weight"):
        DominoCandidateGenerator(drafter, target, config)


def test_only_the_tapped_states_are_asked_for():
    target = tiny_target()
    drafter = tiny_drafter(target, target_layer_ids=[0, 2])
    generator = DominoCandidateGenerator(drafter, target, GenerationConfig(max_length=9))
    assert generator.model_kwargs_overrides == {"output_hidden_states": [1, 3]}
    assert Target(target, drafter.config).hidden_states_indices == [1, 3]
    ids = prompt_ids(3)
    assert generator.get_candidates(ids, is_first_iteration=True)[0] is ids


arguments_of_generate = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 24)},
    optional={
        "min_new_tokens": st.integers(1, 10),
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(2, 3),
        "bad_words_ids": st.just([[7], [9, 11]]),
        "suppress_tokens": st.just([5, 6]),
        "eos_token_id": st.sampled_from([EOS, [3, 5, 8], 13]),
        "exponential_decay_length_penalty": st.just((3, 1.5)),
        "sequence_bias": st.just([[[12], 3.0]]),
        "cache_implementation": st.just("dynamic"),
        "forced_eos_token_id": st.just(EOS),
    },
)


def test_greedy_text_is_the_same_whatever_the_arguments(skilled_pair, generate_examples):
    seen = {"accepted": 0}

    @settings(max_examples=generate_examples)
    @given(
        arguments_of_generate,
        st.integers(1, 12),
        st.integers(0, 99),
        st.sampled_from(["llama", "qwen3_tied"]),
        st.sampled_from([None, 2, 5]),
    )
    def holds(arguments, length, seed, family, cap):
        target, drafter = skilled_pair(family)
        always_draft(drafter, cap)
        ids = prompt_ids(length, seed)
        if "min_new_tokens" in arguments:
            arguments["min_new_tokens"] = min(arguments["min_new_tokens"], arguments["max_new_tokens"])
        assert torch.equal(drafted_text(target, drafter, ids, **arguments), plain_text(target, ids, **arguments))
        seen["accepted"] += sum(drafter.drafting_stats.accepted)

    holds()
    assert seen["accepted"] >= generate_examples


@pytest.mark.parametrize("wanted", ["scores", "logits", "hidden_states"])
def test_everything_that_generate_returns(wanted, skilled_pair):
    target, drafter = skilled_pair()
    always_draft(drafter)
    arguments = dict(max_new_tokens=12, eos_token_id=None, return_dict_in_generate=True, **{f"output_{wanted}": True})
    drafted = drafted_text(target, drafter, prompt_ids(5), **arguments)
    plain = plain_text(target, prompt_ids(5), **arguments)
    assert torch.equal(drafted.sequences, plain.sequences)
    mine, theirs = getattr(drafted, wanted), getattr(plain, wanted)
    assert len(mine) == len(theirs) == 12
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
