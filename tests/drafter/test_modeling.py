"""The backbone: precision of its positions, and packed training forwards against cached drafting."""

import pytest
import torch

from hf_domino import DominoDraftModel
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.target_domino import Target
from hf_domino.training.blocks import block_states
from tests.tiny import prompt_ids, tiny_drafter, tiny_target

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=7)


def test_casting_keeps_rotary_frequencies_exact():
    drafter = tiny_drafter(tiny_target())
    exact = drafter.rotary_emb.inv_freq.clone()
    drafter.to(torch.bfloat16)
    assert drafter.fc.weight.dtype == torch.bfloat16
    for frequencies in (drafter.rotary_emb.inv_freq, drafter.rotary_emb.original_inv_freq):
        assert frequencies.dtype == torch.float32 and torch.equal(frequencies, exact)
    assert not torch.equal(exact.bfloat16().float(), exact)  # else the test would show nothing
    assert torch.equal(tiny_drafter(tiny_target()).bfloat16().half().rotary_emb.inv_freq, exact)


def test_loading_in_bfloat16_keeps_rotary_frequencies_exact(tmp_path):
    drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path)
    loaded = DominoDraftModel.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.fc.weight.dtype == torch.bfloat16
    assert torch.equal(loaded.rotary_emb.inv_freq, drafter.rotary_emb.inv_freq)


def packed(drafter, target, text, anchors):
    view = Target(target, drafter.config)
    states = target(text, output_hidden_states=True).hidden_states
    rows = torch.arange(text.shape[0])[:, None]
    return view.tapped_states(states), block_states(
        drafter,
        view.tapped_states(states),
        view.embed(text[rows, anchors], drafter.fc.weight),
        view.embed(torch.tensor(drafter.config.mask_token_id), drafter.fc.weight),
        anchors,
        drafter.config.block_size,
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fields", [{}, SLIDING, {"shift_label": False, "head_type": "none"}], ids=str)
@torch.no_grad()
def test_packed_training_forward_equals_cached_drafting(fields, attention):
    target = tiny_target()
    drafter = tiny_drafter(target, **fields)
    drafter.set_attn_implementation(attention)
    text, anchors = prompt_ids(20, seed=2, batch=2), torch.tensor([[3, 11, 4, 17], [15, 1, 9, 2]])
    tapped, blocks = packed(drafter, target, text, anchors)
    for b in range(2):
        session, seen = DraftingSession(drafter, Target(target, drafter.config)), 0
        for i in anchors[b].argsort().tolist():
            anchor = int(anchors[b, i])
            session.observe(tapped[b : b + 1, seen:anchor], [anchor - seen])
            seen = anchor
            cached = session.block_states(text[b, anchor : anchor + 1])
            torch.testing.assert_close(blocks[b, i], cached[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fields", [{}, SLIDING], ids=str)
def test_gradient_checkpointing_keeps_the_context(fields):
    target = tiny_target()
    drafter = tiny_drafter(target, **fields).train()
    text, anchors = prompt_ids(16, seed=2), torch.tensor([[3, 9]])
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            drafter.activation_checkpointing_enable()
        drafter.zero_grad()
        _, blocks = packed(drafter, target, text, anchors)
        blocks.square().sum().backward()
        results.append((blocks.detach(), drafter.fc.weight.grad.clone()))
    assert results[0][1].abs().sum() > 0
    for plain, checkpointed in zip(*results, strict=True):
        torch.testing.assert_close(plain, checkpointed, rtol=1e-5, atol=1e-5)
