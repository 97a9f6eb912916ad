"""Drafter and target on different devices, and targets split over devices.

PyTorch has one CPU device, so without a GPU it is tested that hooks of accelerate disturb nothing: they move inputs,
and load offloaded weights only while a layer runs. The rest needs a GPU.
"""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

from tests.contract.pairs import assert_same, pair
from tests.tiny import PAD, prompt_ids

GREEDY = dict(do_sample=False, pad_token_id=PAD, max_new_tokens=16)


def _own_pair():
    """Not the shared one: hooks and devices stay with a model."""
    target, drafter = pair("llama")
    return copy.deepcopy(target), copy.deepcopy(drafter)


def _same_text(target, drafter, device, happened, **arguments):
    for batch in (1, 3):
        ids = prompt_ids(6, 5, batch=batch).to(device)
        arguments = GREEDY | {"eos_token_id": [1, 9], "attention_mask": torch.ones_like(ids)} | arguments
        assert_same(target.generate(ids, assistant_model=drafter, **arguments), target.generate(ids, **arguments))
    assert happened["calls"] == 2 and happened["accepted"]


def test_a_target_with_a_device_map_of_one_device(happened):
    target, drafter = _own_pair()
    dispatch_model(target, {"": "cpu"}, main_device="cpu", force_hooks=True)
    _same_text(target, drafter, "cpu", happened)


@pytest.mark.parametrize("offloaded", ["target", "drafter", "both"])
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_weights_that_only_a_layers_forward_loads_are_served_without_drafts(where, offloaded, tmp_path, happened):
    """Drafting reads the target's embedding and output head itself, and they are not there."""
    target, drafter = _own_pair()
    for name, model in (("target", target), ("drafter", drafter)):
        if offloaded in (name, "both"):
            if where == "memory":
                cpu_offload(model, torch.device("cpu"))
            else:
                disk_offload(model, tmp_path / name, torch.device("cpu"))
    ids = prompt_ids(6, 5)
    assert_same(target.generate(ids, assistant_model=drafter, **GREEDY), target.generate(ids, **GREEDY))
    assert not happened["calls"]


def test_a_target_whose_inner_layers_are_offloaded_is_drafted_for(happened):
    target, drafter = _own_pair()
    cpu_offload(target.model.layers, torch.device("cpu"))
    _same_text(target, drafter, "cpu", happened)


GPU = torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


@pytest.fixture
def gpu() -> torch.device:
    if GPU.type == "cpu":
        pytest.fail("There is no GPU here; leave these tests out with -m 'not gpu'.")
    return GPU


@pytest.mark.gpu
@pytest.mark.parametrize("moved", ["target", "drafter", "both"])
def test_drafter_and_target_on_different_devices(moved, gpu, happened):
    target, drafter = _own_pair()
    if moved in ("target", "both"):
        target.to(gpu)
    if moved in ("drafter", "both"):
        drafter.to(gpu)
    _same_text(target, drafter, target.device, happened)


@pytest.mark.gpu
@pytest.mark.parametrize("head", ["with the layers before it", "elsewhere"])
@pytest.mark.parametrize("drafter_on", ["cpu", "gpu"])
def test_a_target_split_over_devices(drafter_on, head, gpu, happened):
    target, drafter = _own_pair()
    device_map = {
        "model.embed_tokens": gpu,
        "model.rotary_emb": gpu,
        "model.layers.0": gpu,
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu" if head == "with the layers before it" else gpu,
    }
    dispatch_model(target, device_map, main_device=gpu)
    if drafter_on == "gpu":
        drafter.to(gpu)
    _same_text(target, drafter, gpu, happened)


@pytest.mark.gpu
@pytest.mark.parametrize("cache_implementation", ["offloaded", "static", "offloaded_static"])
def test_caches_of_a_gpu(cache_implementation, gpu):
    target, drafter = _own_pair()
    target.to(gpu)
    drafter.to(gpu)
    ids = prompt_ids(6, 5).to(gpu)
    arguments = GREEDY | {"cache_implementation": cache_implementation, "attention_mask": torch.ones_like(ids)}
    assert_same(target.generate(ids, assistant_model=drafter, **arguments), target.generate(ids, **arguments))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_sampling_on_a_gpu_draws_what_plain_generation_draws(batch, gpu, happened):
    target, drafter = _own_pair()
    target.to(gpu)
    drafter.to(gpu)
    ids = prompt_ids(6, 5, batch=batch).to(gpu)
    arguments = GREEDY | {"do_sample": True, "eos_token_id": [1, 9], "attention_mask": torch.ones_like(ids)}
    texts = []
    for extra in ({}, {"assistant_model": drafter}):
        torch.manual_seed(0)
        texts.append(target.generate(ids, **arguments, **extra))
    assert_same(texts[1], texts[0])
    assert happened["calls"] == 1
