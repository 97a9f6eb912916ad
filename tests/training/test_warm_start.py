"""A warm start copies what it says it copies."""

import torch

from hf_domino.training.warm_start import decoder_layers, start_from_target
from tests.tiny import prompt_ids, tiny_target

from .conftest import small_drafter


def test_last_layers_are_copied_and_fc_passes_the_deepest_tap():
    target = tiny_target()
    drafter = small_drafter(target)
    skipped = start_from_target(drafter, target, prompt_ids(30))
    assert skipped == []
    for mine, theirs in zip(drafter.layers, decoder_layers(target)[-2:], strict=True):
        for name in (
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            "input_layernorm",
            "post_attention_layernorm",
        ):
            assert torch.equal(mine.get_submodule(name).weight, theirs.get_submodule(name).weight), name
    assert torch.equal(drafter.norm.weight, target.model.norm.weight)
    tapped = torch.randn(2, len(drafter.config.target_layer_ids) * 32)
    assert torch.equal(drafter.fc(tapped), tapped[:, -32:])


def test_queries_keep_the_size_they_have_in_the_target():
    target = tiny_target()
    drafter = small_drafter(target)
    ids = prompt_ids(30)
    start_from_target(drafter, target, ids)
    layer = decoder_layers(target)[-1].self_attn
    sizes = []
    hook = layer.q_proj.register_forward_hook(
        lambda module, inputs, output: sizes.append(output.unflatten(-1, (-1, 8)).pow(2).mean(-1).sqrt().mean())
    )
    target(ids)
    hook.remove()
    queries = torch.randn(1, 5, 4, 8)
    normed = drafter.layers[-1].self_attn.q_norm(queries)
    torch.testing.assert_close(normed.pow(2).mean(-1).sqrt().mean(), sizes[0], rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_named_and_left():
    target = tiny_target()
    drafter = small_drafter(target, intermediate_size=40)
    before = drafter.layers[0].mlp.up_proj.weight.clone()
    skipped = start_from_target(drafter, target, prompt_ids(10))
    assert "layers.0.mlp.up_proj" in skipped and "layers.1.mlp.down_proj" in skipped
    assert "layers.0.self_attn.q_proj" not in skipped
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, before)
