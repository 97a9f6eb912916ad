"""A cost of drafting that is the same on every machine: operator dispatches and host synchronisations of one round.

On a GPU each dispatch costs its launch whatever it computes, and each synchronisation the whole queue.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.target_domino import Target

from .straightforward import StraightforwardDrafting

# Reads of values by Python. They are caught as calls: on a CPU they reach no operator.
_HOST_READS = {
    "item",
    "tolist",
    "numpy",
    "cpu",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__complex__",
    "__array__",
}
# Operators whose output's shape depends on values, so that the host waits for them.
_WAITING = {
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::equal",
    "aten::repeat_interleave.Tensor",
}
# They only describe memory anew: dispatched, but nothing is launched.
_VIEWS = {
    "aten::view",
    "aten::_unsafe_view",
    "aten::t",
    "aten::transpose.int",
    "aten::slice.Tensor",
    "aten::select.int",
    "aten::expand",
    "aten::unsqueeze",
    "aten::squeeze.dim",
    "aten::split.Tensor",
    "aten::split_with_sizes",
    "aten::permute",
    "aten::alias",
    "aten::detach",
    "aten::unbind.int",
    "aten::chunk",
    "aten::unfold",
    "aten::as_strided",
    "aten::squeeze",
    "aten::squeeze.dims",
}


@dataclass
class RoundCost:
    """Of one draft round. dispatches: operators reached, views included. launches: without views.
    synchronisations: times the host waits for values. operators: how often each."""

    dispatches: int
    launches: int
    synchronisations: int
    operators: dict[str, int] = field(default_factory=dict)


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.counts[name] += 1
        self.waits += name in _WAITING or _indexes_by_truth(name, args)
        return func(*args, **(kwargs or {}))


class _HostReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        # A tensor taken apart by Python's own loop or `in` is read too, but these end in the calls above.
        self.count += name in _HOST_READS and bool(args) and isinstance(args[0], torch.Tensor)
        return func(*args, **(kwargs or {}))


def _indexes_by_truth(name: str, args: tuple[Any, ...]) -> bool:
    if name not in ("aten::index.Tensor", "aten::index_put", "aten::index_put_"):
        return False
    return any(index is not None and index.dtype == torch.bool for index in args[1])


def count_dispatches(action: Callable[[], Any]) -> RoundCost:
    """Runs something and counts."""
    operators, reads = _Operators(), _HostReads()
    with torch.no_grad(), reads, operators:
        action()
    counts = operators.counts
    return RoundCost(
        dispatches=counts.total(),
        launches=sum(count for name, count in counts.items() if name not in _VIEWS),
        synchronisations=reads.count + operators.waits,
        operators=dict(counts.most_common()),
    )


def prepared_round(model: PreTrainedModel, drafter: DominoDraftModel, width: int = 1) -> Callable[[], Any]:
    """A round of the drafter's own, some rounds into a text, ready to be run (again): new context, block, chain or
    tree, tokens to the host.

    Args:
        width: paths kept per level; 1 for the chain.
    """
    session = DraftingSession(drafter, Target(model, drafter.config))
    anchor = torch.zeros(1, dtype=torch.long, device=model.device)

    def one_round(tapped: torch.Tensor) -> Any:
        session.observe(tapped, [tapped.shape[1]])
        return session.propose(anchor, drafter.config.max_drafts, width).to_host()

    return _some_rounds_in(drafter, one_round)


def count_round(model: PreTrainedModel, drafter: DominoDraftModel, width: int = 1) -> RoundCost:
    """The cost of one round of the drafter's own (see `prepared_round`)."""
    return count_dispatches(prepared_round(model, drafter, width))


def count_straightforward_round(model: PreTrainedModel, drafter: DominoDraftModel) -> RoundCost | None:
    """The cost of one round of the straightforward loop; `None` for heads that it is not written for."""
    if drafter.config.head_type != "gru":
        return None
    drafting = StraightforwardDrafting(drafter, Target(model, drafter.config))
    anchor = torch.zeros(1, dtype=torch.long, device=model.device)
    depth = drafter.config.max_drafts
    return count_dispatches(_some_rounds_in(drafter, lambda tapped: drafting.round(tapped, anchor, depth)))


def _some_rounds_in(drafter: DominoDraftModel, one_round: Callable[[torch.Tensor], Any]) -> Callable[[], Any]:
    """A later round: after a prompt's states and two rounds of a few accepted tokens, as most rounds are."""
    like = drafter.fc.weight
    generator = torch.Generator().manual_seed(0)

    def states(positions: int) -> torch.Tensor:
        return torch.randn(1, positions, drafter.fc.in_features, generator=generator).to(like)

    with torch.no_grad():
        for positions in (32, 3, 3):
            one_round(states(positions))
    new = states(3)

    def run() -> Any:
        with torch.no_grad():
            return one_round(new)

    return run
