"""The hook into transformers. The only file that touches its private names.

`GenerationMixin._get_candidate_generator` and `._assisted_decoding` are wrapped once. An assistant that offers
`create_candidate_generator` (a Domino drafter, possibly inside a PEFT wrapper) is asked for its generator and gets our
decoding loop where that applies; everything else goes to the originals, untouched.
"""

import inspect
from typing import Any

import transformers
from transformers import GenerationMixin

from .target_domino import unwrap

_EXPECTED = {
    "_get_candidate_generator": {"self", "generation_config", "input_ids", "logits_processor", "assistant_model"},
    "_assisted_decoding": {
        "self", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "assistant_model",
    },
}
_MARK = "_domino_original"


def install() -> None:
    """Installs the hook; again is harmless, also from a second copy of this code (a Hub repo's).

    Raises:
        ImportError: this transformers has other private names than the ones this version was written for.
    """
    for name, parameters in _EXPECTED.items():
        method = getattr(GenerationMixin, name, None)
        if method is not None and hasattr(method, _MARK):
            continue
        if method is None or not parameters <= set(inspect.signature(method).parameters):
            raise ImportError(
                f"hf_domino hooks into GenerationMixin.{name}, which transformers {transformers.__version__} has "
                "changed; install a version that hf-domino's requirements name, or upgrade hf-domino."
            )
    _wrap("_get_candidate_generator", _get_candidate_generator)
    _wrap("_assisted_decoding", _assisted_decoding)


def uninstall() -> None:
    """Restores transformers' own methods."""
    for name in _EXPECTED:
        original = getattr(getattr(GenerationMixin, name), _MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def _wrap(name: str, replacement: Any) -> None:
    original = getattr(GenerationMixin, name)
    if hasattr(original, _MARK):
        return

    def method(self, *args, **kwargs):
        return replacement(original, self, *args, **kwargs)

    setattr(method, _MARK, original)
    method.__name__, method.__doc__ = name, original.__doc__
    method.__signature__ = inspect.signature(original)
    setattr(GenerationMixin, name, method)


def _drafter_of(assistant_model: Any) -> Any | None:
    drafter = unwrap(assistant_model)
    return drafter if hasattr(drafter, "create_candidate_generator") else None


def _get_candidate_generator(original, self, *args, assistant_model=None, **kwargs):
    drafter = _drafter_of(assistant_model)
    if drafter is None:
        return original(self, *args, assistant_model=assistant_model, **kwargs)
    return drafter.create_candidate_generator(self, **kwargs)


def _assisted_decoding(original, self, input_ids, *args, assistant_model=None, **kwargs):
    drafter = _drafter_of(assistant_model)
    if drafter is None:
        return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
    return original(self, input_ids, *args, assistant_model=assistant_model, **kwargs)
