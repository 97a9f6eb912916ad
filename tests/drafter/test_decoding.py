"""Our loop: which calls it serves, what it counts, and that text and drafter both feed its trees."""

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hf_domino.drafter import decoding_domino
from hf_domino.drafter.cost_domino import RoundCosts
from hf_domino.drafter.drafting_domino import DraftingSession
from tests.contract.pairs import Recorder, assert_same, pair, tiny_tokenizer
from tests.tiny import PAD, prompt_ids, tiny_drafter, tiny_target

ARGUMENTS = dict(do_sample=False, pad_token_id=PAD, eos_token_id=1, max_new_tokens=12)


@pytest.fixture
def served_by(monkeypatch):
    """The decoding methods that ran, by name."""
    ran: list[str] = []
    pair("llama")  # making it generates, too

    def watch(owner, name):
        original = getattr(owner, name)

        def method(*args, **kwargs):
            ran.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, method)

    watch(decoding_domino, "domino_decoding")
    watch(GenerationMixin, "_sample")
    return ran


@pytest.mark.parametrize("batch, options, served", [
    (1, {}, ["domino_decoding"]),
    (3, {}, ["domino_decoding"]),
    (3, {"eos_token_id": None}, ["domino_decoding"]),
    (3, {"do_sample": True, "top_k": 5, "repetition_penalty": 1.2}, ["domino_decoding"]),
    (1, {"return_dict_in_generate": True}, ["domino_decoding"]),
    (1, {"cache_implementation": "static"}, ["domino_decoding"]),
    (3, {"cache_implementation": "static"}, ["_sample"]),
    (1, {"prefill_chunk_size": 2}, []),  # transformers' assisted loop
    (3, {"return_dict_in_generate": True}, ["_sample"]),
    (3, {"eos_token_id": None, "max_time": 1000.0}, ["_sample"]),
    (3, {"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5]}, ["_sample"]),
    (1, {"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5]}, ["domino_decoding"]),
    (1, {"prefix_allowed_tokens_fn": lambda row, ids: [3, 4, 5], "prefill_chunk_size": 2}, ["_sample"]),
])  # fmt: skip
def test_which_method_serves_a_call(batch, options, served, served_by):
    target, drafter = pair("llama")
    target.generate(prompt_ids(5, batch=batch), assistant_model=drafter, **(ARGUMENTS | options))
    assert served_by == served


def test_attention_without_arbitrary_masks_and_unknown_caches_are_left_to_transformers(monkeypatch):
    target, _ = pair("llama")
    kwargs = {"position_ids": torch.arange(3)[None], "use_cache": True, "cache": DynamicCache(config=target.config)}
    none, config = StoppingCriteriaList(), target.generation_config
    applies = lambda **changes: decoding_domino.loop_applies(  # noqa: E731
        target, prompt_ids(3), config, [], none, kwargs | changes
    )
    assert applies()
    assert applies(cache=StaticCache(config=target.config, max_cache_len=20))
    assert not applies(cache=StaticCache(config=target.config, max_cache_len=20, offloading=True))
    assert not applies(cache=None)
    assert not applies(use_cache=False)
    assert not applies(position_ids=None)
    assert not applies(pixel_values=torch.zeros(1))
    monkeypatch.setattr(target.config, "_attn_implementation", "flash_attention_2")
    assert not applies()


def test_processors_and_criteria_that_a_batch_may_use():
    tokenizer = tiny_tokenizer()
    stops = StopStringCriteria(tokenizer, ["A"])
    assert decoding_domino.judges_rows_apart([], [stops])
    assert not decoding_domino.judges_rows_apart([PrefixConstrainedLogitsProcessor(lambda *a: [1], 1)], [])


@pytest.mark.parametrize("batch", [1, 4])
def test_statistics_add_up_to_the_text(batch):
    target, drafter = pair("llama")
    text = target.generate(
        prompt_ids(5, 2, batch=batch),
        assistant_model=drafter,
        **(ARGUMENTS | {"eos_token_id": None, "max_new_tokens": 20}),
    )
    stats = drafter.drafting_stats
    for row in range(batch):
        rounds = [i for i, owner in enumerate(stats.rows) if owner == row]
        # The prefill gives one token, each round its accepted drafts and one of the target's own.
        assert 1 + len(rounds) + sum(stats.accepted[i] for i in rounds) == text.shape[1] - 5
    assert all(0 <= a <= d for a, d in zip(stats.accepted, stats.drafted, strict=True))
    assert all(depth <= drafted for depth, drafted in zip(stats.depths, stats.drafted, strict=True))
    assert stats.acceptance_length > 1 and stats.draft_seconds > 0 and stats.verify_seconds > 0


def test_nothing_is_drafted_past_the_length_of_the_text():
    target, drafter = pair("llama")
    target.generate(prompt_ids(5), assistant_model=drafter, **(ARGUMENTS | {"max_new_tokens": 4}))
    left = 3
    for depth, accepted in zip(drafter.drafting_stats.depths, drafter.drafting_stats.accepted, strict=True):
        assert depth <= left - 1
        left -= accepted + 1


def test_a_tree_accepts_more_than_a_chain_of_the_same_drafter(monkeypatch):
    target, drafter = pair("llama")
    lengths = []
    for nodes in (30, 5):
        monkeypatch.setattr(drafter.config, "max_tree_nodes", nodes)
        accepted = rounds = 0
        for seed in range(6):
            target.generate(prompt_ids(6, seed), assistant_model=drafter, **(ARGUMENTS | {"max_new_tokens": 24}))
            accepted += sum(drafter.drafting_stats.accepted)
            rounds += len(drafter.drafting_stats.accepted)
        lengths.append(accepted / rounds)
    assert lengths[0] > lengths[1] > 0


def test_a_width_of_one_makes_the_drafters_tree_a_chain(monkeypatch):
    target, drafter = pair("llama")
    monkeypatch.setattr(drafter.config, "max_tree_width", 1)
    monkeypatch.setattr(drafter.config, "draft_sources", "drafter")
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    arguments = ARGUMENTS | {"max_new_tokens": 24}
    plain = target.generate(prompt_ids(6), **arguments)
    assert_same(target.generate(prompt_ids(6), assistant_model=drafter, **arguments), plain)
    stats = drafter.drafting_stats
    assert stats.drafted == stats.depths and max(stats.drafted) > 1


@pytest.mark.parametrize("suffices", [False, True])
def test_where_the_text_suffices_the_drafter_is_not_asked_and_not_judged(monkeypatch, suffices):
    target = tiny_target(context=0.0)  # where only the last token decides, greedy text soon goes in circles
    drafter = tiny_drafter(target)
    arguments = ARGUMENTS | {"eos_token_id": None, "max_new_tokens": 60}
    plain = target.generate(prompt_ids(5), **arguments)
    drafts, judged = [], []
    propose, record = DraftingSession.propose, RoundCosts.record_round
    monkeypatch.setattr(DraftingSession, "propose", lambda *args: drafts.append(1) or propose(*args))
    monkeypatch.setattr(RoundCosts, "record_round", lambda *args, **more: judged.append(1) or record(*args, **more))
    monkeypatch.setattr(RoundCosts, "suffices", lambda self, probabilities: suffices)
    assert_same(target.generate(prompt_ids(5), assistant_model=drafter, **arguments), plain)
    assert bool(drafts) == bool(judged) == (not suffices)
    assert sum(drafter.drafting_stats.drafted) > 0, "the text's branches are verified either way"


def test_either_source_of_drafts_can_be_left_out(monkeypatch):
    target = tiny_target(context=0.0)  # where only the last token decides, greedy text soon goes in circles
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    arguments = ARGUMENTS | {"eos_token_id": None, "max_new_tokens": 60}
    plain = target.generate(prompt_ids(5), **arguments)
    drafts = []
    propose = DraftingSession.propose
    monkeypatch.setattr(DraftingSession, "propose", lambda *args: drafts.append(1) or propose(*args))
    lengths = {}
    for sources in ("both", "drafter", "text"):
        drafts.clear()
        monkeypatch.setattr(drafter.config, "draft_sources", sources)
        assert_same(target.generate(prompt_ids(5), assistant_model=drafter, **arguments), plain)
        assert bool(drafts) == (sources != "text")
        lengths[sources] = drafter.drafting_stats.acceptance_length
    assert lengths["text"] > 2 > lengths["drafter"]
    asked = arguments | {"prompt_lookup_num_tokens": 4}
    monkeypatch.setattr(drafter.config, "draft_sources", "drafter")
    assert_same(target.generate(prompt_ids(5), assistant_model=drafter, **asked), plain)
    assert drafter.drafting_stats.acceptance_length > 2  # asked for by name, the text takes part


def test_text_branches_draft_what_the_prompt_has_said_before(monkeypatch):
    """With a drafter that proposes nothing: where only the last token decides, greedy text soon goes in circles."""
    target = tiny_target(context=0.0)
    drafter = tiny_drafter(target)
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    monkeypatch.setattr(decoding_domino.DraftTree, "add_levels", lambda *args, **kwargs: None)
    arguments = ARGUMENTS | {"eos_token_id": None, "max_new_tokens": 60}
    plain = target.generate(prompt_ids(5), **arguments)
    assert_same(target.generate(prompt_ids(5), assistant_model=drafter, **arguments), plain)
    assert sum(drafter.drafting_stats.accepted) > 20
    target.generate(prompt_ids(5), assistant_model=drafter, prompt_lookup_num_tokens=1, **arguments)
    assert max(drafter.drafting_stats.drafted) == 1


def test_a_streamer_gets_every_token_as_it_is_emitted():
    target, drafter = pair("llama")
    streamer = Recorder()
    text = target.generate(prompt_ids(5), streamer=streamer, assistant_model=drafter, **ARGUMENTS)
    assert torch.equal(torch.cat([streamer.given[0][0], *streamer.given[1:]]), text[0])
    assert all(part.shape == (1,) for part in streamer.given[1:]) and streamer.ends == 1
