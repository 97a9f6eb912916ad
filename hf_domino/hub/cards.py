"""Cards for the Hub, rendered from a template and a JSON record; a field without a value is an error.

Records are plain JSON; docs/publishing.md lists their fields. Figures in them come from benchmark records.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCard, DatasetCardData, EvalResult, ModelCard, ModelCardData

from ..drafter.configuration_domino import DominoConfig
from ..drafter.finding_domino import DRAFTER_TAGS
from .results import card_results, eval_results

_PACKAGE = Path(__file__).parents[1]
# Beside the package in a checkout, inside it in a wheel.
TEMPLATES = next(
    (path for path in (_PACKAGE / "hub_cards/templates", _PACKAGE.parent / "hub_cards/templates") if path.is_dir()),
    _PACKAGE / "hub_cards/templates",
)


def drafter_card(config: Mapping[str, Any], record: Mapping[str, Any]) -> ModelCard:
    """Card of a drafter.

    There is no pipeline tag: the Hub would print the snippet of a model that generates by itself.

    Args:
        config: content of the drafter's config.json.
        record: of its training and benchmarks.

    Raises:
        ValueError: the record lacks a field that the card shows.
    """
    results = card_results(record.get("results") or ())
    data = ModelCardData(
        base_model=_field(record, "target", "name"),
        tags=[*DRAFTER_TAGS, "draft-model", "dflash"],
        license=_field(record, "license"),
        language=record.get("language"),
        library_name="transformers",
        **_index(record, results),
    )
    architecture = _architecture(DominoConfig.from_dict(dict(config)))
    return ModelCard(_render("drafter", data, {**record, "results": results, "architecture": architecture}))


def adapter_card(record: Mapping[str, Any]) -> ModelCard:
    """Card of a PEFT adapter for a drafter.

    Raises:
        ValueError: the record lacks a field that the card shows.
    """
    results = card_results(record.get("results") or ())
    data = ModelCardData(
        base_model=_field(record, "drafter", "name"),
        base_model_relation="adapter",
        tags=[*DRAFTER_TAGS, "draft-model", "dflash", "peft", "lora"],
        license=_field(record, "license"),
        language=record.get("language"),
        library_name="peft",
        **_index(record, results),
    )
    return ModelCard(_render("adapter", data, {**record, "results": results}))


def dataset_card(record: Mapping[str, Any]) -> DatasetCard:
    """Card of text that a target generated to train drafters on.

    Raises:
        ValueError: the record lacks a field that the card shows.
    """
    data = DatasetCardData(
        language=record.get("language"),
        license=_field(record, "license"),
        annotations_creators="machine-generated",
        task_categories=["text-generation"],
        tags=["synthetic", *DRAFTER_TAGS],
        pretty_name=_field(record, "repo_id").split("/")[-1],
    )
    return DatasetCard(_render("dataset", data, dict(record)))


def _index(record: Mapping[str, Any], results: list[dict[str, Any]]) -> dict[str, Any]:
    found: list[EvalResult] = eval_results(results)
    return {"model_name": _field(record, "repo_id").split("/")[-1], "eval_results": found} if found else {}


def _field(record: Mapping[str, Any], *path: str) -> str:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    if not value or not isinstance(value, str):
        raise ValueError(f"The card's record lacks {'.'.join(path)}; docs/publishing.md lists its fields.")
    return value


def _architecture(config: DominoConfig) -> dict[str, Any]:
    head = (
        "none"
        if config.head_type == "none"
        else (f"{config.head_type}, width {config.head_hidden_size}, rank {config.head_rank}")
    )
    predicts = "the token after it" if config.shift_label else "the token at its own place"
    draft_vocabulary = config.draft_vocab_size
    return {
        "Backbone": f"{config.num_hidden_layers} Qwen3-style layers, hidden size {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {config.num_key_value_heads} key/value heads",
        "Head": head,
        "Block": f"{config.block_size} rows, {config.max_drafts} drafts; a row predicts {predicts}",
        "Tapped layers of the target": f"{', '.join(map(str, config.target_layer_ids))} "
        f"of {config.num_target_layers} (0-based)",
        "Mask token": config.mask_token_id,
        "Vocabulary": f"{config.vocab_size}, of which {draft_vocabulary or 'all'} are drafted",
        "RoPE base": (config.rope_parameters or {}).get("rope_theta"),
    }


def _render(template: str, data: Any, fields: Mapping[str, Any]) -> str:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        finalize=_refuse_empty,
        keep_trailing_newline=True,
    )
    try:
        text = environment.get_template(f"{template}.md.jinja").render(card_data=data.to_yaml(), **fields)
    except jinja2.UndefinedError as error:
        raise ValueError(f"The card's record is not complete: {error}; docs/publishing.md lists its fields.") from error
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _refuse_empty(value: Any) -> Any:
    if value is None or value == "":
        raise ValueError("The card's record has a field without a value; say what is known, or that it is not known.")
    return value
