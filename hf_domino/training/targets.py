"""Loading the target that training works for: whole, quantised, or with an adapter of its own."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import find_adapter_config_file

QUANTIZATIONS = ("4bit", "8bit")


def load_target(
    name: str | None, dtype: str | torch.dtype, adapter: str | None = None, quantization: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A target and its tokenizer, frozen.

    Args:
        name: path or Hub id; `None` for the embedded default. One of a PEFT adapter gives the model it was made for,
            with it active.
        dtype: a torch dtype or its name; of the computation where the weights are quantised.
        adapter: path or Hub id of a PEFT adapter of the target, to be active.
        quantization: "4bit" (NF4, as QLoRA has it) or "8bit", by bitsandbytes on a GPU.

    Raises:
        ValueError: there is no such dtype or quantization, the default target is to be quantised, or two adapters are
            asked for.
        ImportError: a package is missing: the default target's, or bitsandbytes.
        RuntimeError: there is no GPU to quantise for.
    """
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"There is no dtype {dtype!r}; bfloat16 and float32 are the usual ones.")
        dtype = found
    if name is not None and find_adapter_config_file(name) is not None:
        if adapter is not None:
            raise ValueError(f"The target {name} is an adapter itself; give the model as target, and one adapter.")
        adapter, name = name, _base_of(name)
    settings = quantization_settings(quantization, dtype)
    target: Any
    if name is None:
        if settings:
            raise ValueError("The embedded target is small and comes dequantised; quantise one given by --target.")
        from hf_domino.demo import load_default_target

        target, tokenizer = load_default_target(dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name)
        target = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **settings)
    if adapter is not None:
        from peft import PeftModel

        target = PeftModel.from_pretrained(target, adapter)
    return target.eval().requires_grad_(False), tokenizer


def quantization_settings(quantization: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` takes to load a quantised target; nothing for `None`.

    Raises:
        ValueError, ImportError, RuntimeError: as `load_target`.
    """
    if quantization is None:
        return {}
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"target_quantization is one of {', '.join(QUANTIZATIONS)}, got {quantization!r}.")
    if find_spec("bitsandbytes") is None:
        raise ImportError(
            "target_quantization needs bitsandbytes (`pip install bitsandbytes`). Without it, store the target's "
            "tapped states with the data (tapped_states: true): training then needs only its embedding and output head."
        )
    if not torch.accelerator.is_available():
        raise RuntimeError(
            "target_quantization needs a GPU: bitsandbytes' kernels are slower than plain ones on a CPU. Unset it; "
            "target_dtype bfloat16 halves the memory as well."
        )
    if quantization == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    return {"quantization_config": config, "device_map": "auto"}


def _base_of(adapter: str) -> str | None:
    """The model that an adapter was made for; `None` for the embedded one."""
    from peft import PeftConfig

    from hf_domino.demo import DEFAULT_TARGET

    base = PeftConfig.from_pretrained(adapter).base_model_name_or_path
    if not base:
        raise ValueError(f"The adapter {adapter} does not say which model it is for; give that as target.")
    return None if base == DEFAULT_TARGET else base
