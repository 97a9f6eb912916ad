"""What the drafter assumes about a target, and the pairs it refuses."""

import pytest
import torch
from transformers import LlamaModel, T5Config, T5ForConditionalGeneration

from hf_domino.drafter.target_domino import Target, check_pair, fingerprint, matches_fingerprint
from tests.tiny import FAMILIES, drafted_text, prompt_ids, tiny_drafter, tiny_target


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_embeddings_are_raw(family):
    target = tiny_target(family)
    view, ids = Target(target, tiny_drafter(target).config), prompt_ids(4)
    like = torch.zeros(1, dtype=torch.float64)
    raw = view.embed(ids, like)
    assert raw.dtype == torch.float64
    assert torch.equal(raw.float(), target.get_input_embeddings().weight[ids])
    if family == "gemma3":  # what the model itself feeds its layers is scaled
        assert not torch.allclose(target.get_input_embeddings()(ids), raw.float())


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@torch.no_grad()
def test_tapped_states_are_the_outputs_of_the_tapped_layers(family):
    target = tiny_target(family)
    view = Target(target, tiny_drafter(target, target_layer_ids=[0, 2]).config)
    outputs = {}
    hooks = [
        target.model.layers[i].register_forward_hook(lambda m, a, out, i=i: outputs.update({i: out})) for i in (0, 2)
    ]
    states = target(prompt_ids(5), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    expected = torch.cat([out if torch.is_tensor(out) else out[0] for out in (outputs[0], outputs[2])], dim=-1)
    assert torch.equal(view.tapped_states(states), expected)


@torch.no_grad()
def test_base_logits_are_the_targets_output_head():
    target = tiny_target()
    view, hidden = Target(target, tiny_drafter(target).config), torch.randn(2, 3, 32)
    logits = view.base_logits(hidden.double())
    assert logits.dtype == torch.float32 and logits.shape == (2, 3, 61)
    torch.testing.assert_close(logits, hidden @ target.lm_head.weight.T)


@pytest.mark.parametrize(
    "what, theirs, other",
    [
        ("hidden size", 32, dict(hidden_size=64)),
        ("number of layers", 4, dict(num_hidden_layers=5)),
        ("vocabulary size", 61, dict(vocab_size=67)),
    ],
)
def test_a_drafter_for_another_target_is_refused_with_both_values(what, theirs, other):
    value = next(iter(other.values()))
    drafter, target = tiny_drafter(tiny_target()), tiny_target(**other)
    with pytest.raises(ValueError, match=f"{what}: the target has {value}, the drafter was made for {theirs}"):
        Target(target, drafter.config)


def test_the_refusal_comes_before_the_first_forward():
    drafter, target = tiny_drafter(tiny_target()), tiny_target(hidden_size=64)
    target.model.register_forward_pre_hook(lambda *args: pytest.fail("the target ran"))
    with pytest.raises(ValueError, match="does not fit this target"):
        drafted_text(target, drafter, prompt_ids(4), max_new_tokens=4)


def test_targets_without_a_head_and_encoder_decoders_are_refused():
    config = tiny_drafter(tiny_target()).config
    with pytest.raises(ValueError, match="LlamaModel has no output head"):
        check_pair(LlamaModel(tiny_target().config), config)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=61, d_model=32, d_ff=8, num_layers=1, num_heads=1, d_kv=8))
    with pytest.raises(ValueError, match="decoder-only"):
        check_pair(t5, config)


def test_fingerprint_survives_noise_and_tells_models_apart():
    torch.manual_seed(0)
    mine = torch.randn(500, 32) * torch.rand(500, 1).add(0.2)
    other = torch.randn(500, 32) * torch.rand(500, 1).add(0.2)
    expected = fingerprint(mine)
    assert len(expected) == 64 and all(value == round(value, 2) for value in expected)
    assert matches_fingerprint(mine, expected) and matches_fingerprint(3 * mine, expected)
    assert matches_fingerprint(mine + 0.02 * torch.randn_like(mine), expected)
    assert matches_fingerprint(mine.bfloat16(), expected)
    assert not matches_fingerprint(other, expected)
    assert not matches_fingerprint(mine, expected[:-1])
