"""Whole `generate` calls, drawn at random, against the same calls without a drafter.

Families times kinds times `--generate-examples` calls (56 by default: 2,016 calls in all).
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

from tests.contract.pairs import CONTRACT_FAMILIES, WINDOW, Recorder, assert_same, outcome, pair, tiny_tokenizer
from tests.tiny import PAD, VOCAB_SIZE, prompt_ids

TOKENIZER = tiny_tokenizer()
SAMPLING = {
    "temperature": st.sampled_from([0.3, 0.8, 1.5]),
    "top_k": st.sampled_from([0, 1, 8]),
    "top_p": st.sampled_from([0.4, 0.9]),
    "min_p": st.just(0.05),
    "typical_p": st.just(0.7),
    "epsilon_cutoff": st.just(0.02),
    "eta_cutoff": st.just(0.02),
    "top_h": st.just(0.5),
}
PROCESSORS = {
    "repetition_penalty": st.sampled_from([0.8, 1.3]),
    "encoder_repetition_penalty": st.just(1.3),
    "no_repeat_ngram_size": st.sampled_from([2, 3]),
    "encoder_no_repeat_ngram_size": st.just(2),
    "bad_words_ids": st.just([[5], [7, 8], [20, 21]]),
    "sequence_bias": st.just({(9,): 3.0, (10, 11): -2.0}),
    "forced_eos_token_id": st.just(1),
    "forced_bos_token_id": st.just(4),
    "suppress_tokens": st.just([4, 6, 20, 33]),
    "begin_suppress_tokens": st.just([12, 13]),
    "exponential_decay_length_penalty": st.just((3, 1.3)),
    "min_new_tokens": st.sampled_from([3, 9]),
    "min_length": st.just(14),
    "renormalize_logits": st.just(True),
    "remove_invalid_values": st.just(True),
    "prefix_allowed_tokens_fn": st.just(lambda row, ids: range(1, 40) if len(ids) % 2 else range(20, 60)),
    "watermarking_config": st.sampled_from(["lefthash", "selfhash"]),
    "logits_processor": st.just("stateful"),
}
STOPPING = {
    "eos_token_id": st.sampled_from([1, [1, 17, 30], list(range(3, 9))]),
    "stop_strings": st.sampled_from([["5"], ["Ab", "9", ":;"]]),
    "stopping_criteria": st.sampled_from(["rows", "whole"]),
    "max_time": st.just(1000.0),
}
LOOKUP = {"prompt_lookup_num_tokens": st.sampled_from([1, 6]), "max_matching_ngram_size": st.sampled_from([1, 4])}
DRAFTING = {
    "num_assistant_tokens_schedule": st.sampled_from(["constant", "constant", "heuristic"]),
    "num_assistant_tokens": st.sampled_from([None, None, 1, 3]),
    "assistant_confidence_threshold": st.sampled_from([None, None, None, 0.4]),
}


class Counting(LogitsProcessor):
    """Depends on how often it was asked, and on the rows of a batch together."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, (7 * self.calls + int(input_ids.sum())) % VOCAB_SIZE] += 2.0
        return scores


class Rows(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] % 11 == 5


class Whole(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:
        return int(input_ids[:, 1:].sum()) % 13 == 0


@dataclass
class Call:
    """One drawn call; `arguments` makes its stateful parts anew each time."""

    ids: torch.Tensor
    mask: torch.Tensor
    seed: int
    options: dict[str, Any]
    drafting: dict[str, Any]
    max_tree_nodes: int
    attention: str
    window: int
    streams: bool
    static: bool

    def arguments(self) -> dict[str, Any]:
        options = dict(self.options)
        if "logits_processor" in options:
            options["logits_processor"] = LogitsProcessorList([Counting()])
        if "stopping_criteria" in options:
            kind = {"rows": Rows, "whole": Whole}[options["stopping_criteria"]]
            options["stopping_criteria"] = StoppingCriteriaList([kind()])
        if "watermarking_config" in options:
            options["watermarking_config"] = WatermarkingConfig(seeding_scheme=options["watermarking_config"])
        if "stop_strings" in options:
            options["tokenizer"] = TOKENIZER
        return {"attention_mask": self.mask, "pad_token_id": PAD, "eos_token_id": None, "do_sample": False} | options


def some(options: dict[str, st.SearchStrategy], at_most: int) -> st.SearchStrategy[dict[str, Any]]:
    """A few of the options."""
    names = st.lists(st.sampled_from(sorted(options)), max_size=at_most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: options[name] for name in chosen}))


