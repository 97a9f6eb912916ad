"""Cheap rows on CPUs without bf16 arithmetic: a few rows at once through FBGEMM's packed half-precision kernel.

Speculative decoding lives on a forward over several rows costing little more than over one. On x86 CPUs without bf16
instructions torch breaks that: one bf16 row runs a fast matrix-vector kernel, several rows an emulated product that
costs about as much again for every three rows (docs/log.md). FBGEMM multiplies float32 activations by weights packed in
half precision, accumulating in float32: the same product, as bf16 weights of ordinary size fit half precision exactly.

Only products of two rows and more are redirected, and only while a round drafts and verifies. The packed weights take
as much memory again as the model's.
"""

import itertools
import os
import re
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

# Half precision keeps bf16's eight significant bits down to 2**-17; below, at most this is lost.
_LARGEST_ERROR = 2.0**-25
_LARGEST_MEMORY_SHARE = 0.2  # of the machine's
_VALUES_COMPARED = 64  # of a tensor, to tell whether it is still the same
_ROWS_AT_ONCE = {"AVX2": 6, "AVX512": 14}  # of FBGEMM's kernel, by what the processor has
_SMALLEST = 3 * 2**16  # elements of a weight, below which calling the kernel costs more than it saves

T = TypeVar("T")
Product = Callable[[torch.Tensor], torch.Tensor]
MakeProduct = Callable[[torch.Tensor], Product]


class PackedRows:
    """While entered, linear layers with a packed weight run FBGEMM's kernel for two rows or more.

    Two threads may be in it at once: a layer that one of them has already put back gives the other the same product
    from its ordinary kernel.
    """

    def __init__(self, forwards: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]):
        self._forwards = forwards

    @property
    def tile(self) -> int:
        """How many rows the kernel multiplies in one pass over the weights."""
        return _ROWS_AT_ONCE.get(torch.backends.cpu.get_cpu_capability(), 1) if self._forwards else 1

    def __add__(self, other: "PackedRows") -> "PackedRows":
        return PackedRows(self._forwards + other._forwards)

    def __enter__(self) -> None:
        for module, forward in self._forwards:
            # Past nn.Module.__setattr__, which takes longer than a small product.
            module.__dict__["forward"] = forward

    def __exit__(self, *error: Any) -> None:
        for module, _ in self._forwards:
            module.__dict__.pop("forward", None)


def packed_rows(model: nn.Module) -> PackedRows:
    """Packs what can be packed of a model; kept for later calls, and renewed where a weight has changed."""
    return PackedRows(_packed_forwards(model) if _packing_helps() else [])


