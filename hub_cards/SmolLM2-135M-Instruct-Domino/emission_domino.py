"""What becomes text: the target's own choice at each position, in plain generation's order, and where the text ends."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .noise_domino import SamplingNoise

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

# Processors and criteria that judge each sequence by its own text alone and keep nothing between calls: in a batch
# whose sequences are at different steps they can be asked one sequence at a time.
_ROWWISE = {
    "EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor", "EosTokenCriteria",
    "EpsilonLogitsWarper", "EtaLogitsWarper", "ExponentialDecayLengthPenalty", "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor", "InfNanRemoveLogitsProcessor", "LogitNormalization", "MaxLengthCriteria",
    "MaxTimeCriteria", "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "MinPLogitsWarper",
    "NoBadWordsLogitsProcessor", "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "SequenceBiasLogitsProcessor", "StopStringCriteria", "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor", "TemperatureLogitsWarper", "TopHLogitsWarper", "TopKLogitsWarper",
    "TopPLogitsWarper", "TypicalLogitsWarper", "WatermarkLogitsProcessor",
}  # fmt: skip
# Criteria that transformers' assisted loop applies token by token; it asks all others after a whole block only.
_WITHIN_BLOCKS = {"EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria"}


def judges_rows_apart(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether a batch may be served with its sequences at different steps."""
    return all(type(part).__name__ in _ROWWISE for part in (*logits_processor, *stopping_criteria))


def judges_blocks(logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether transformers' assisted loop, which also asks processors about drafts it then drops, changes nothing."""
    return judges_rows_apart(logits_processor, stopping_criteria) and all(
        type(criterion).__name__ in _WITHIN_BLOCKS for criterion in stopping_criteria
    )


def ends_as_padded(stopping_criteria: StoppingCriteriaList) -> bool:
    """Whether plain generation pads a batch's sequences that have ended before others, or none can.

    Without ids of an end it lets them grow on, whatever the criteria say.
    """
    return any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria) or all(
        type(criterion).__name__ == "MaxLengthCriteria" for criterion in stopping_criteria
    )


class Text:
    """The token ids of one sequence, prompt included, in a buffer that grows geometrically."""

    def __init__(self, prompt_L: torch.Tensor):
        self.length = prompt_L.shape[0]
        self._buffer = prompt_L.new_zeros(max(64, 2 * self.length))
        self._buffer[: self.length] = prompt_L

    @property
    def ids(self) -> torch.Tensor:
        """`[1, L]`, a view."""
        return self._buffer[None, : self.length]

    def append(self, token: int) -> None:
        if self.length == self._buffer.shape[0]:
            self._buffer = torch.cat([self._buffer, torch.zeros_like(self._buffer)])
        self._buffer[self.length] = token
        self.length += 1


class Emission:
    """Chooses tokens and ends sequences as plain `generate` does, one token at a time.

    Args:
        input_ids: the prompts `[B, L]`.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        streamer: "BaseStreamer | None" = None,
    ):
        self.texts = [Text(prompt) for prompt in input_ids]
        self.prompt_length = input_ids.shape[1]
        self.processor = logits_processor
        self.criteria = stopping_criteria
        self.streamer = streamer
        self.noise = SamplingNoise(input_ids.shape[0]) if generation_config.do_sample else None
        recorded = generation_config.return_dict_in_generate
        self.scores: tuple | None = () if recorded and generation_config.output_scores else None
        self.logits: tuple | None = () if recorded and generation_config.output_logits else None

    @property
    def plain_greedy(self) -> bool:
        """Whether a token is just the argmax of the target's logits, so that many can be chosen at once."""
        return not len(self.processor) and self.noise is None and self.scores is None and self.logits is None

    def emit(self, row: int, logits_V: torch.Tensor, greedy_choice: int | None = None) -> tuple[int, bool]:
        """Emits one token of a sequence.

        Args:
            row: the sequence, by its place in the whole batch.
            logits_V: the target's logits after its text so far.
            greedy_choice: their argmax, where it is known and is the choice.

        Returns:
            The token, and whether the sequence ends with it.
        """
        text = self.texts[row]
        token = self._choose(row, logits_V) if greedy_choice is None else greedy_choice
        text.append(token)
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        return token, bool(self.criteria(text.ids, self.scores)[0])

    def _choose(self, row: int, logits_V: torch.Tensor) -> int:
        text = self.texts[row]
        raw = logits_V[None].to(copy=True, dtype=torch.float32, device=text.ids.device)
        scores = self._processed(row, raw)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (raw,)
        if self.noise is None:
            return int(scores.argmax(-1))
        return self.noise.choose(scores.softmax(-1)[0], row, text.length - self.prompt_length)

    def _processed(self, row: int, raw: torch.Tensor) -> torch.Tensor:
        ids = self.texts[row].ids
        batch = len(self.texts)
        if batch == 1 or not len(self.processor):
            return self.processor(ids, raw)
        # A full batch of this one text: processors that hold something per sequence find theirs at its own place.
        return self.processor(ids.expand(batch, -1), raw.repeat(batch, 1))[row : row + 1]

    def sequences(self, pad_token_id: Any) -> torch.Tensor:
        """All texts `[B, longest]`, padded on the right."""
        longest = max(text.length for text in self.texts)
        padding = 0 if pad_token_id is None else int(pad_token_id)
        rows = [torch.nn.functional.pad(t.ids[0], (0, longest - t.length), value=padding) for t in self.texts]
        return torch.stack(rows)
