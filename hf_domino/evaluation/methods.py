"""The methods that a benchmark sets side by side: each is a set of `generate` arguments.

A method is named `plain`, `domino`, ...; with settings of the drafter in brackets, `domino[block_size=8]`; with one of
several drafters after a colon, `domino:final-only`; and two methods joined, `domino+prompt-lookup`, are given to
`generate` together.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from transformers import CompileConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_domino.drafter.modeling_domino import DominoDraftModel

from .native_dflash import NativeDFlashAssistant
from .variants import parse_changes, variant

_NAME = re.compile(r"^(?P<kind>[a-z-]+)(?::(?P<drafter>[^\[\]+:]+))?(?:\[(?P<changes>[^\[\]]*)\])?$")
_LOOKUP_TOKENS = 10  # transformers' documentation suggests this; `prompt-lookup[num_tokens=3]` tries another number


class Unavailable(Exception):
    """A method does not apply here; the message says why, and the record holds it."""


@dataclass
class Contenders:
    """The models a benchmark compares with. drafters: by label; the one labelled "" is the default."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, DominoDraftModel]
    assistant: PreTrainedModel | None = None


@dataclass
class Method:
    """How to call `generate`. drafter: whose `drafting_stats` say what was drafted, if it is one of ours."""

    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: DominoDraftModel | None = None
    use_tree: bool | None = None
    note: str | None = None

    @contextmanager
    def active(self) -> Iterator[dict[str, Any]]:
        """The arguments, with the drafter set as the method wants it meanwhile."""
        if self.drafter is None or self.use_tree is None:
            yield self.arguments
            return
        before, self.drafter.use_tree = self.drafter.use_tree, self.use_tree
        try:
            yield self.arguments
        finally:
            self.drafter.use_tree = before


def _plain(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    return Method()


def _domino(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    return Method({"assistant_model": drafter}, drafter)


def _domino_chain(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    return Method({"assistant_model": drafter}, drafter, use_tree=False)


def _base(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    base = variant(drafter, head_type="none")
    return Method({"assistant_model": base}, base, use_tree=False, note="the same weights, head left out, one chain")


def _base_tree(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    base = variant(drafter, head_type="none")
    return Method({"assistant_model": base}, base, note="the same weights, head left out, as a tree")


def _native_dflash(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    try:
        assistant = NativeDFlashAssistant(variant(drafter, head_type="none"))
    except ValueError as error:
        raise Unavailable(str(error)) from error
    aligned = "; rows moved by one, as it reads them (shift_label)" if drafter.config.row_offset == 0 else ""
    return Method(
        {"assistant_model": assistant, "speculation_type": "dflash"},
        note=f"transformers' DFlash generator over the same backbone{aligned}",
    )


def _prompt_lookup(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    return Method({"prompt_lookup_num_tokens": _LOOKUP_TOKENS})


def _assisted(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    if contenders.assistant is None:
        raise Unavailable("no small assistant model was given")
    return Method({"assistant_model": contenders.assistant})


def compiled_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Arguments of `generate` for a static cache and `torch.compile`, on any device.

    Raises:
        Unavailable: on a CPU without a C++ compiler.
    """
    if model.device.type == "cpu":
        # Otherwise the error comes from deep inside the first call.
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise Unavailable(
                "torch.compile builds its CPU kernels with a C++ compiler and finds none: install g++, or name one in "
                "the environment variable CXX"
            ) from None
    compile_config = CompileConfig()
    compile_config._compile_all_devices = True  # type: ignore[assignment]  # by default transformers compiles on accelerators only
    return {"cache_implementation": "static", "compile_config": compile_config}


def _plain_compiled(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    return Method(compiled_arguments(contenders.model))


def _domino_compiled(contenders: Contenders, drafter: DominoDraftModel | None) -> Method:
    return Method({"assistant_model": drafter} | compiled_arguments(contenders.model), drafter)


KINDS: dict[str, Callable[[Contenders, DominoDraftModel | None], Method]] = {
    "plain": _plain,
    "domino": _domino,
    "domino-chain": _domino_chain,
    "base": _base,
    "base-tree": _base_tree,
    "native-dflash": _native_dflash,
    "prompt-lookup": _prompt_lookup,
    "assisted": _assisted,
    "plain-compiled": _plain_compiled,
    "domino-compiled": _domino_compiled,
}
_NEED_DRAFTER = {"domino", "domino-compiled", "domino-chain", "base", "base-tree", "native-dflash"}


def build_method(name: str, contenders: Contenders) -> Method:
    """The method of this name.

    Raises:
        ValueError: an unknown name, drafter or setting.
        Unavailable: the method does not apply to these models.
    """
    methods = [_build_one(part, contenders) for part in name.split("+")]
    if len(methods) == 1:
        return methods[0]
    arguments: dict[str, Any] = {}
    for method in methods:
        if clash := arguments.keys() & method.arguments.keys():
            raise ValueError(f"{name}: both set {', '.join(sorted(clash))}, so they cannot be combined.")
        arguments |= method.arguments
    ours = next((method for method in methods if method.drafter is not None), Method())
    return Method(arguments, ours.drafter, ours.use_tree, "; ".join(m.note for m in methods if m.note) or None)


def _build_one(name: str, contenders: Contenders) -> Method:
    match = _NAME.match(name)
    if match is None or match["kind"] not in KINDS:
        raise ValueError(f"There is no method {name!r}; there are {', '.join(KINDS)}.")
    drafter = None
    if match["kind"] in _NEED_DRAFTER:
        label = match["drafter"] or ""
        if label not in contenders.drafters:
            known = ", ".join(map(repr, contenders.drafters)) or "none"
            raise ValueError(f"{name}: there is no drafter labelled {label!r} (given: {known}).")
        drafter = contenders.drafters[label]
        if match["changes"]:
            drafter = variant(drafter, **parse_changes(name, match["changes"]))
    elif match["kind"] == "prompt-lookup" and match["changes"] and not match["drafter"]:
        changes = parse_changes(name, match["changes"])
        tokens = changes.pop("num_tokens", None)
        if changes or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"{name}: prompt-lookup takes num_tokens alone, a number of at least 1.")
        return Method({"prompt_lookup_num_tokens": tokens})
    elif match["drafter"] or match["changes"]:
        raise ValueError(f"{name}: {match['kind']} uses no drafter, so it takes none of its settings.")
    return KINDS[match["kind"]](contenders, drafter)
