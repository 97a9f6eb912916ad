"""Fine-tuning a trained drafter with PEFT: what is adapted, how, and the adapter on disk.

The backbone's projections, `fc` and the head's two matrices are linear layers, which every method of PEFT reaches. The
prefix GRU is not: PEFT's `target_parameters` adapts its matrices inside the wrapper's `forward` only, and a drafter
runs its GRU step by step, past that. So the GRU is trained and saved whole (`modules_to_save`); at G 256 and H 576 that
is 1.3 MB in bfloat16.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
from torch import nn
from transformers.utils import find_adapter_config_file

from hf_domino.drafter.modeling_domino import DominoDraftModel

# Regular expressions over module names, matched whole.
GROUPS = {
    "backbone": r"layers\.\d+\.(?:self_attn|mlp)\.\w+_proj",
    "fc": "fc",
    "head": r"embed_proj\.[02]|prefix_attention\.(?:.*\.)?\w+_proj",
}
WHOLE = {"gru": "prefix_gru"}

_LINEAR_ONLY = ("ia3", "vera")  # PEFT 0.21 fails when it merges these beside a module trained whole
METHODS = ("lora", "dora", "rslora", "ia3", "vera")
_REFUSED = {
    "adalora": "it moves its ranks about between optimizer steps, which no Trainer asks it to do",
    "prompt_tuning": "a drafter reads no prompt that tokens could be put before",
    "prefix_tuning": "a drafter's keys and values come from the target's states, not from a cache of its own",
    "p_tuning": "a drafter reads no prompt that tokens could be put before",
    "adaption_prompt": "a drafter reads no prompt that tokens could be put before",
    "trainable_tokens": "a drafter has no embeddings: it uses the target's",
}

# Where a LoRA run differs from training from scratch: the backbone is trained already, so the curriculum starts at its
# end, and keeps a little of the base loss so that the logits which the head corrects do not drift.
DEFAULTS: dict[str, Any] = {"base_share": 0.0, "handover_share": 0.0, "final_base_weight": 0.1}


@dataclass
class LoraArguments:
    """What `scripts/train.py` takes for adapters."""

    lora: bool = field(default=False, metadata={"help": "Train an adapter of `init_from` instead of a drafter."})
    lora_method: str = field(default="lora", metadata={"help": f"One of {', '.join(METHODS)}."})
    lora_rank: int = field(default=16, metadata={"help": "Rank of the update of each matrix."})
    lora_alpha: float | None = field(default=None, metadata={"help": "Scale of the updates; default: twice the rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Of the adapter's input, in training."})
    lora_targets: list[str] = field(
        default_factory=list,
        metadata={
            "help": "What is adapted: backbone, fc, head, gru (trained whole), or names of linear layers; default: "
            "all of it."
        },
    )

    def __post_init__(self):
        if self.lora_method in _REFUSED:
            raise ValueError(
                f"lora_method {self.lora_method} does not work for a drafter: {_REFUSED[self.lora_method]}. Use one of "
                f"{', '.join(METHODS)}."
            )
        if self.lora_method not in METHODS:
            raise ValueError(f"lora_method is one of {', '.join(METHODS)}, got {self.lora_method!r}.")
        if self.lora_rank < 1:
            raise ValueError(f"lora_rank must be at least 1, got {self.lora_rank}.")
        if self.lora_alpha is not None and self.lora_alpha <= 0:
            raise ValueError(f"lora_alpha must be above 0, got {self.lora_alpha}.")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout must lie between 0 and 1, got {self.lora_dropout}.")
        if self.lora_dropout and self.lora_method == "ia3":
            raise ValueError("IA3 has no dropout; unset lora_dropout.")


def adapter_config(arguments: LoraArguments, drafter: DominoDraftModel) -> peft.PeftConfig:
    """PEFT's configuration for a drafter.

    Raises:
        ValueError: a target that this drafter does not have.
    """
    targets, whole = _targets(arguments, drafter)
    shared: dict[str, Any] = {"target_modules": targets, "modules_to_save": whole or None}
    if arguments.lora_method == "ia3":
        return peft.IA3Config(feedforward_modules=r".*\.down_proj", **shared)
    if arguments.lora_method == "vera":
        return peft.VeraConfig(r=arguments.lora_rank, vera_dropout=arguments.lora_dropout, **shared)
    return peft.LoraConfig(
        r=arguments.lora_rank,
        lora_alpha=arguments.lora_alpha or 2 * arguments.lora_rank,
        lora_dropout=arguments.lora_dropout,
        use_dora=arguments.lora_method == "dora",
        use_rslora=arguments.lora_method == "rslora",
        **shared,
    )


def add_adapter(drafter: DominoDraftModel, arguments: LoraArguments) -> peft.PeftModel:
    """The drafter with a new adapter; only that is trained."""
    return peft.get_peft_model(drafter, adapter_config(arguments, drafter))


def save_adapter(model: peft.PeftModel, folder: str | Path, dtype: torch.dtype) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors`, as PEFT lays them out, in this dtype."""
    state = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in model.state_dict().items()
    }
    # A drafter has no embedding layers, and PEFT would ask the Hub whether they were resized.
    model.save_pretrained(str(folder), state_dict=state, save_embedding_layers=False)
    # PEFT's card is a form to fill in; ours is made from a record, when the adapter is published.
    Path(folder, "README.md").unlink(missing_ok=True)


