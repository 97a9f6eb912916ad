"""Text from the target at a constant batch: a finished row's place is taken by the next prompt at once.

A batch that shrinks as its rows finish loses most of its speed; one that is refilled does not. The tokens that all
prompts begin with are computed once, and rows run as cheaply as those of a draft (`packing_domino.py`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_domino.drafter.packing_domino import packed_rows

from .objective import Teacher, most_probable
from .slots import ATTENTION, SlotMemory


@dataclass
class Request:
    """A prompt to continue.

    prompt: token ids. temperature: 0 for greedy. key: anything; handed back with the answer.
    """

    prompt: list[int]
    temperature: float = 0.0
    key: Any = None


@dataclass
class Answer:
    """A continuation.

    tokens: ends with an end-of-text token if `finished`. states: the tapped states `[S - 1, M·H]` of prompt and
    answer without the last token, which was never fed (no block's context reaches it), or `None`. teacher: the
    distributions that the answer's tokens were chosen from, at temperature 1, `[n, k]`, or `None`.
    """

    request: Request
    tokens: list[int]
    finished: bool
    states: torch.Tensor | None = None
    teacher: Teacher | None = None


@dataclass
class _Row:
    request: Request
    tokens: list[int] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)
    teacher: list[Teacher] = field(default_factory=list)


class Generator:
    """Continues a stream of prompts.

    Args:
        model: a causal language model with full attention.
        batch_size: sequences decoded together.
        max_new_tokens: the longest answer.
        max_length: the longest prompt and answer together; longer prompts are refused.
        stop_ids: tokens that end an answer; by default the model's end-of-text tokens.
        taps: entries of `hidden_states` to keep, or `None`.
        teacher_top_k: keep that many tokens of each distribution, or `None`.
        seed: of the sampling.
        refill: prefill when at least this many rows are free: several prompts in one forward are cheaper.

    Raises:
        ValueError: the model's layers do not all see the whole context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch_size: int = 64,
        max_new_tokens: int = 256,
        max_length: int = 512,
        stop_ids: Iterable[int] | None = None,
        taps: list[int] | None = None,
        teacher_top_k: int | None = None,
        seed: int = 0,
        refill: int | None = None,
    ):
        text = model.config.get_text_config()
        window = getattr(text, "sliding_window", None)
        default = ["full_attention"] if window is None else ["sliding_attention"]
        kinds = set(getattr(text, "layer_types", None) or default)
        if kinds - {"full_attention", "sliding_attention"} or (
            "sliding_attention" in kinds and window is not None and window < max_length
        ):
            raise ValueError(
                f"Continuous batching needs layers that see the whole context of {max_length} tokens; this model has "
                f"{', '.join(sorted(kinds))} (window {window}). Lower max_length, or generate its text elsewhere and "
                "convert it (scripts/prepare_data.py --responses)."
            )
        self.model = model.eval()
        self.batch_size = batch_size
        self.max_new_tokens = max_new_tokens
        self.max_length = max_length
        eos = model.generation_config.eos_token_id if stop_ids is None else list(stop_ids)
        self.stop_ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self.taps = taps
        self.teacher_top_k = teacher_top_k
        self.refill = refill or max(1, batch_size // 8)
        self._random = torch.Generator(model.device).manual_seed(seed)

    @torch.no_grad()
    def run(
        self,
        requests: Iterable[Request],
        prefix: list[int] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> Iterator[Answer]:
        """Answers, in the order in which they finish.

        Args:
            requests: read a batch ahead. It may run dry and give more later, as answers are taken (further turns).
            prefix: tokens that every prompt begins with; by default found among the first batch of prompts.
            on_step: called after each step with the number of tokens decoded in it.

        Raises:
            ValueError: a prompt is empty, or leaves no room for an answer.
        """
        self._packed = packed_rows(self.model)  # of the weights as they are now
        queue = _Lookahead(iter(requests), self.batch_size)
        shared = _Prefix(self, common_prefix(r.prompt for r in queue.waiting) if prefix is None else prefix)
        attention = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        try:
            yield from self._run(queue, shared, on_step)
        finally:
            self.model.set_attn_implementation(attention)

    def _run(self, queue: "_Lookahead", shared: "_Prefix", on_step: Callable[[int], None] | None) -> Iterator[Answer]:
        memory = SlotMemory(self.batch_size, self.max_length + 1)
        rows: list[_Row | None] = [None] * self.batch_size
        device = self.model.device
        last = torch.zeros(self.batch_size, 1, dtype=torch.long, device=device)
        while True:
            free = [slot for slot, row in enumerate(rows) if row is None]
            if queue and (len(free) >= self.refill or len(free) == self.batch_size):
                started = [queue.pop() for _ in range(min(len(free), len(queue)))]
                slots = free[: len(started)]
                logits, states = self._prefill(memory, slots, started, shared)
                for slot, request, tapped in zip(slots, started, states, strict=True):
                    rows[slot] = _Row(request, states=tapped)
                self._keep_teacher(rows, slots, logits)
                last[slots, 0] = self._choose(logits, [request.temperature for request in started])
                yield from self._collect(rows, slots, last, memory)
                continue
            active = [slot for slot, row in enumerate(rows) if row is not None]
            if not active:
                return
            mask = memory.mask(self.model.dtype, device)
            positions = memory.lengths[:, None].to(device)
            output = self.forward(last, cache=memory, attention_mask=mask, position_ids=positions)
            memory.advance()
            if self.taps:
                last = self._tapped(output.hidden_states)[:, 0]
                for slot in active:
                    rows[slot].states.append(last[slot : slot + 1])
            for slot in set(range(self.batch_size)) - set(active):
                memory.release(slot)
            self._keep_teacher(rows, active, output.logits[active, -1])
            temperatures = [0.0 if row is None else row.request.temperature for row in rows]
            last = self._choose(output.logits[:, -1], temperatures)[:, None]
            if on_step is not None:
                on_step(len(active))
            yield from self._collect(rows, active, last, memory)

    def _prefill(
        self, memory: SlotMemory, slots: list[int], requests: list[Request], shared: "_Prefix"
    ) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
        """Fills slots with prompts. Returns the logits after each `[n, V]`, and their tapped states."""
        for request in requests:
            if not 0 < len(request.prompt) < self.max_length:
                raise ValueError(
                    f"A prompt of {len(request.prompt)} tokens leaves no room for an answer within max_length "
                    f"{self.max_length} (and an empty one cannot be continued)."
                )
        fits = all(shared.starts(request.prompt) for request in requests)
        skip = len(shared.tokens) if fits else 0
        rests = [torch.tensor(request.prompt[skip:]) for request in requests]
        lengths = [len(rest) for rest in rests]
        ids = torch.nn.utils.rnn.pad_sequence(rests, batch_first=True).to(self.model.device)
        cache = shared.cache(len(requests)) if skip else DynamicCache()
        # Padding stands on the right, so causality alone keeps it out of sight.
        output = self.forward(ids, cache=cache)
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        memory.fill(slots, layers, [len(request.prompt) for request in requests])
        states: list[list[torch.Tensor]] = [[] for _ in requests]
        if self.taps:
            tapped: Any = self._tapped(output.hidden_states)
            before = [shared.states[0]] if skip and shared.states is not None else []
            states = [[*before, tapped[i, :n]] for i, n in enumerate(lengths)]
        logits: Any = output.logits
        return logits[range(len(lengths)), [n - 1 for n in lengths]], states

    def forward(self, ids: torch.Tensor, **inputs: Any) -> Any:
        """The model over these rows, with the states that are tapped. It is packed meanwhile only: between answers it
        is its user's."""
        with self._packed:
            return self.model(ids, use_cache=True, output_hidden_states=self.taps or False, **inputs)

    def _tapped(self, hidden_states: Any) -> torch.Tensor:
        return torch.cat([hidden_states[index] for index in self.taps or []], dim=-1).bfloat16().cpu()

    def _keep_teacher(self, rows: list[_Row | None], slots: list[int], logits_nV: torch.Tensor) -> None:
        if self.teacher_top_k is None:
            return
        ids, probs = (part.cpu() for part in most_probable(logits_nV, self.teacher_top_k))
        for i, slot in enumerate(slots):
            row: Any = rows[slot]
            row.teacher.append(Teacher(ids[i : i + 1], probs[i : i + 1]))

    def _choose(self, logits_NV: torch.Tensor, temperatures: list[float]) -> torch.Tensor:
        chosen = logits_NV.argmax(-1)
        sampled = [i for i, temperature in enumerate(temperatures) if temperature > 0]
        if sampled:
            scale = torch.tensor([temperatures[i] for i in sampled], device=logits_NV.device)[:, None]
            probabilities = torch.softmax(logits_NV[sampled].float() / scale, dim=-1)
            chosen[sampled] = torch.multinomial(probabilities, 1, generator=self._random)[:, 0]
        return chosen

    def _collect(
        self, rows: list[_Row | None], slots: list[int], last: torch.Tensor, memory: SlotMemory
    ) -> Iterator[Answer]:
        """Adds the tokens just chosen; gives the answers that they end."""
        for slot, token in zip(slots, last[slots, 0].tolist(), strict=True):
            row = rows[slot]
            row.tokens.append(token)
            finished = token in self.stop_ids
            room = self.max_length - len(row.request.prompt)
            if finished or len(row.tokens) >= min(self.max_new_tokens, room):
                states = torch.cat(row.states) if self.taps else None
                teacher = Teacher(*map(torch.cat, zip(*row.teacher, strict=True))) if row.teacher else None
                rows[slot] = None
                memory.release(slot)
                yield Answer(row.request, row.tokens, finished, states, teacher)


class _Lookahead:
    """A queue that reads its source only as far ahead as one batch."""

    def __init__(self, source: Iterator[Request], depth: int):
        self._source = source
        self._depth = depth
        self.waiting: deque[Request] = deque()
        self._read()

    def _read(self) -> None:
        while len(self.waiting) < self._depth:
            request = next(self._source, None)
            if request is None:
                return
            self.waiting.append(request)

    def pop(self) -> Request:
        request = self.waiting.popleft()
        self._read()
        return request

    def __len__(self) -> int:
        self._read()
        return len(self.waiting)


class _Prefix:
    """The tokens that all prompts begin with, computed once."""

    def __init__(self, generator: Generator, tokens: list[int]):
        self.tokens = tokens
        self.states: torch.Tensor | None = None
        if tokens:
            model = generator.model
            cache = DynamicCache()
            ids = torch.tensor([tokens], device=model.device)
            output = generator.forward(ids, cache=cache)
            self._layers = [(layer.keys, layer.values) for layer in cache.layers]
            if generator.taps:
                self.states = generator._tapped(output.hidden_states)

    def starts(self, prompt: list[int]) -> bool:
        return len(prompt) > len(self.tokens) > 0 and prompt[: len(self.tokens)] == self.tokens

    def cache(self, batch: int) -> DynamicCache:
        """A cache of `batch` sequences that hold the prefix."""
        return DynamicCache([(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1)) for k, v in self._layers])


def common_prefix(prompts: Iterable[list[int]]) -> list[int]:
    """The longest run of tokens that all begin with, one short of the shortest prompt at most."""
    prefix: list[int] | None = None
    for prompt in prompts:
        limit = len(prompt) - 1
        if prefix is None:
            prefix = prompt[:limit]
            continue
        same = 0
        for ours, theirs in zip(prefix, prompt[:limit], strict=False):
            if ours != theirs:
                break
            same += 1
        prefix = prefix[:same]
    return prefix or []
