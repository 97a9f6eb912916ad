"""Drafters on the Hub for a given target: found by their card's metadata, chosen by measured acceptance."""

from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.hf_api import ModelInfo
from transformers import PreTrainedModel

from .configuration_domino import DominoConfig
from .target_domino import check_pair, matches_fingerprint, unwrap

DRAFTER_TAGS = ("domino", "speculative-decoding")
ACCEPTANCE_METRIC = "acceptance_length"


@dataclass(frozen=True)
class FoundDrafter:
    """One Hub repo. acceptance_length: mean over the sets of its model-index, or `None` where it gives none."""

    repo_id: str
    revision: str
    last_modified: datetime
    acceptance_length: float | None


def find_drafters(target_name: str, token: str | bool | None = None) -> list[FoundDrafter]:
    """Hub repos whose `base_model` is the target and which carry a drafter's tags, newest first.

    Args:
        target_name: Hub id of the target, as "Qwen/Qwen3-8B".
        token: of the Hub; by default the one logged in with.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: the Hub refuses or fails.
    """
    models = HfApi(token=token).list_models(
        filter=[*DRAFTER_TAGS, f"base_model:{target_name}"],
        expand=["cardData", "lastModified", "model-index", "sha", "tags"],
    )
    found = [
        FoundDrafter(model.id, model.sha, model.last_modified, _acceptance_length(model))
        for model in models
        if set(DRAFTER_TAGS) <= set(model.tags or ()) and target_name in _base_models(model)
    ]
    return sorted(found, key=lambda drafter: drafter.last_modified, reverse=True)


def best_drafter(
    target: PreTrainedModel, target_name: str | None = None, token: str | bool | None = None
) -> FoundDrafter:
    """The drafter that `DominoDraftModel.for_target` loads.

    Raises:
        LookupError: there is none; the message says what was looked at.
        ValueError: the target's Hub id is not known.
    """
    target = unwrap(target)
    target_name = target_name or getattr(target.config, "_name_or_path", None)
    if not target_name or target_name.count("/") != 1 or target_name.startswith((".", "/")):
        raise ValueError(
            f"The target was loaded from {target_name or 'nowhere'!r}, which is no Hub id; pass target_name, for "
            'example "Qwen/Qwen3-8B".'
        )
    found = find_drafters(target_name, token)
    if not found:
        raise LookupError(
            f"There is no drafter for {target_name} on the Hub: no repo has it as base_model and carries the tags "
            f"{', '.join(DRAFTER_TAGS)}. Train one (scripts/train.py), or pass the name of another target."
        )
    # Sorting is stable: the newest of equals stays first.
    found.sort(key=lambda drafter: drafter.acceptance_length or 0.0, reverse=True)
    refused = []
    for drafter in found:
        try:
            config = DominoConfig.from_pretrained(drafter.repo_id, revision=drafter.revision, token=token)
            check_pair(target, config)
        except Exception as error:  # a stranger's configuration can be wrong in any way; the next may do
            refused.append(f"{drafter.repo_id}: {error}")
            continue
        embedding = target.get_input_embeddings().weight
        if config.target_fingerprint and not matches_fingerprint(embedding, config.target_fingerprint):
            refused.append(f"{drafter.repo_id}: made for a target with other embeddings.")
            continue
        return drafter
    raise LookupError(f"None of the drafters for {target_name} on the Hub fits it. " + " ".join(refused))


def _base_models(model: ModelInfo) -> list[str]:
    base = getattr(model.card_data, "base_model", None) or []
    return [base] if isinstance(base, str) else list(base)


def _acceptance_length(model: ModelInfo) -> float | None:
    results = [result for entry in model.model_index or () for result in entry.get("results") or ()]
    values = [
        _number(metric.get("value"))
        for result in results
        for metric in result.get("metrics") or ()
        if metric.get("type") == ACCEPTANCE_METRIC
    ]
    values += [
        _number(result.metric_value)
        for result in getattr(model.card_data, "eval_results", None) or ()
        if result.metric_type == ACCEPTANCE_METRIC and not results
    ]
    values = [value for value in values if value is not None]
    return fmean(values) if values else None


def _number(value: Any) -> float | None:
    """What strangers write into a card may be no number at all."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