def _packing_helps() -> bool:
    return (
        torch.backends.mkldnn.is_available()
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and bool({"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines))
    )


def packs(model: nn.Module) -> bool:
    """Whether products with this model's weights are to be packed (`product`): they are faster so on this machine."""
    weights = list(model.parameters())
    size = sum(2 * weight.numel() for weight in weights)
    return _packing_helps() and all(_packable(weight) for weight in weights) and size <= _largest_memory()


def product(weight: torch.Tensor, packed: bool, dtype: torch.dtype) -> Product:
    """Rows `[n, in]` of `dtype` times a weight `[out, in]` transposed, by the faster kernel: `[n, out]`.

    Args:
        packed: packing is worth while where the model is (`packs`); `dtype` is then float32.
    """
    weight = weight.detach()
    if packed and weight.numel() >= _SMALLEST and (packed_weight := _pack(weight)) is not None:
        kernel = torch.ops.quantized.linear_dynamic_fp16
        return lambda rows: kernel(rows, packed_weight)
    return partial(torch.mm, mat2=weight.to(dtype).t())


# Per module and purpose: the tensors that something was made of, as they were then, and what was made.
_kept: "weakref.WeakKeyDictionary[nn.Module, dict[Hashable, tuple[list[_Stamp], Any]]]" = weakref.WeakKeyDictionary()


def kept(module: nn.Module, purpose: Hashable, sources: Sequence[torch.Tensor], make: Callable[[], T]) -> T:
    """What `make` returns, from an earlier call if it was made of the same tensors and none has changed since.

    It is kept as long as the module and must not hold the module itself.
    """
    of_module = _kept.setdefault(module, {})
    stamps = of_module[purpose][0] if purpose in of_module else None
    if stamps is None or len(stamps) != len(sources) or not all(map(_Stamp.is_of, stamps, sources)):
        of_module[purpose] = ([_Stamp(tensor) for tensor in sources], make())
    return of_module[purpose][1]


class _Stamp:
    """Tells whether a tensor is still the same: the object, its memory, and the count of changes in place; and some of
    its values, since changes through `.data` (PEFT merges its adapters so) are not counted."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.place, self.version = weakref.ref(tensor), tensor.data_ptr(), _version(tensor)
        self.values = _some_values(tensor).clone()

    def is_of(self, tensor: torch.Tensor) -> bool:
        same = self.tensor() is tensor and self.place == tensor.data_ptr() and self.version == _version(tensor)
        return same and torch.equal(self.values, _some_values(tensor))


def _some_values(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    values = values.diagonal() if values.ndim == 2 else values.flatten()
    return values[:: max(1, len(values) // _VALUES_COMPARED)]


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _packable(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float32)


def _largest_memory() -> float:
    return _LARGEST_MEMORY_SHARE * _physical_memory()


def _packed_forwards(model: nn.Module) -> list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]]:
    # A layer with a forward of its own (offloading hooks) is not touched, nor is any subclass.
    layers = [m for m in model.modules() if type(m) is nn.Linear and m.__dict__.get("forward") is None]
    layers = [layer for layer in layers if _packable(layer.weight)]
    if sum(2 * layer.weight.numel() for layer in layers) > _largest_memory():
        return []
    forwards: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]] = []
    for layer in layers:
        sources = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]
        # The same function in every call: compiled code is for the one it has seen.
        forward = kept(layer, "packed", sources, partial(_packed_forward, layer.weight, layer.bias, _number(layer)))
        if forward is not None:
            forwards.append((layer, forward))
    return forwards


def _packed_forward(
    weight: torch.Tensor, bias: torch.Tensor | None, number: int
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    packed, out_features = _pack(weight), weight.shape[0]
    _packed_weights[number] = packed
    if packed is None:
        return None

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        if inputs.numel() < 2 * inputs.shape[-1]:
            return F.linear(inputs, weight, bias)
        if torch.compiler.is_compiling():
            outputs = _operators.packed_product(inputs.float(), number, out_features)
        else:
            outputs = torch.ops.quantized.linear_dynamic_fp16(inputs.float(), packed)
        return (outputs if bias is None else outputs + bias).to(inputs.dtype)

    return forward


def _number(layer: nn.Module) -> int:
    """A layer's number, which it keeps when its weight changes: so what was compiled stays good."""
    if layer not in _numbers:
        _numbers[layer] = next(_next_number)
        weakref.finalize(layer, _packed_weights.pop, _numbers[layer], None)
    return _numbers[layer]


# torch.compile cannot look into packed weights: its code knows them by number, and calls an operator of ours. The
# operator is named after this module, since a Hub repo's copy of it has weights of its own.
_next_number = itertools.count()
_numbers: "weakref.WeakKeyDictionary[nn.Module, int]" = weakref.WeakKeyDictionary()
_packed_weights: dict[int, Any] = {}
_library = torch.library.Library(re.sub(r"\W", "_", __name__), "FRAGMENT")
_operators = getattr(torch.ops, _library.ns)


def _numbered_product(rows: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return torch.ops.quantized.linear_dynamic_fp16(rows, _packed_weights[number])


def _shape_of_product(rows: torch.Tensor, number: int, out_features: int) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], out_features)


if not hasattr(_operators, "packed_product"):  # transformers runs the file of a Hub repo again once it has changed
    _library.define("packed_product(Tensor rows, int number, int out_features) -> Tensor")
_library.impl("packed_product", _numbered_product, "CPU")
torch.library.register_fake(f"{_library.ns}::packed_product", _shape_of_product, lib=_library)


def _pack(weight: torch.Tensor) -> Any:
    """The packed weight, or `None` if half precision does not hold it."""
    exact = weight.detach().float().contiguous()
    if float((exact - exact.half().float()).abs().max()) > _LARGEST_ERROR:
        return None
    return torch.ops.quantized.linear_prepack_fp16(exact, None)


def _physical_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
