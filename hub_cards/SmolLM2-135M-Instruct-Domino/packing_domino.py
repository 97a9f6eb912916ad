"""Cheap rows on CPUs without bf16 arithmetic: a few rows at once through FBGEMM's packed half-precision kernel.

Speculative decoding lives on a forward over several rows costing little more than over one. On x86 CPUs without bf16
instructions torch breaks that: one bf16 row runs a fast matrix-vector kernel, several rows an emulated product that
costs about as much again for every three rows (docs/log.md). FBGEMM multiplies float32 activations by weights packed in
half precision, accumulating in float32: the same product, as bf16 weights of ordinary size fit half precision exactly.

Only products of two rows and more are redirected, and only while a round drafts and verifies. The packed weights take
as much memory again as the model's.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

# Half precision keeps bf16's eight significant bits down to 2**-17; below, at most this is lost.
_LARGEST_ERROR = 2.0**-25
_LARGEST_MEMORY_SHARE = 0.2  # of the machine's


class PackedRows:
    """While entered, linear layers with a packed weight run FBGEMM's kernel for two rows or more.

    Two threads may be in it at once: a layer that one of them has already put back gives the other the same product
    from its ordinary kernel.
    """

    def __init__(self, forwards: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]):
        self._forwards = forwards

    def __enter__(self) -> None:
        for module, forward in self._forwards:
            # Past nn.Module.__setattr__, which takes longer than a small product.
            module.__dict__["forward"] = forward

    def __exit__(self, *error: Any) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


def packed_rows(*models: nn.Module) -> PackedRows:
    """Packs what can be packed of these models; kept for later calls, and renewed where a weight has changed."""
    if not _packing_helps():
        return PackedRows([])
    return PackedRows([entry for model in models for entry in _packed_forwards(model)])


def _packing_helps() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and bool({"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines))
    )


# Per layer: its weight and that weight's version when it was packed, and the packed form (`None`: it does not fit).
_kept: "weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref, int, Any]]" = weakref.WeakKeyDictionary()


def _packed_forwards(model: nn.Module) -> list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    # A layer with a forward of its own (offloading hooks) is not touched, nor is any subclass.
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.__dict__.get("forward") is None]
    layers = [m for m in layers if m.weight.device.type == "cpu" and m.weight.dtype in (torch.bfloat16, torch.float32)]
    if sum(2 * layer.weight.numel() for layer in layers) > _LARGEST_MEMORY_SHARE * _physical_memory():
        return []
    forwards: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = []
    for layer in layers:
        entry = _kept.get(layer)
        if entry is None or entry[0]() is not layer.weight or entry[1] != layer.weight._version:
            entry = _kept[layer] = (weakref.ref(layer.weight), layer.weight._version, _pack(layer.weight))
        if entry[2] is not None:
            forwards.append((layer, _forward(layer, entry[2])))
    return forwards


def _forward(layer: nn.Linear, packed: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = layer.weight, layer.bias

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.numel() < 2 * inputs.shape[-1]:
            return F.linear(inputs, weight, bias)
        outputs = torch.ops.quantized.linear_dynamic_fp16(inputs.float(), packed)
        return (outputs if bias is None else outputs + bias).to(inputs.dtype)

    return forward


def _pack(weight: torch.Tensor) -> Any:
    """The packed weight, or `None` if half precision does not hold it."""
    exact = weight.detach().float()
    if float((exact - exact.half().float()).abs().max()) > _LARGEST_ERROR:
        return None
    return torch.ops.quantized.linear_prepack_fp16(exact, None)


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
