import pytest
import torch

from hf_domino.drafter.candidate_generator_domino import DraftLimits
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.target_domino import Target
from hf_domino.evaluation.variants import variant


def test_shares_weights(contenders):
    drafter = contenders.drafters[""]
    base = variant(drafter, head_type="none")
    assert base.prefix_encoder is None
    assert base.fc.weight is drafter.fc.weight
    assert base.device == drafter.device
    assert drafter.config.head_type == "gru"


def test_head_off_gives_the_backbones_own_drafts(contenders):
    drafter = contenders.drafters[""]
    tapped = torch.randn(1, 5, drafter.fc.in_features)
    anchor = torch.tensor([7])
    view = Target(contenders.model, drafter.config)
    sessions = [DraftingSession(one, view) for one in (drafter, variant(drafter, head_type="none"))]
    for session in sessions:
        session.observe(tapped, [5])
    with torch.no_grad():
        expected = sessions[0].target.base_logits(sessions[0].block_states(anchor)).argmax(-1)
    drafts = sessions[1].propose(anchor, drafter.config.max_drafts, 1).tokens_BDW[..., 0]
    assert torch.equal(drafts, expected)


def test_block_size(contenders):
    assert variant(contenders.drafters[""], block_size=3).config.max_drafts == 3


def test_how_much_is_drafted_is_a_setting_too(contenders):
    drafter = contenders.drafters[""]
    changed = variant(drafter, num_assistant_tokens_schedule="constant", num_assistant_tokens=2)
    limits = DraftLimits.of_call(changed, contenders.model.generation_config)
    assert limits.constant and limits.tokens == 2
    assert drafter.generation_config.num_assistant_tokens is None


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_assistant_tokens_schedule": "constnt"}, "one of constant"),
    ({"blok_size": 3}, "no field"), ({"block_size": 0}, "block_size"), ({"head_type": "attention"}, "other weights"),
    ({"num_hidden_layers": 4}, "other weights|layer_types"), ({"head_rank": 3}, "other weights"),
])  # fmt: skip
def test_refuses_what_the_weights_cannot_give(contenders, changes, message):
    with pytest.raises(ValueError, match=message):
        variant(contenders.drafters[""], **changes)
