"""The random numbers of plain sampling, step by step, for sequences that are at different steps."""

import torch


class SamplingNoise:
    """`torch.multinomial(probabilities, 1)` takes the argmax of probabilities over exponential noise of their shape.

    Drawing that noise ourselves, in plain generation's order and shape, gives plain generation's tokens: each step's
    noise is drawn once for the whole batch and kept while a sequence still has to pass that step.

    Args:
        shape: of the probabilities of one step, `[B, V]`.
    """

    def __init__(self, shape: tuple[int, int], device: torch.device):
        self._shape = shape
        self._device = device
        self._drawn: list[torch.Tensor | None] = []

    def choose(self, probabilities_V: torch.Tensor, row: int, step: int) -> int:
        """The token that plain sampling would draw for this sequence (its row in the whole batch) at this step."""
        while len(self._drawn) <= step:
            self._drawn.append(torch.empty(self._shape, device=self._device).exponential_(1))
        noise = self._drawn[step]
        return int(torch.argmax(probabilities_V / noise[row]))

    def forget(self, before_step: int) -> None:
        """Frees the noise of steps that every sequence has passed."""
        for step in range(min(before_step, len(self._drawn)) - 1, -1, -1):
            if self._drawn[step] is None:
                break
            self._drawn[step] = None
