"""`DominoCandidateGenerator`: a drafter in transformers' own assisted decoding loop (one chain, one sequence)."""

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig
from transformers.generation.candidate_generator import CandidateGenerator

from .cost_domino import round_costs
from .drafting_domino import DraftingSession
from .target_domino import Target

if TYPE_CHECKING:
    from transformers import LogitsProcessorList, PreTrainedModel

    from .modeling_domino import DominoDraftModel


@dataclass
class DraftingStats:
    """What was drafted in the last `generate` call, one entry per target forward after the prefill.

    In a batch, one entry per sequence that was still growing; `rows` says which.

    drafted: draft tokens (tree nodes) verified. accepted: of these, the ones that became text. depths: of the tree.
    draft_seconds / verify_seconds: wall time of drafting, and of the target's forwards with what follows from them.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def record(self, row: int, drafted: int, depth: int, accepted: int) -> None:
        """Counts one sequence's round."""
        self.rows.append(row)
        self.drafted.append(drafted)
        self.depths.append(depth)
        self.accepted.append(accepted)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per target forward, the target's own bonus token included (the prefill is not counted)."""
        if not self.accepted:
            return 1.0
        return 1.0 + sum(self.accepted) / len(self.accepted)


class DominoCandidateGenerator(CandidateGenerator):
    """Drafts one greedy chain per round from the target's tapped states.

    Drafts are returned without logits: transformers then takes the target's own choice (its argmax, or its draw from
    the processed distribution) at each position and keeps the drafts that equal it, so processors, temperature and
    seeds act on the target alone.

    Args:
        drafter: the drafter.
        target: the model whose `generate` was called.
        generation_config: of the call.

    Raises:
        ValueError: the pair does not fit, or an option asks for what a drafter without a distribution of its own
            cannot give.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: "DominoDraftModel",
        target: "PreTrainedModel",
        generation_config: GenerationConfig,
        logits_processor: "LogitsProcessorList | None" = None,
        input_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ):
        if generation_config.assistant_ensemble_weight is not None:
            raise ValueError(
                "`assistant_ensemble_weight` mixes the drafter's distribution into the output, which a Domino drafter "
                "never does: its output is the target's. Leave it unset."
            )
        self.drafter = drafter
        self.target = Target(target, drafter.config)
        self.limits = DraftLimits.of_call(drafter, generation_config)
        self.session = DraftingSession(drafter, self.target, self.limits.temperature)
        self.stats = DraftingStats()
        drafter.drafting_stats = self.stats
        self.costs = round_costs(target, drafter, context=0 if input_ids is None else input_ids.shape[1])
        wanted = generation_config.return_dict_in_generate and generation_config.output_hidden_states
        self.model_kwargs_overrides = {"output_hidden_states": True if wanted else self.target.hidden_states_indices}

    def get_candidates(
        self,
        input_ids: torch.LongTensor,
        model_kwargs: dict[str, Any] | None = None,
        model_outputs: Any = None,
        is_first_iteration: bool = False,
        n_last_matches: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The text and a draft after it, `[1, S + drafts]`. The first call comes before the prefill: no draft."""
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        started = time.perf_counter()
        tapped = self.target.tapped_states(model_outputs.hidden_states)
        if not self.stats.drafted and not self.session.memory.lengths:
            tapped = _without_padding(tapped, (model_kwargs or {}).get("attention_mask"))
            count = tapped.shape[1]
        else:
            count = int(n_last_matches) + 1
        self.session.observe(tapped[:, :count], [count])
        depth = self.limits.depth(input_ids.shape[1])
        if depth <= 0:
            return self._drafted_text(input_ids, input_ids[:, :0], started)
        levels = self.session.propose(input_ids[:, -1], depth, width=1)
        tokens, logprobs = levels.tokens_BDW[..., 0], levels.logprobs_BDW[0, :, 0]
        if not self.limits.constant:
            tokens = tokens[:, : self.limits.confident(logprobs.tolist(), self.costs)]
        return self._drafted_text(input_ids, tokens, started)

    def _drafted_text(self, input_ids: torch.Tensor, tokens: torch.Tensor, started: float) -> tuple[torch.Tensor, None]:
        self._drafted = tokens.shape[1]
        text = torch.cat([input_ids, tokens.to(input_ids.device)], dim=-1)
        self._verifying_since = time.perf_counter()
        seconds = self._verifying_since - started
        self.stats.draft_seconds += seconds
        self.costs.record_draft(seconds)
        return text, None

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Counts the round."""
        if not self.session.memory.lengths:  # the prefill
            return
        seconds = time.perf_counter() - self._verifying_since
        self.stats.verify_seconds += seconds
        self.costs.record_verify(self._drafted + 1, seconds)
        self.stats.record(0, self._drafted, self._drafted, int(num_matches))


@dataclass
class DraftLimits:
    """How far a draft may go, from the options of the call and of the drafter.

    max_length: of the whole text. tokens: the most draft tokens in a row. constant: always that many.
    confidence: stop where a token's probability falls below it, or `None`.
    """

    max_length: int
    tokens: int
    constant: bool
    confidence: float | None
    temperature: float

    @classmethod
    def of_call(cls, drafter: "DominoDraftModel", generation_config: GenerationConfig) -> "DraftLimits":
        own = drafter.generation_config
        tokens = own.num_assistant_tokens
        if tokens is not None and tokens < 1:
            raise ValueError(f"num_assistant_tokens must be at least 1, got {tokens}.")
        drafts = drafter.config.max_drafts
        sampled = generation_config.do_sample and generation_config.temperature
        return cls(
            max_length=generation_config.max_length,
            tokens=min(tokens or drafts, drafts),
            constant=own.num_assistant_tokens_schedule == "constant",
            confidence=own.assistant_confidence_threshold,
            temperature=float(sampled or 1.0),
        )

    def depth(self, length: int) -> int:
        """Draft tokens that still fit: the target adds one of its own."""
        return min(self.tokens, self.max_length - length - 1)

    def confident(self, path_logprobs: list[float], costs) -> int:
        """Draft tokens of a chain that are worth verifying."""
        count = costs.worthwhile([math.exp(p) for p in path_logprobs])
        if self.confidence is not None:
            previous = 0.0
            for i, path in enumerate(path_logprobs[:count]):
                if math.exp(path - previous) < self.confidence:
                    return i
                previous = path
        return count


def _without_padding(tapped_BST: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
    """The states of a single prompt's real tokens: padding is no context."""
    if attention_mask is None or attention_mask.ndim != 2:
        return tapped_BST
    states = tapped_BST.shape[1]
    # The mask covers what was generated since and, with a continued cache, what came before these states.
    mask = attention_mask[0, : attention_mask.shape[1] - 1][-states:].bool()
    # A mask without any real token: plain generation goes on from all of them, so they are the context.
    return tapped_BST if bool(mask.all() | ~mask.any()) else tapped_BST[:, mask.to(tapped_BST.device)]
