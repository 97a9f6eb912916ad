"""The causal heads: the block forward equals the steps, branches stay apart, adapters count."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_domino import DominoConfig, DominoDraftModel
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.head_domino import PREFIX_ENCODERS, DraftingHead, effective_weight
from hf_domino.drafter.target_domino import Target
from tests.tiny import drafted_text, plain_text, prompt_ids, tiny_drafter, tiny_target

HEADS = ["gru", "attention"]


def encoder(head_type, seed=0):
    config = DominoConfig.for_target(
        tiny_target().config, head_type=head_type, head_hidden_size=64, initializer_range=0.3
    )
    torch.manual_seed(seed)
    return PREFIX_ENCODERS[head_type][1](config).eval()


@pytest.mark.parametrize("head_type", HEADS)
@torch.no_grad()
def test_encode_equals_its_steps(head_type):
    head, embeds, hidden = encoder(head_type), torch.randn(3, 7, 32), torch.randn(3, 7, 32)
    whole, state = head.encode(embeds, hidden), head.start(3)
    for k in range(7):
        output, state = head.step(embeds[:, k], hidden[:, k], state)
        torch.testing.assert_close(output, whole[:, k], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_type", HEADS)
@torch.no_grad()
def test_encode_is_causal(head_type):
    head, embeds, hidden = encoder(head_type), torch.randn(1, 6, 32), torch.randn(1, 6, 32)
    before = head.encode(embeds, hidden)
    embeds[:, 4], hidden[:, 4] = torch.randn(1, 32), torch.randn(1, 32)
    after = head.encode(embeds, hidden)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:], atol=1e-3)


@pytest.mark.parametrize("head_type", HEADS)
@torch.no_grad()
def test_select_branches_a_prefix(head_type):
    """Two prefixes step once; row 1 is kept twice and row 0 once; each goes on as if it had run alone."""
    head, first, second = encoder(head_type), torch.randn(2, 2, 32), torch.randn(3, 2, 32)
    output, state = head.step(first[:, 0], first[:, 1], head.start(2))
    rows = torch.tensor([1, 0, 1])
    state = head.select(state, rows)
    outputs, _ = head.step(second[:, 0], second[:, 1], state)
    for i, row in enumerate(rows):
        embeds = torch.stack([first[row, 0], second[i, 0]])[None]
        hidden = torch.stack([first[row, 1], second[i, 1]])[None]
        torch.testing.assert_close(head.encode(embeds, hidden)[0, 1], outputs[i], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_type", HEADS)
@torch.no_grad()
def test_drafting_steps_equal_the_encoder_s_and_the_correction_s(head_type):
    """Also for prefixes that branch: after two tokens, row 1 goes on twice and row 0 once."""
    drafter = tiny_drafter(tiny_target(), head_type)
    encoder, correction = drafter.prefix_encoder, drafter.embed_proj
    head = DraftingHead(encoder, correction[0].weight, lambda weight: lambda rows: rows @ weight.T)
    embeds, hidden, rows = torch.randn(5, 3, 32), torch.randn(5, 32), torch.tensor([1, 0, 1])
    memory, state = head.steps.start(2, hidden), encoder.start(2)
    for j in range(5):
        paths = 2 if j < 2 else 3
        added, memory = head.steps.step(embeds[j, :paths], hidden[j][None], memory)
        output, state = encoder.step(embeds[j, :paths], hidden[j].expand(paths, -1), state)
        features = torch.nn.functional.silu(head.from_hidden(hidden[j][None, None])[0] + added)
        wanted = correction.features(hidden[j].expand(paths, -1), output)
        torch.testing.assert_close(features, wanted, rtol=1e-5, atol=1e-5)
        if j == 1:
            memory, state = head.steps.select(memory, rows), encoder.select(state, rows)


def test_gru_equals_torch_s_own():
    head, embeds = encoder("gru"), torch.randn(2, 5, 32)
    torch.testing.assert_close(head.encode(embeds, embeds), torch.nn.GRU.forward(head, embeds)[0])


@pytest.mark.parametrize("head_type", HEADS)
def test_an_untrained_head_corrects_nothing(head_type):
    drafter = DominoDraftModel(DominoConfig.for_target(tiny_target().config, head_type=head_type, head_hidden_size=64))
    features = drafter.embed_proj.features(torch.randn(4, 32), torch.randn(4, 64))
    assert features.abs().sum() > 0 and drafter.embed_proj[2](features).abs().max() == 0
    assert drafter.prefix_encoder.state_dict() and all(
        tensor.abs().sum() > 0 for tensor in drafter.prefix_encoder.state_dict().values()
    )


def lora(drafter):
    config = LoraConfig(r=2, lora_alpha=4, target_modules=["embed_proj.0", "embed_proj.2"], init_lora_weights=False)
    return get_peft_model(drafter, config).eval()


@torch.no_grad()
def test_effective_weight_is_what_the_layer_applies():
    linear = torch.nn.Linear(5, 3, bias=False)
    assert effective_weight(linear) is linear.weight
    drafter = tiny_drafter(tiny_target())
    base = [drafter.embed_proj[i].weight.clone() for i in (0, 2)]
    layers = lora(drafter).get_base_model().embed_proj
    for layer, untouched in zip((layers[0], layers[2]), base, strict=True):
        weight, x = effective_weight(layer), torch.randn(4, layer.in_features)
        assert not torch.allclose(weight, untouched, atol=1e-2)
        torch.testing.assert_close(x @ weight.T, layer(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_drafts_respect_adapters_of_the_head():
    """A session over the wrapped head drafts as one over the head with the adapter merged in."""
    target = tiny_target()
    wrapped, untouched = lora(tiny_drafter(target)), tiny_drafter(target)
    torch.manual_seed(0)
    tapped = torch.randn(1, 6, 4 * 32)

    def draft(drafter):
        session = DraftingSession(drafter, Target(target, drafter.config))
        session.observe(tapped, [6])
        return session.propose(torch.tensor([7]), depth=6, width=3)

    with_adapter, plain = draft(wrapped.get_base_model()), draft(untouched)
    merged = draft(wrapped.merge_and_unload())
    torch.testing.assert_close(with_adapter.logprobs_BDW, merged.logprobs_BDW, rtol=1e-4, atol=1e-4)
    assert torch.equal(with_adapter.tokens_BDW, merged.tokens_BDW)
    assert not torch.allclose(with_adapter.logprobs_BDW, plain.logprobs_BDW, atol=1e-2)


def test_a_wrapped_drafter_serves_as_assistant():
    target, ids = tiny_target(), prompt_ids(5)
    wrapped = lora(tiny_drafter(target))
    plain = plain_text(target, ids, max_new_tokens=10)
    assert torch.equal(drafted_text(target, wrapped, ids, max_new_tokens=10), plain)
    assert wrapped.get_base_model().drafting_stats.drafted
