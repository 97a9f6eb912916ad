"""Anchors, labels and the packed forward: no block sees its own future or another block."""

import pytest
import torch

from hf_domino.drafter.target_domino import Target
from hf_domino.training.blocks import block_states, make_blocks, sample_anchors, sequence_generators
from tests.tiny import prompt_ids, tiny_drafter, tiny_target


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def pair(request):
    """gemma3's drafter has sliding layers too."""
    target = tiny_target(request.param)
    overrides = {
        "llama": {},
        "gemma3": {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 8,
            "use_sliding_window": True,
        },
    }[request.param]
    return target, tiny_drafter(target, **overrides)


def states_of(target, drafter, ids, anchors, tapped=None):
    view, like = Target(target, drafter.config), drafter.fc.weight
    if tapped is None:
        tapped = tapped_of(target, drafter, ids)
    rows = torch.arange(ids.shape[0])[:, None]
    embeds = view.embed(ids[rows, anchors], like)
    mask_embed = view.embed(torch.tensor(drafter.config.mask_token_id), like)
    return block_states(drafter, tapped, embeds, mask_embed, anchors, drafter.config.block_size)


def tapped_of(target, drafter, ids):
    view = Target(target, drafter.config)
    return view.tapped_states(target(ids, output_hidden_states=True).hidden_states)


@torch.no_grad()
def test_packed_blocks_equal_blocks_run_alone_on_a_cut_context(pair):
    target, drafter = pair
    ids = prompt_ids(24, batch=2)
    anchors = torch.tensor([[3, 11, 19], [1, 2, 22]])
    packed = states_of(target, drafter, ids, anchors)
    tapped = tapped_of(target, drafter, ids)
    for row in range(2):
        for i, anchor in enumerate(anchors[row].tolist()):
            # The context is cut just before the anchor: nothing at or after it is there to be seen.
            alone = states_of(
                target, drafter, ids[row : row + 1], torch.tensor([[anchor]]), tapped[row : row + 1, :anchor]
            )
            torch.testing.assert_close(packed[row, i], alone[0, 0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_later_context_and_other_blocks_change_nothing(pair):
    target, drafter = pair
    ids, anchors = prompt_ids(24), torch.tensor([[5, 12]])
    tapped = tapped_of(target, drafter, ids)
    before = states_of(target, drafter, ids, anchors, tapped)
    disturbed = tapped.clone()
    disturbed[:, 5:] += 3.0
    after = states_of(target, drafter, ids, anchors, disturbed)
    assert torch.equal(before[0, 0], after[0, 0])
    assert not torch.allclose(before[0, 1], after[0, 1])
    moved = states_of(target, drafter, ids, torch.tensor([[5, 20]]), tapped)
    assert torch.equal(before[0, 0], moved[0, 0])
    # And what stands just before the anchor is seen.
    disturbed = tapped.clone()
    disturbed[:, 4] += 3.0
    assert not torch.allclose(before[0, 0], states_of(target, drafter, ids, anchors, disturbed)[0, 0])


@pytest.mark.parametrize("shift_label", [True, False])
def test_labels_are_the_tokens_after_the_anchor(shift_label):
    target = tiny_target()
    drafter = tiny_drafter(target, shift_label=shift_label)
    drafts, ids = drafter.config.max_drafts, prompt_ids(20)
    anchors = torch.tensor([[2, 9, 17]])
    mask = torch.arange(20)[None] >= 3
    blocks = make_blocks(ids, mask, torch.tensor([20]), drafts, anchors, torch.ones(1, 3, dtype=torch.bool))
    for i, anchor in enumerate(anchors[0].tolist()):
        assert blocks.tokens_BAJ[0, i, 0] == ids[0, anchor]
        for j in range(drafts):
            # Naively: row k of the block stands at anchor + k, and predicts the token there or the one after.
            row = j + drafter.config.row_offset
            position = anchor + row + (1 if shift_label else 0)
            inside = position < 20
            assert blocks.supervised_BAJ[0, i, j] == inside
            if inside:
                assert blocks.tokens_BAJ[0, i, 1 + j] == ids[0, position]


def test_supervision_ends_at_the_first_token_that_is_not_an_answer_s():
    ids = prompt_ids(14)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]])
    blocks = make_blocks(ids, mask, torch.tensor([12]), 5, torch.tensor([[2, 8]]), torch.tensor([[True, True]]))
    assert blocks.supervised_BAJ[0].tolist() == [
        [True, True, True, False, False],  # a new user turn follows
        [True, True, True, False, False],  # the sequence ends: the rest is padding
    ]


def test_anchors_have_context_before_and_an_answer_s_token_after():
    mask = torch.zeros(3, 12, dtype=torch.bool)
    mask[0, :] = True
    mask[1, 5:8] = True
    anchors, real = sample_anchors(mask, 50)
    assert sorted(anchors[0][real[0]].tolist()) == list(range(1, 11))
    assert sorted(anchors[1][real[1]].tolist()) == [4, 5, 6]
    assert not real[2].any()


def test_no_usable_anchor_gives_a_filler():
    anchors, real = sample_anchors(torch.zeros(2, 5, dtype=torch.bool), 4)
    assert anchors.shape == real.shape == (2, 1)
    assert not real.any()


def test_anchors_follow_from_seed_step_and_sequence_alone():
    mask = torch.ones(4, 60, dtype=torch.bool)
    together, _ = sample_anchors(mask, 5, sequence_generators(7, 3, [10, 11, 12, 13]))
    apart, _ = sample_anchors(mask[:2], 5, sequence_generators(7, 3, [12, 10]))
    assert torch.equal(together[[2, 0]], apart)
    later, _ = sample_anchors(mask, 5, sequence_generators(7, 4, [10, 11, 12, 13]))
    assert not torch.equal(together, later)
