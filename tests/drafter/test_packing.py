import pytest
import torch
from torch import nn

from hf_domino.drafter import decoding_domino, packing_domino
from hf_domino.drafter.packing_domino import kept, packed_rows, packs, product
from tests.tiny import drafted_text, prompt_ids, skilled_drafter, tiny_target


@pytest.fixture(autouse=True)
def _pack_on_every_machine(monkeypatch):
    # Where the CPU has bf16 arithmetic packing is left off; the kernel is there all the same.
    monkeypatch.setattr(packing_domino, "_packing_helps", lambda: True)


def bf16_valued(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().to(parameter.dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_several_rows_give_the_same_product_from_the_other_kernel(dtype, bias, monkeypatch):
    layer = bf16_valued(nn.Linear(64, 48, bias=bias).to(dtype))
    inputs = torch.randn(1, 5, 64).to(dtype)
    exact = torch.nn.functional.linear(inputs.double(), layer.weight.double(), layer.bias.double() if bias else None)
    calls = []
    kernel = torch.ops.quantized.linear_dynamic_fp16
    monkeypatch.setattr(
        packing_domino.torch.ops.quantized, "linear_dynamic_fp16", lambda *a: calls.append(1) or kernel(*a)
    )
    with torch.no_grad(), packed_rows(layer):
        outputs = layer(inputs)
        layer(inputs[:, :1])
    assert calls == [1]  # one row stays with the ordinary kernel
    assert outputs.dtype == dtype
    tolerance = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(outputs.double(), exact, rtol=tolerance, atol=tolerance)


def test_layers_are_as_before_afterwards_and_after_an_error():
    layer = bf16_valued(nn.Linear(8, 8))
    with pytest.raises(KeyboardInterrupt), packed_rows(layer):
        assert "forward" in layer.__dict__
        raise KeyboardInterrupt
    assert "forward" not in layer.__dict__


def test_weights_that_half_precision_does_not_hold_are_left_alone():
    layer = nn.Linear(8, 8)
    layer.weight.data.fill_(1.0 + 2.0**-20)
    with packed_rows(layer):
        assert "forward" not in layer.__dict__
    layer.weight.data.fill_(1e6)
    with packed_rows(layer):
        assert "forward" not in layer.__dict__


@pytest.mark.parametrize("through_data", [False, True])
def test_a_changed_weight_is_packed_anew(through_data):
    layer = bf16_valued(nn.Linear(16, 16, bias=False))
    inputs = torch.randn(3, 16)
    with torch.no_grad(), packed_rows(layer):
        layer(inputs)
    with torch.no_grad():
        (layer.weight.data if through_data else layer.weight).mul_(2.0)
    with torch.no_grad(), packed_rows(layer):
        outputs = layer(inputs)
    torch.testing.assert_close(outputs, inputs @ layer.weight.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(512, 640), (8, 16)], ids=["packed", "small"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same_from_either_kernel(shape, stored):
    weight = bf16_valued(nn.Linear(shape[1], shape[0], bias=False)).weight.to(stored)
    for rows in (torch.randn(1, shape[1]), torch.randn(5, shape[1])):
        exact = (rows.double() @ weight.double().T).float()
        for packed in (True, False):
            torch.testing.assert_close(product(weight, packed, torch.float32)(rows), exact, rtol=1e-4, atol=1e-4)


def test_a_product_packs_only_what_half_precision_holds(monkeypatch):
    calls = []
    kernel = torch.ops.quantized.linear_dynamic_fp16
    monkeypatch.setattr(
        packing_domino.torch.ops.quantized, "linear_dynamic_fp16", lambda *a: calls.append(1) or kernel(*a)
    )
    weight, rows = torch.ones(512, 512), torch.ones(3, 512)
    product(weight, True, torch.float32)(rows)
    assert calls == [1]
    weight *= 1.0 + 2.0**-20
    assert torch.equal(product(weight, True, torch.float32)(rows), rows @ weight.T)
    assert calls == [1]


def test_what_was_made_is_kept_until_a_tensor_changes():
    module, made = nn.Linear(3, 3), []

    def make():
        made.append(1)
        return len(made)

    def get(*sources):
        return kept(module, "purpose", sources, make)

    first, second = torch.zeros(3), torch.zeros(3)
    assert get(first, second) == get(first, second) == 1
    assert kept(module, "another", [first, second], lambda: "other") == "other"
    second.add_(1)  # in place
    assert get(first, second) == get(first, second) == 2
    second.data = torch.zeros(3)  # other memory
    assert get(first, second) == 3
    assert get(first, torch.zeros(3)) == 4  # another tensor
    assert get(first) == 5
    assert kept(nn.Linear(3, 3), "purpose", [first], make) == 6  # of another module
    with torch.inference_mode():
        unversioned = torch.zeros(3)
    assert get(unversioned) == get(unversioned) == 7


def test_models_too_large_for_the_machine_are_left_alone(monkeypatch):
    layer = bf16_valued(nn.Linear(16, 16))
    assert packs(layer) and not packs(nn.Linear(4, 4).half())
    monkeypatch.setattr(packing_domino, "_physical_memory", lambda: 100)
    assert not packs(layer)
    with packed_rows(layer):
        assert "forward" not in layer.__dict__


def test_generation_through_packed_layers_gives_the_same_text():
    target = bf16_valued(tiny_target())
    drafter = bf16_valued(skilled_drafter(target))
    assert packed_rows(target)._forwards and packed_rows(drafter)._forwards
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    accepted = 0
    for seed in range(8):
        ids = prompt_ids(6, seed)
        wanted = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=24), wanted)
        accepted += sum(drafter.drafting_stats.accepted)
    assert accepted > 0


def test_drafts_end_with_a_tile_of_the_target_s_products_only(monkeypatch):
    """Beside a target that is not packed, the drafter's own layers may be: they say nothing of what verifying costs."""
    tiles = []
    costs = decoding_domino.round_costs
    monkeypatch.setattr(decoding_domino, "round_costs", lambda *a, tile, **k: tiles.append(tile) or costs(*a, **k))
    monkeypatch.setattr(decoding_domino, "plain_weights", lambda drafter: None)
    entered = []
    enter = packing_domino.PackedRows.__enter__
    monkeypatch.setattr(
        packing_domino.PackedRows, "__enter__", lambda rows: entered.append(len(rows._forwards)) or enter(rows)
    )
    packable, other = bf16_valued(tiny_target()), tiny_target()
    for target in (packable, other):
        drafted_text(target, bf16_valued(skilled_drafter(target)), prompt_ids(6), max_new_tokens=4)
    assert tiles == [packed_rows(packable).tile, 1]
    assert min(entered) > 0


def test_prompts_go_through_packed_layers_too(monkeypatch):
    target = bf16_valued(tiny_target())
    drafter = bf16_valued(skilled_drafter(target))
    products = []
    kernel = torch.ops.quantized.linear_dynamic_fp16
    monkeypatch.setattr(
        packing_domino.torch.ops.quantized,
        "linear_dynamic_fp16",
        lambda inputs, weight: products.append(inputs.shape[-2]) or kernel(inputs, weight),
    )
    drafted_text(target, drafter, prompt_ids(40), max_new_tokens=2)
    assert 40 in products
