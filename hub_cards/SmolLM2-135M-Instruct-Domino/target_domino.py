"""Everything the drafter assumes about its target: raw embedding, output head, tapped states, and what fits it."""

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from .configuration_domino import DominoConfig

if TYPE_CHECKING:
    from .modeling_domino import DominoDraftModel

_FINGERPRINT_ROWS = 64
_PADDED_TO = 64  # vocabularies are padded to a multiple of this,
_MOST_PADDING = 1024  # by less than this


class Target:
    """A target model as the drafter sees it.

    Args:
        model: the model whose `generate` is called; PEFT wrappers and composite models are seen through.
        config: the drafter's configuration.

    Raises:
        ValueError: the pair does not fit; the message gives both sides' values.
    """

    def __init__(self, model: PreTrainedModel, config: DominoConfig):
        self.model = model
        self.config = config
        check_pair(model, config)
        self.embedding = input_embedding(model)
        self.output_head = model.get_output_embeddings()

    @property
    def hidden_states_indices(self) -> list[int]:
        """The tapped entries of `hidden_states` as transformers returns them: entry 0 is the embedding."""
        return [layer_id + 1 for layer_id in self.config.target_layer_ids]

    def tapped_states(self, hidden_states: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
        """The tapped layers' states, concatenated: `[B, S, M·H]`."""
        tapped = [hidden_states[index] for index in self.hidden_states_indices]
        device = tapped[0].device
        return torch.cat([states.to(device) for states in tapped], dim=-1)

    def embed(self, token_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding matrix, `[..., H]`, without the scale or norm that some targets apply to them.

        Args:
            like: gives the device and dtype of the result.
        """
        weight = self.embedding
        return F.embedding(token_ids.to(weight.device), weight).to(device=like.device, dtype=like.dtype)

    def head_rows(self, token_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows of the output head, `[Vd, H]`, on the device and in the dtype of `like`."""
        weight = self.output_head.weight
        return weight[token_ids.to(weight.device)].to(device=like.device, dtype=like.dtype)

    def base_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's output head over block states: `[..., V]`, in float32, on the drafter's device.

        A final soft cap is monotone and left out: drafts only need the order of the logits.
        """
        weight = self.output_head.weight
        logits = self.output_head(hidden.to(device=weight.device, dtype=weight.dtype))
        return logits[..., : self.config.vocab_size].to(device=hidden.device, dtype=torch.float32)


def check_pair(model: PreTrainedModel, config: DominoConfig) -> None:
    """Refuses a drafter that does not fit the target, before any forward.

    Raises:
        ValueError: what differs, with both sides' values.
    """
    if model.config.is_encoder_decoder:
        raise ValueError("A Domino drafter needs a decoder-only target; this one is an encoder-decoder.")
    text = model.config.get_text_config()
    if getattr(model, "_is_stateful", False) or "linear_attention" in (getattr(text, "layer_types", None) or ()):
        raise ValueError(
            f"{type(model).__name__} has recurrent layers, whose state cannot go back to where a draft was refused; "
            "generate without assistant_model."
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no output head; load it with AutoModelForCausalLM.")
    differences = [
        f"{what}: the target has {ours}, the drafter was made for {theirs}"
        for what, ours, theirs in (
            ("hidden size", text.hidden_size, config.hidden_size),
            ("number of layers", text.num_hidden_layers, config.num_target_layers),
            ("vocabulary size", text.vocab_size, config.vocab_size),
        )
        if ours != theirs and not (what == "vocabulary size" and _is_padding(ours, theirs))
    ]
    if differences:
        raise ValueError(
            f"This drafter does not fit this target. {'; '.join(differences)}. Use a drafter trained for "
            f"{getattr(model.config, '_name_or_path', None) or type(model).__name__}"
            f"{f' (this one was trained for {config.target_name})' if config.target_name else ''}."
        )


def _is_padding(target_size: int, drafter_size: int) -> bool:
    """Whether the target's vocabulary is the drafter's, padded for speed; the padding is never drafted."""
    return target_size % _PADDED_TO == 0 and 0 < target_size - drafter_size < _MOST_PADDING


_compared: "weakref.WeakKeyDictionary[DominoDraftModel, weakref.WeakSet]" = weakref.WeakKeyDictionary()


def warn_of_other_target(model: PreTrainedModel, drafter: "DominoDraftModel") -> None:
    """Warns, once for a pair, of a target that is not the one (or a descendant) that the drafter was trained for."""
    config = drafter.config
    compared = _compared.setdefault(drafter, weakref.WeakSet())
    embedding = input_embedding(model)
    if not config.target_fingerprint or model in compared or embedding.is_meta:
        return
    compared.add(model)
    if not matches_fingerprint(embedding[: config.vocab_size], config.target_fingerprint):
        warnings.warn(
            f"This drafter was trained for {config.target_name or 'another target'}, whose embeddings differ from "
            f"those of {getattr(model.config, '_name_or_path', None) or type(model).__name__}: the output stays "
            "right, but few drafts will be accepted, so expect little or no speed-up.",
            stacklevel=4,
        )


def has_virtual_tokens(model: PreTrainedModel) -> bool:
    """Whether a PEFT wrapper puts a learned prompt into the target's cache, where it has no place in the text."""
    wrapper = getattr(model.prepare_inputs_for_generation, "__self__", None)
    return bool(getattr(getattr(wrapper, "active_peft_config", None), "is_prompt_learning", False))


def fingerprint(embedding: torch.Tensor) -> list[float]:
    """A coarse fingerprint of a target's embedding: relative norms of a few rows, two digits.

    It survives quantising and fine-tuning and tells models of one shape apart.
    """
    rows = torch.linspace(0, embedding.shape[0] - 1, _FINGERPRINT_ROWS).long()
    norms = embedding[rows.to(embedding.device)].float().norm(dim=-1)
    return [round(value, 2) for value in (norms / norms.mean().clamp_min(1e-12)).tolist()]


def matches_fingerprint(embedding: torch.Tensor, expected: list[float], tolerance: float = 0.1) -> bool:
    """Whether the embedding is, or descends from, the one the fingerprint was taken of."""
    found = fingerprint(embedding)
    if len(found) != len(expected):
        return False
    return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(found) < tolerance


def input_embedding(model: PreTrainedModel) -> torch.Tensor:
    """The target's input embedding matrix, `[V, H]`."""
    weight: Any = model.get_input_embeddings().weight
    return weight


def unwrap(model: Any) -> Any:
    """The model inside a PEFT wrapper (its adapters stay active), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
