"""Starting a drafter from its target's own last layers: a large gain on a small budget (docs/log.md)."""

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import unwrap

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def decoder_layers(target: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder layers of a target's text model."""
    depth = target.config.get_text_config().num_hidden_layers
    for _, module in unwrap(target).named_modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) == depth and hasattr(module[0], "self_attn"):
            return module
    raise ValueError(f"{type(target).__name__} has no list of {depth} decoder layers to start from.")


@torch.no_grad()
def start_from_target(drafter: DominoDraftModel, target: PreTrainedModel, sample_ids: torch.Tensor) -> list[str]:
    """Copies the target's last layers into the drafter's wherever shapes allow.

    `fc` passes the deepest tap on and ignores the others; the q/k norms, which many targets lack, are set so that
    queries and keys keep the size they have in the target on `sample_ids`.

    Args:
        sample_ids: a few hundred tokens of the target's text, `[B, S]`.

    Returns:
        Names of the drafter's modules that were left as they are.
    """
    skipped = []
    sources = decoder_layers(target)[-len(drafter.layers) :]
    sizes: dict[tuple[int, str], float] = {}
    hooks = []
    for i, source in enumerate(sources):
        for name in ("q_proj", "k_proj"):
            head_dim = drafter.config.head_dim

            def measure(module, inputs, output, key=(i, name), head_dim=head_dim):
                heads = output.float().unflatten(-1, (-1, head_dim))
                sizes[key] = heads.pow(2).mean(-1).sqrt().mean().item()

            hooks.append(getattr(source.self_attn, name).register_forward_hook(measure))
    target(sample_ids.to(target.device))
    for hook in hooks:
        hook.remove()

    for i, (layer, source) in enumerate(zip(drafter.layers, sources, strict=True)):
        pairs = {f"self_attn.{p}": (getattr(layer.self_attn, p), getattr(source.self_attn, p)) for p in _PROJECTIONS}
        pairs |= {
            f"mlp.{p}": (getattr(layer.mlp, p), getattr(source.mlp, p, None))
            for p in ("gate_proj", "up_proj", "down_proj")
        }
        pairs["input_layernorm"] = (layer.input_layernorm, source.input_layernorm)
        pairs["post_attention_layernorm"] = (layer.post_attention_layernorm, source.post_attention_layernorm)
        for name, (mine, theirs) in pairs.items():
            if theirs is None or mine.weight.shape != theirs.weight.shape:
                skipped.append(f"layers.{i}.{name}")
            else:
                mine.weight.copy_(theirs.weight)
        layer.self_attn.q_norm.weight.fill_(sizes[i, "q_proj"])
        layer.self_attn.k_norm.weight.fill_(sizes[i, "k_proj"])
    hidden = drafter.config.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -hidden:] = torch.eye(hidden)
    input_norms: list[Any] = [source.input_layernorm.weight.float() for source in sources]
    drafter.hidden_norm.weight.copy_(torch.stack(input_norms).mean(0))
    final_norm = next((m for n, m in unwrap(target).named_modules() if n.endswith("norm") and "layers." not in n), None)
    if final_norm is not None and final_norm.weight.shape == drafter.norm.weight.shape:
        drafter.norm.weight.copy_(final_norm.weight)
    else:
        skipped.append("norm")
    return skipped
