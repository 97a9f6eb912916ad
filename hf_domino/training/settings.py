"""Settings of a run: one YAML file, and flags that override it."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


def parse_settings(
    classes: Sequence[type], argv: Sequence[str] | None = None, defaults: Mapping[str, Any] | None = None
) -> tuple[Any, ...]:
    """Instances of the dataclasses from `[settings.yaml] [--flag value ...]`.

    A mapping in the file fills a field that takes a list of `name=value`; flags then add to it.

    Args:
        defaults: stand in for the dataclasses' own where neither file nor flags give a value.

    Raises:
        ValueError: the file holds a setting that none of the dataclasses has.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    given: dict[str, Any] = {}
    if argv and not argv[0].startswith("-"):
        given = yaml.safe_load(Path(argv.pop(0)).read_text(encoding="utf-8")) or {}
    known = {f.name for cls in classes for f in fields(cls) if f.init}
    unknown = sorted(given.keys() - known)
    if unknown:
        raise ValueError(f"The settings file holds what no setting is called: {', '.join(unknown)}.")
    mappings = {name: value for name, value in given.items() if isinstance(value, dict) and _takes_list(classes, name)}
    parser = HfArgumentParser(list(classes))
    for action in parser._actions:
        if defaults and action.dest in defaults:
            action.default = defaults[action.dest]
        if action.dest in given:
            action.required = False
            action.default = _plain(given[action.dest]) if action.dest not in mappings else []
    parsed = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    for name, mapping in mappings.items():
        owner = next(settings for settings in parsed if hasattr(settings, name))
        setattr(owner, name, [f"{key}={json.dumps(value)}" for key, value in mapping.items()] + getattr(owner, name))
    return parsed


def _takes_list(classes: Sequence[type], name: str) -> bool:
    return any(f.name == name and str(f.type).startswith("list") for cls in classes for f in fields(cls))


def _plain(value: Any) -> Any:
    # YAML 1.1 reads 1e-3 as text; argparse parses text by the flag's type, and leaves other values as they are.
    return json.dumps(value) if isinstance(value, dict) else value