def load_drafter(name: str, dtype: torch.dtype) -> DominoDraftModel | peft.PeftModel:
    """A drafter in eval mode: a whole one, or a PEFT adapter (folder or Hub id) on the drafter that it names."""
    if find_adapter_config_file(name) is None:
        return DominoDraftModel.from_pretrained(name, dtype=dtype).eval()
    base = peft.PeftConfig.from_pretrained(name).base_model_name_or_path
    if not base:
        raise ValueError(f"The adapter {name} does not say which drafter it is for: base_model_name_or_path is empty.")
    return peft.PeftModel.from_pretrained(DominoDraftModel.from_pretrained(base, dtype=dtype), name).eval()


def train_only(drafter: DominoDraftModel, modules: list[str]) -> None:
    """Freezes all of the drafter but these of its direct children.

    Raises:
        ValueError: it has no such child, or one without weights.
    """
    trainable = {name: child for name, child in drafter.named_children() if any(True for _ in child.parameters())}
    wrong = sorted(set(modules) - trainable.keys())
    if wrong:
        raise ValueError(f"train_only: this drafter has no {', '.join(wrong)}; it has {', '.join(trainable)}.")
    drafter.requires_grad_(False)
    for name in modules:
        trainable[name].requires_grad_(True)


def describe(model: peft.PeftModel) -> dict[str, Any]:
    """What was adapted, for the record of a run."""
    config = model.active_peft_config
    changes = [p.numel() for p in model.parameters() if p.requires_grad]
    return {
        "peft_version": peft.__version__,
        "base_model": config.base_model_name_or_path or getattr(model.get_base_model(), "name_or_path", None),
        "trainable_parameters": sum(changes),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _targets(arguments: LoraArguments, drafter: DominoDraftModel) -> tuple[str, list[str]]:
    """A regular expression over the linear layers to adapt, and the modules to train whole."""
    linear = [name for name, module in drafter.named_modules() if isinstance(module, nn.Linear)]
    children = dict(drafter.named_children())
    groups = {group: pattern for group, pattern in GROUPS.items() if _matching(pattern, linear)}
    whole = {group: name for group, name in WHOLE.items() if name in children}
    wanted = arguments.lora_targets or [*groups, *(whole if arguments.lora_method not in _LINEAR_ONLY else [])]
    if arguments.lora_method in _LINEAR_ONLY and not whole.keys().isdisjoint(wanted):
        raise ValueError(
            f"lora_targets: PEFT cannot merge a GRU trained whole beside {arguments.lora_method}: omit gru."
        )
    patterns = []
    for name in wanted:
        if name in whole:
            continue
        pattern = groups.get(name, rf"(?:.*\.)?{re.escape(name)}")
        if not _matching(pattern, linear):
            raise ValueError(
                f"lora_targets: this drafter has no {name!r}. It has {', '.join([*groups, *whole])}, or name linear "
                f"layers as they end: {', '.join(sorted({layer.rpartition('.')[2] for layer in linear}))}."
            )
        patterns.append(pattern)
    if not patterns:
        raise ValueError(
            f"lora_targets: {', '.join(wanted)} are trained whole; name at least one of {', '.join(groups)} to "
            "adapt, or train without --lora (train_only)."
        )
    return "|".join(patterns), [module for group, module in whole.items() if group in wanted]


def _matching(pattern: str, names: list[str]) -> list[str]:
    return [name for name in names if re.fullmatch(pattern, name)]
