"""The hook into transformers. The only file that touches its private names.

Three methods of `GenerationMixin` are wrapped once. An assistant that offers `create_candidate_generator` (a Domino
drafter, possibly inside a PEFT wrapper) is checked against the target before anything runs, gets our decoding loop
where that applies, and is asked for its generator otherwise; everything else goes to the originals, untouched.
"""

import importlib
import inspect
from typing import Any

import transformers
from transformers import GenerationMixin

from .emission_domino import judges_blocks
from .target_domino import check_pair, has_virtual_tokens, input_embedding, unwrap, warn_of_other_target
from .verifying_domino import outgrows

_EXPECTED = {
    "_validate_generation_mode": {"self", "generation_mode", "generation_config", "generation_mode_kwargs"},
    "_get_candidate_generator": {"self", "generation_config", "input_ids", "logits_processor", "assistant_model"},
    "_assisted_decoding": {
        "self",
        "input_ids",
        "logits_processor",
        "stopping_criteria",
        "generation_config",
        "assistant_model",
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
    _wrap("_validate_generation_mode", _validate_generation_mode)
    _wrap("_get_candidate_generator", _get_candidate_generator)
    _wrap("_assisted_decoding", _assisted_decoding)


def uninstall() -> None:
    """Restores transformers' own methods."""
    for name in _EXPECTED:
        original = getattr(getattr(GenerationMixin, name), _MARK, None)
        if original is not None:
            setattr(GenerationMixin, name, original)


def offer_to_pipelines(model_class: type) -> None:
    """Lets `pipeline(..., assistant_model=path)` find the class, which it looks for in transformers by its name."""
    # Not the module imported above: loading its models can replace transformers' lazy module by another.
    setattr(importlib.import_module("transformers"), model_class.__name__, model_class)


def _wrap(name: str, replacement: Any) -> None:
    original = getattr(GenerationMixin, name)
    if hasattr(original, _MARK):
        return

    def method(self, *args, **kwargs):
        return replacement(original, self, *args, **kwargs)

    setattr(method, _MARK, original)
    method.__name__, method.__doc__ = name, original.__doc__
    setattr(method, "__signature__", inspect.signature(original))  # noqa: B010
    setattr(GenerationMixin, name, method)


def _drafter_of(assistant_model: Any) -> Any | None:
    drafter = unwrap(assistant_model)
    return drafter if hasattr(drafter, "create_candidate_generator") else None


def _validate_generation_mode(original, self, generation_mode, generation_config, generation_mode_kwargs):
    drafter = _drafter_of(generation_mode_kwargs.get("assistant_model"))
    if drafter is not None:
        check_pair(self, drafter.config)
        warn_of_other_target(self, drafter)
        # The original compares vocabularies for assistants that have one of their own.
        generation_mode_kwargs = {k: v for k, v in generation_mode_kwargs.items() if k != "assistant_model"}
    return original(self, generation_mode, generation_config, generation_mode_kwargs)


def _get_candidate_generator(original, self, *args, assistant_model=None, **kwargs):
    drafter = _drafter_of(assistant_model)
    if drafter is None:
        return original(self, *args, assistant_model=assistant_model, **kwargs)
    return drafter.create_candidate_generator(self, **kwargs)


def _assisted_decoding(
    original,
    self,
    input_ids,
    logits_processor,
    stopping_criteria,
    generation_config,
    synced_gpus=False,
    streamer=None,
    assistant_model=None,
    **kwargs,
):
    arguments = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "generation_config": generation_config,
    }
    drafter = _drafter_of(assistant_model)
    if drafter is None:
        arguments |= {"synced_gpus": synced_gpus, "streamer": streamer, "assistant_model": assistant_model}
        return original(self, input_ids, **arguments, **kwargs)
    model_kwargs = {k: v for k, v in kwargs.items() if k not in ("inputs_tensor", "assistant_tokenizer", "tokenizer")}
    drafts = (
        not has_virtual_tokens(self)
        and not is_offloaded(self, drafter)
        and not outgrows(model_kwargs.get("cache"), generation_config.max_length)
    )
    if drafts and not synced_gpus:
        result = drafter.decode_for(self, input_ids, **arguments, model_kwargs=model_kwargs, streamer=streamer)
        if result is not None:
            return result
    arguments |= {"synced_gpus": synced_gpus, "streamer": streamer}
    if not drafts or input_ids.shape[0] > 1 or not judges_blocks(logits_processor, stopping_criteria):
        # transformers' assisted loop has no batches and overruns these: the same text, without drafts.
        return self._sample(input_ids, **arguments, **model_kwargs)
    return original(self, input_ids, **arguments, assistant_model=assistant_model, **kwargs)


def is_offloaded(target: Any, drafter: Any) -> bool:
    """Whether weights that drafting reads itself are held elsewhere (accelerate's offloading) and loaded by a layer's
    forward only: the drafter's own, and the target's embedding and output head."""
    weights = (input_embedding(target), target.get_output_embeddings().weight, *drafter.parameters())
    return any(weight.is_meta for weight in weights)


def prefill(model: Any, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """The model's outputs over the prompt, as plain generation computes them."""
    return model._prefill(
        input_ids, generation_config, model_kwargs, is_first_iteration=not generation_config.is_assistant
    )


def decoding_forward(model: Any, generation_config: Any, cache: Any) -> Any | None:
    """The compiled forward that transformers would use after the prefill, or `None` where it compiles nothing."""
    if model._valid_auto_compile_criteria({"cache": cache}, generation_config):
        return model.get_compiled_call(generation_config.compile_config)
    return None


def decoding_context(model: Any) -> Any:
    """What transformers puts around forwards after the prefill."""
    return model._optimize_model_for_decode()
