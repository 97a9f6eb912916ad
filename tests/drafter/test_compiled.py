"""Compiled targets: transformers compiles for static caches, and our loop then runs the same compiled forward."""

import gc
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import CompileConfig

from hf_domino.drafter import packing_domino
from hf_domino.drafter.cost_domino import round_costs
from tests.contract.pairs import assert_same, pair
from tests.tiny import PAD, prompt_ids

ARGUMENTS = dict(do_sample=False, pad_token_id=PAD, max_new_tokens=20, cache_implementation="static")


@pytest.fixture
def happened():
    """Graphs that were compiled, and how often they ran."""
    torch._dynamo.reset()
    yield Counter()
    torch._dynamo.reset()


def backend(happened: Counter) -> Callable:
    """Stands for a compiler."""

    def compile_graph(graph, example_inputs, **options):
        happened["graphs"] += 1

        def run(*inputs):
            happened["runs"] += 1
            return graph(*inputs)

        return run

    return compile_graph


def compiling(happened: Counter) -> dict:
    config = CompileConfig(backend=backend(happened))
    config._compile_all_devices = True
    return ARGUMENTS | {"compile_config": config}


@pytest.mark.parametrize("packed", [False, True])
def test_one_row_and_several_are_compiled_once_each(packed, happened, monkeypatch):
    monkeypatch.setattr(packing_domino, "_packing_helps", lambda: packed)
    monkeypatch.setattr(packing_domino, "_SMALLEST", 1)
    target, drafter = pair("llama")
    drafter.generation_config.num_assistant_tokens_schedule = "heuristic"  # few rows and many
    compiled, rows = compiling(happened), set()
    for seed in (5, 6, 7):
        plain = target.generate(prompt_ids(6, seed), **ARGUMENTS)
        drafted = target.generate(prompt_ids(6, seed), assistant_model=drafter, **compiled)
        assert_same(drafted, plain)
        stats = drafter.drafting_stats
        rows |= {1 + drafted for drafted in stats.drafted}
    assert 1 in rows and len(rows) > 2
    assert happened["graphs"] == 2 and happened["runs"] > 10


def test_costs_of_compiled_forwards_are_their_own(happened):
    target, drafter = pair("llama")
    target.generate(prompt_ids(6), assistant_model=drafter, **ARGUMENTS)
    eager = round_costs(target, drafter)
    before = dict(eager._verify)
    target.generate(prompt_ids(6), assistant_model=drafter, **compiling(happened))
    assert eager._verify == before
    assert round_costs(target, drafter, compiled=True)._verify


def test_nothing_is_compiled_where_plain_generation_would_not(happened):
    target, drafter = pair("llama")
    for options in ({"disable_compile": True}, {"cache_implementation": None}):
        target.generate(prompt_ids(6), assistant_model=drafter, **(compiling(happened) | options))
    assert happened["graphs"] == 0


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_a_compiled_packed_product_is_that_of_the_layer(bias, happened, monkeypatch):
    monkeypatch.setattr(packing_domino, "_packing_helps", lambda: True)
    layer = nn.Linear(64, 48, bias=bias).bfloat16()
    inputs = torch.randn(1, 5, 64).bfloat16()
    with packing_domino.packed_rows(layer):
        eager = layer(inputs)
        compiled = torch.compile(layer, backend=backend(happened))(inputs)
    torch.testing.assert_close(compiled, eager)
    assert happened["graphs"] == 1  # nothing that the compiler could not look into broke it in two


@torch.no_grad()
def test_a_changed_weight_is_packed_anew_and_nothing_compiled_anew(happened, monkeypatch):
    monkeypatch.setattr(packing_domino, "_packing_helps", lambda: True)
    layer = nn.Linear(16, 16).bfloat16()
    compiled = torch.compile(layer, backend=backend(happened))
    for factor in (1.0, 2.0, 0.5):
        layer.weight.mul_(factor)
        with packing_domino.packed_rows(layer):
            inputs = torch.randn(3, 16).bfloat16()
            torch.testing.assert_close(compiled(inputs), nn.functional.linear(inputs, layer.weight, layer.bias))
    assert happened["graphs"] == 1


def test_packed_weights_go_with_their_layer(monkeypatch):
    monkeypatch.setattr(packing_domino, "_packing_helps", lambda: True)
    layer = nn.Linear(8, 8).bfloat16()
    kept = len(packing_domino._packed_weights)
    packing_domino.packed_rows(layer)
    assert len(packing_domino._packed_weights) == kept + 1
    del layer
    gc.collect()
    assert len(packing_domino._packed_weights) == kept
