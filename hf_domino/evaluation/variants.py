"""The same drafter under another setting (head off, another block size), sharing its weights."""

import ast
import copy
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from hf_domino.drafter.modeling_domino import DominoDraftModel

# Settings of a drafter that transformers keeps in its `generation_config`.
_OF_GENERATION = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_SCHEDULES = ("constant", "heuristic", "heuristic_transient")  # which transformers does not check


def variant(drafter: DominoDraftModel, **changes: Any) -> DominoDraftModel:
    """A drafter with the same weights and other settings; no weight is copied.

    `head_type="none"` gives the plain DFlash drafter in it. Weights that then have no place are left out.
    `num_assistant_tokens_schedule="constant"` drafts whatever it costs.

    Raises:
        ValueError: an unknown field, a value that does not fit, or a change that would need weights that are not there.
    """
    config, generation_config = copy.deepcopy(drafter.config), copy.deepcopy(drafter.generation_config)
    for name, value in changes.items():
        if name == "num_assistant_tokens_schedule" and value not in _SCHEDULES:
            raise ValueError(f"{name} is one of {', '.join(_SCHEDULES)}, not {value!r}.")
        if name in _OF_GENERATION:
            setattr(generation_config, name, value)
            continue
        if not hasattr(config, name):
            raise ValueError(f"A drafter's configuration has no field {name!r}.")
        setattr(config, name, value)
    try:
        config.validate()
    except StrictDataclassError as error:
        raise ValueError(f"Changing {', '.join(changes)}: {error}") from error
    with torch.device("meta"):
        changed = DominoDraftModel(config)
    shared = drafter.state_dict(keep_vars=True)
    expected = changed.state_dict()
    wrong = [name for name, tensor in expected.items() if name not in shared or shared[name].shape != tensor.shape]
    if wrong:
        raise ValueError(f"Changing {', '.join(changes)} would need other weights than the drafter's: {wrong[0]}.")
    changed.load_state_dict({name: shared[name] for name in expected}, assign=True)
    changed.rotary_emb = drafter.rotary_emb  # its frequencies are no part of the state
    changed.generation_config = generation_config
    changed.use_tree = drafter.use_tree
    return changed.train(drafter.training)


def parse_changes(name: str, text: str) -> dict[str, Any]:
    """Settings as they are written in brackets: `max_tree_width=1,draft_sources=drafter`.

    Args:
        name: of what they belong to, for the error.

    Raises:
        ValueError: a part that is no key=value.
    """
    changes = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{name}: settings in brackets are written key=value.")
        try:
            changes[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            changes[key.strip()] = value.strip()
    return changes
