import pytest
import torch
from torch import nn

from hf_domino.drafter import packing_domino
from hf_domino.drafter.packing_domino import packed_rows
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


def test_a_changed_weight_is_packed_anew():
    layer = bf16_valued(nn.Linear(16, 16, bias=False))
    inputs = torch.randn(3, 16)
    with torch.no_grad(), packed_rows(layer):
        layer(inputs)
    with torch.no_grad():
        layer.weight.mul_(2.0)
    with torch.no_grad(), packed_rows(layer):
        outputs = layer(inputs)
    torch.testing.assert_close(outputs, inputs @ layer.weight.T, rtol=1e-5, atol=1e-5)


def test_models_too_large_for_the_machine_are_left_alone(monkeypatch):
    monkeypatch.setattr(packing_domino, "_physical_memory", lambda: 100)
    layer = bf16_valued(nn.Linear(16, 16))
    with packed_rows(layer):
        assert "forward" not in layer.__dict__


def test_generation_through_packed_layers_gives_the_same_text():
    target = bf16_valued(tiny_target())
    drafter = bf16_valued(skilled_drafter(target))
    assert packed_rows(target, drafter)._forwards
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    accepted = 0
    for seed in range(8):
        ids = prompt_ids(6, seed)
        wanted = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
        assert torch.equal(drafted_text(target, drafter, ids, max_new_tokens=24), wanted)
        accepted += sum(drafter.drafting_stats.accepted)
    assert accepted > 0


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
