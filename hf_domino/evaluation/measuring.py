"""One timed `generate` call: how long, how many tokens, what was drafted and accepted, where the time went."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, set_seed

from .methods import Method


@dataclass
class Measurement:
    """One call over B sequences.

    tokens: new token ids of each sequence, its EOS included. seconds: of the whole call, prefill included.
    drafted, accepted: draft tokens verified, and of these the ones that became text, one entry for each sequence and
    round (a round is a target forward after the prefill); empty where nothing drafts.
    draft_seconds, verify_seconds: parts of `seconds`; `None` where the method has no such parts.
    """

    tokens: list[list[int]]
    seconds: float
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_seconds: float | None = None
    verify_seconds: float | None = None


def measure(
    model: PreTrainedModel, method: Method, prompts_ids: list[list[int]], seed: int = 0, **generation: Any
) -> Measurement:
    """Runs a method once.

    Args:
        prompts_ids: of each sequence; shorter ones are padded on the left.
        seed: set before the call, so that methods that draw from the target alone draw the same.
        generation: arguments of `generate` that all methods share.
    """
    inputs = _batch(model, prompts_ids)
    watched = _Watched()
    set_seed(seed)
    if method.drafter is not None:
        method.drafter.drafting_stats = None
    with method.active() as arguments, watched.watching(model, enabled=method.drafter is None):
        _synchronize(model.device)
        started = time.perf_counter()
        output = model.generate(**inputs, **(generation | arguments))
        _synchronize(model.device)
        seconds = time.perf_counter() - started
    new = output[:, inputs["input_ids"].shape[1] :].tolist()
    measurement = Measurement([_until_eos(row, _eos_ids(model)) for row in new], seconds)
    stats = method.drafter.drafting_stats if method.drafter is not None else watched
    if stats is not None and (stats.draft_seconds or stats.accepted):
        measurement.drafted, measurement.accepted = list(stats.drafted), list(stats.accepted)
        measurement.draft_seconds, measurement.verify_seconds = stats.draft_seconds, stats.verify_seconds
    return measurement


class _Watched:
    """Counts and times the rounds of transformers' own candidate generators, from outside."""

    def __init__(self) -> None:
        self.drafted: list[int] = []
        self.accepted: list[int] = []
        self.draft_seconds = self.verify_seconds = 0.0

    @contextmanager
    def watching(self, model: PreTrainedModel, enabled: bool) -> Iterator[None]:
        if not enabled:
            yield
            return
        create = model._get_candidate_generator

        def create_watched(*args, **kwargs):
            return self._watch(create(*args, **kwargs))

        model._get_candidate_generator = create_watched  # type: ignore[assignment]  # looked up on the instance, so only this model is watched
        try:
            yield
        finally:
            del model._get_candidate_generator

    def _watch(self, generator: Any) -> Any:
        propose, update = generator.get_candidates, generator.update_candidate_strategy
        calls = 0
        drafted, verifying_since = 0, 0.0

        def get_candidates(input_ids, *args, **kwargs):
            nonlocal calls, drafted, verifying_since
            calls += 1
            started = time.perf_counter()
            candidates, logits = propose(input_ids, *args, **kwargs)
            verifying_since = time.perf_counter()
            drafted = candidates.shape[1] - input_ids.shape[1]
            self.draft_seconds += verifying_since - started
            return candidates, logits

        def update_candidate_strategy(input_ids, scores, num_matches):
            if calls > 1:  # the first is the prefill, for which some generators draft already
                self.verify_seconds += time.perf_counter() - verifying_since
                self.drafted.append(drafted)
                self.accepted.append(int(num_matches))
            return update(input_ids, scores, num_matches)

        generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy
        return generator


def _batch(model: PreTrainedModel, prompts_ids: list[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts_ids))
    pad = model.generation_config.pad_token_id
    if pad is None:
        pad = min(_eos_ids(model), default=0)
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompts_ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts_ids])
    return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}


def _eos_ids(model: PreTrainedModel) -> set[int]:
    eos = model.generation_config.eos_token_id
    return set() if eos is None else {eos} if isinstance(eos, int) else set(eos)


def _until_eos(tokens: list[int], eos: set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