@st.composite
def calls(draw: st.DrawFn, kind: str) -> Call:
    batch = draw(st.sampled_from([1, 1, 3] if kind == "chain" else [2, 3, 5, 8] if kind == "batch" else [1]))
    length, seed = draw(st.sampled_from([1, 2, 4, 9, 15])), draw(st.integers(0, 10**6))
    ids = prompt_ids(length, seed, batch=batch)
    if length > 3 and draw(st.booleans()):  # something for the text branches to find
        ids[:, length // 2 :] = ids[:, : length - length // 2].clone()
    mask = torch.ones_like(ids)
    if draw(st.booleans()):
        for row in range(batch):
            mask[row, : draw(st.integers(0, length - 1))] = 0
        if length > 3 and draw(st.booleans()):
            mask[:, 1:3] = 1 - mask[:, 1:3]  # a hole behind real tokens
        ids = ids.masked_fill(mask == 0, PAD)
    options = {"max_new_tokens": draw(st.sampled_from([1, 2, 5, 10, 18]))}
    options |= draw(some(PROCESSORS, 3)) | draw(some(STOPPING, 2))
    if kind == "sampled" or (kind == "batch" and draw(st.booleans())):
        options |= {"do_sample": True} | draw(some(SAMPLING, 3))
    # Our loop leaves batches to plain generation for some options: drawn, but seldom.
    seldom = st.integers(0, 7 if kind == "batch" else 2).map(lambda number: number == 0)
    if kind == "batch":
        if not draw(seldom):
            options.setdefault("eos_token_id", draw(STOPPING["eos_token_id"]))
        for name in ("stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn"):
            if name in options and not draw(seldom):
                del options[name]
    if draw(seldom):
        names = ("return_dict_in_generate", "output_scores", "output_logits", "output_hidden_states")
        options |= dict.fromkeys(names, True)
    if draw(st.integers(0, 3)) == 0:
        options |= draw(some(LOOKUP, 2))
    return Call(
        ids, mask, seed, options,
        drafting=draw(st.fixed_dictionaries(DRAFTING)),
        max_tree_nodes=draw(st.sampled_from([1, 4, 16, 30])),
        attention=draw(st.sampled_from(["sdpa", "eager"])),
        # Batches that outgrow it are left to plain generation.
        window=draw(st.sampled_from([WINDOW, 64, 64])) if kind == "batch" else WINDOW,
        streams=draw(seldom),
        static=kind != "batch" and draw(st.integers(0, 3)) == 0,  # batches are left to plain generation then
    )  # fmt: skip


def check(family: str, kind: str, call: Call) -> None:
    target, drafter = pair(family, "eager" if family == "gemma2" else call.attention, call.window)
    drafter.use_tree = kind != "chain"
    drafter.config.max_tree_nodes = call.max_tree_nodes
    for name, value in call.drafting.items():
        setattr(drafter.generation_config, name, value)
    streamers = (Recorder(), Recorder()) if call.streams else (None, None)
    if call.static:
        call.options["cache_implementation"] = "static"
    plain_arguments = {name: value for name, value in call.arguments().items() if name not in LOOKUP}
    plain = outcome(target, call.ids, call.seed, streamer=streamers[0], **plain_arguments)
    drafted = outcome(target, call.ids, call.seed, streamer=streamers[1], assistant_model=drafter, **call.arguments())
    assert type(drafted.error) is type(plain.error), f"{drafted.error!r} for {plain.error!r}"
    if plain.error is not None:
        return
    if isinstance(plain.result, torch.Tensor):
        assert_same(drafted.result, plain.result, "sequences")
    else:
        for name in ("sequences", "scores", "logits", "hidden_states"):
            assert_same(drafted.result[name], plain.result[name], name)
    assert torch.equal(drafted.random_state, plain.random_state)
    if call.streams:
        flat = [torch.cat([part.flatten() for part in streamer.given]) for streamer in streamers]
        assert torch.equal(*flat) and streamers[1].ends == 1
        if kind != "chain":  # transformers' loop hands over what a whole block has brought
            assert [part.shape for part in streamers[1].given] == [part.shape for part in streamers[0].given]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy", "sampled", "batch", "chain"])
@pytest.mark.parametrize("family", CONTRACT_FAMILIES)
def test_a_drafter_changes_nothing_but_speed(family: str, kind: str, generate_examples: int, happened: Counter):
    @settings(max_examples=generate_examples, suppress_health_check=list(HealthCheck))
    @given(call=calls(kind))
    def run(call: Call) -> None:
        check(family, kind, call)

    run()
    if kind == "chain":
        assert not happened["calls"]
    else:  # it was our loop that ran, it accepted drafts, and they were not all chains
        assert happened["calls"] > generate_examples / 8
        assert happened["accepted"] > generate_examples / 10 and happened["moves"] > generate_examples / 30
