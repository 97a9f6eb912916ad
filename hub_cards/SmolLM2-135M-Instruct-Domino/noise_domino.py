"""The random numbers of plain sampling, step by step, for sequences that are at different steps."""

import torch


class SamplingNoise:
    """`torch.multinomial(probabilities, 1)` takes the argmax of probabilities over exponential noise of their shape.

    Drawing that noise ourselves, in plain generation's order and shape, gives plain generation's tokens: each step's
    noise is drawn once for the whole batch and kept while a sequence still has to pass that step.

    Args:
        batch_size: B of the call.
    """

    def __init__(self, batch_size: int):
        self._batch_size = batch_size
        self._drawn: list[torch.Tensor | None] = []

    def choose(self, probabilities_V: torch.Tensor, row: int, step: int) -> int:
        """The token that plain sampling would draw for this sequence (its row in the whole batch) at this step.

        Raises:
            RuntimeError: as plain sampling does, where the probabilities hold nan.
        """
        while len(self._drawn) <= step:
            noise = probabilities_V.new_empty(self._batch_size, probabilities_V.shape[0])
            self._drawn.append(noise.exponential_(1))
        noise_of_step = self._drawn[step]
        assert noise_of_step is not None, "a sequence never returns to a step that all have passed"
        token = int((probabilities_V / noise_of_step[row]).argmax())
        if probabilities_V[token].isnan():  # argmax stops at these
            raise RuntimeError(
                "The probabilities of the next token hold nan, so none can be drawn: the processors may have excluded "
                "every token, or the target's logits have overflowed."
            )
        return token

    def forget(self, before_step: int) -> None:
        """Frees the noise of steps that every sequence has passed."""
        for step in range(min(before_step, len(self._drawn)) - 1, -1, -1):
            if self._drawn[step] is None:
                break
            self._drawn[step] = None
