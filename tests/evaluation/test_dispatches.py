"""What a draft round costs on any machine. These counts may only go down."""

import pytest
import torch

from hf_domino.drafter.target_domino import Target
from hf_domino.evaluation.dispatches import count_dispatches, count_round, count_straightforward_round, prepared_round
from hf_domino.evaluation.straightforward import StraightforwardDrafting
from tests.tiny import tiny_drafter, tiny_target

# As published: blocks of 16, five layers; the pool as users get it.
PUBLISHED = dict(block_size=16, num_hidden_layers=5, candidate_pool_size=32)


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def test_counts_operators_and_waits():
    ones = torch.ones(3)
    cost = count_dispatches(lambda: (ones + 1).view(3, 1) * 2)
    assert (cost.dispatches, cost.launches, cost.synchronisations) == (3, 2, 0)
    assert cost.operators == {"aten::add.Tensor": 1, "aten::view": 1, "aten::mul.Tensor": 1}


@pytest.mark.parametrize("wait", [
    lambda x: x.tolist(), lambda x: x[0].item(), lambda x: bool(x[0] > 0), lambda x: int(x[0]), lambda x: x.cpu(),
    lambda x: x.numpy(), lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: [7, 8][x[0].long()],
    lambda x: 1 if x.sum() > 0 else 0, lambda x: torch.equal(x, x),
])  # fmt: skip
def test_finds_every_way_to_wait(wait):
    ones = torch.ones(3)
    assert count_dispatches(lambda: wait(ones)).synchronisations == 1


@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("head_type", ["gru", "attention", "none"])
def test_a_round_waits_once_for_its_tokens(target, head_type, width):
    cost = count_round(target, tiny_drafter(target, head_type, **PUBLISHED), width)
    assert cost.synchronisations == 1


# What 16 levels cost now, by head and width (1 is the chain): dispatches, and launches among them.
CEILINGS = {
    ("gru", 1): (581, 446),
    ("gru", 16): (767, 538),
    ("attention", 1): (2181, 1375),
    ("attention", 16): (2352, 1467),
    ("none", 1): (349, 270),
    ("none", 16): (489, 331),
}


@pytest.mark.parametrize(("head_type", "width"), CEILINGS)
def test_a_round_never_gets_dearer(target, head_type, width):
    cost = count_round(target, tiny_drafter(target, head_type, **PUBLISHED), width)
    dispatches, launches = CEILINGS[head_type, width]
    assert cost.dispatches <= dispatches and cost.launches <= launches


def test_a_chain_takes_half_the_dispatches_of_the_straightforward_loop(target):
    drafter = tiny_drafter(target, **PUBLISHED)
    ours, straightforward = count_round(target, drafter), count_straightforward_round(target, drafter)
    assert 2 * ours.dispatches <= straightforward.dispatches


def test_the_straightforward_loop_drafts_the_same(target):
    drafter = tiny_drafter(target, **(PUBLISHED | {"candidate_pool_size": None}))
    view, levels = Target(target, drafter.config), prepared_round(target, drafter)()
    straightforward, generator = StraightforwardDrafting(drafter, view), torch.Generator().manual_seed(0)
    for positions in (32, 3, 3, 3):
        tapped = torch.randn(1, positions, drafter.fc.in_features, generator=generator)
        drafts = straightforward.round(tapped, torch.tensor([0]), drafter.config.max_drafts)
    tokens = [level[0] for level in levels[0][0]]
    assert drafts == tokens


def test_straightforward_is_for_the_gru_head(target):
    drafter = tiny_drafter(target, "none")
    assert count_straightforward_round(target, drafter) is None
    with pytest.raises(ValueError, match="'none'"):
        StraightforwardDrafting(drafter, Target(target, drafter.config))
