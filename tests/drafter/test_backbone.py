"""The backbone as drafting runs it against the model's own forward."""

import peft
import pytest
import torch

from hf_domino.drafter.backbone_domino import DraftingBackbone, ModelBackbone, plain_weights
from hf_domino.drafter.context_domino import ContextMemory
from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.packing_domino import product
from hf_domino.drafter.target_domino import Target
from tests.tiny import tiny_drafter, tiny_target

SLIDING = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=6, use_sliding_window=True)


def randomised(drafter):
    """With norm weights that matter."""
    for name, parameter in drafter.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return drafter


def plain_product(weight):
    return product(weight, False, torch.float32)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("fields", [{}, SLIDING, {"num_key_value_heads": 4}], ids=["full", "sliding", "heads"])
@torch.no_grad()
def test_equals_the_model_s_own_forward(fields, attention):
    """Two sequences with contexts of different lengths."""
    drafter = randomised(tiny_drafter(tiny_target(), **fields))
    drafter.set_attn_implementation(attention)
    fused, plain = DraftingBackbone(drafter, plain_product, torch.float32), ModelBackbone(drafter)
    tapped, positions = torch.randn(2, 9, drafter.fc.in_features), torch.arange(9).expand(2, -1)
    block, counts = torch.randn(2, 6, 32), [9, 4]
    states = []
    for backbone in (fused, plain):
        keys_values = backbone.context_keys_values(tapped, positions)
        memory = ContextMemory()
        memory.append(keys_values, counts, 6)
        masks = {"full_attention": memory.attention_mask(6, None, block)}
        masks["sliding_attention"] = memory.attention_mask(6, 6, block)
        block_positions = torch.tensor(counts)[:, None] + torch.arange(6)
        states.append((keys_values, backbone.block_states(block, block_positions, memory, masks)))
    for mine, wanted in zip(*states, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4)


def lora(drafter):
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "fc"], init_lora_weights=False)
    return peft.get_peft_model(drafter, config).eval().get_base_model()


def hooked(drafter):
    drafter.layers[1].mlp.up_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    return drafter


def offloaded(drafter):
    layer = drafter.layers[0].self_attn.o_proj
    layer.forward = lambda rows: torch.nn.functional.linear(rows, 2 * layer.weight)
    return drafter


def biased(drafter):
    drafter.layers[0].self_attn.v_proj.bias = torch.nn.Parameter(torch.ones(16))
    return drafter


@pytest.mark.parametrize("change", [lora, hooked, offloaded, biased])
@torch.no_grad()
def test_layers_that_do_more_than_their_weights_say_run_as_they_are(change):
    target, tapped = tiny_target(), torch.randn(1, 5, 4 * 32)
    drafter = tiny_drafter(target)
    assert plain_weights(drafter)
    view = Target(target, drafter.config)
    states = []
    for one in (drafter, change(tiny_drafter(target))):
        session = DraftingSession(one, view)
        session.observe(tapped, [5])
        states.append(session.block_states(torch.tensor([7])))
    assert plain_weights(one) is None
    memory = ContextMemory()
    memory.append(ModelBackbone(one).context_keys_values(tapped, torch.arange(5)[None]), [5], 6)
    embeds = view.embed(torch.tensor([[7] + [drafter.config.mask_token_id] * 5]), tapped)
    torch.testing.assert_close(states[1], one(embeds, 5 + torch.arange(6)[None], memory))
    assert not torch.allclose(states[0], states[1], atol=1e-2)


@torch.no_grad()
def test_a_later_session_sees_changed_weights():
    target, tapped = tiny_target(), torch.randn(1, 5, 4 * 32)
    drafter = tiny_drafter(target)

    def drafts(drafter):
        session = DraftingSession(drafter, Target(target, drafter.config))
        session.observe(tapped, [5])
        return session.propose(torch.tensor([7]), 6, 3).logprobs_BDW

    before = drafts(drafter)
    assert torch.equal(drafts(drafter), before)
    for change in (drafter.layers[0].self_attn.k_proj, drafter.embed_proj[0], drafter.norm):
        change.weight.mul_(-1.5)
        after = drafts(drafter)
        assert not torch.allclose(after, before, atol=1e-3)
        before = after
    fresh = tiny_drafter(target)
    fresh.load_state_dict(drafter.state_dict())
    torch.testing.assert_close(drafts(fresh), before)


@torch.no_grad()
def test_drafts_in_bfloat16():
    """The same dtype in and out, whatever the session computes in."""
    target = tiny_target().bfloat16()
    drafter = tiny_drafter(target).bfloat16()
    exact = tiny_drafter(target)
    exact.load_state_dict(drafter.state_dict())
    tapped = torch.randn(1, 5, 4 * 32).bfloat16()
    states = []
    for one, dtype in ((drafter, torch.bfloat16), (exact, torch.float32)):
        backbone = DraftingBackbone(one, lambda weight, dtype=dtype: product(weight, False, dtype), dtype)
        memory = ContextMemory()
        memory.append(backbone.context_keys_values(tapped.to(dtype), torch.arange(5)[None]), [5], 6)
        embeds = torch.ones(1, 6, 32, dtype=dtype)
        states.append(backbone.block_states(embeds, 5 + torch.arange(6)[None], memory, {}))
    assert states[0].dtype == torch.bfloat16
    torch.testing.assert_close(states[0].float(), states[1], rtol=0.1, atol=0.1)
    for head_type in ("gru", "attention", "none"):
        session = DraftingSession(tiny_drafter(target, head_type).bfloat16(), Target(target, drafter.config))
        session.observe(tapped, [5])
        levels = session.propose(torch.tensor([7]), 6, 3)
        assert levels.tokens_BDW.shape == (1, 6, 3) and bool((levels.logprobs_BDW.diff(dim=-1) <= 0).all())
