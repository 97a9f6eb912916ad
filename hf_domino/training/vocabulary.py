"""The target's output head in training: over all of V, or over a sample of it."""

import torch
import torch.nn.functional as F
from torch import nn

from hf_domino.drafter.head_domino import effective_weight


class OutputVocabulary:
    """The target's frozen output head over all of V, or over a sample of it with the sampling corrected for.

    A sampled softmax (frequent tokens always, the batch's labels always, others drawn with known probability) costs a
    fraction of the whole one; its logits are shifted by -log(probability of being drawn), which makes the sum over
    the sample an unbiased estimate of the sum over V. Argmax, and so the accepted lengths counted in training, is
    then over the sample too: a little too high.

    Args:
        weight_VH: the output head's matrix. bias_V: its bias, if it has one.
        token_ids: the sample, or `None` for all of V.
        log_correction: what is added to the sample's logits.
        dtype: of the matrix product; by default the matrix's own.
    """

    def __init__(
        self,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        log_correction: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
    ):
        self.token_ids = token_ids
        self.log_correction = log_correction
        if token_ids is not None:
            weight_VH = weight_VH[token_ids]
            bias_V = None if bias_V is None else bias_V[token_ids]
        self.weight = weight_VH.to(dtype or weight_VH.dtype)
        self.bias = bias_V

    @classmethod
    def sampled(
        cls,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels: torch.Tensor,
        frequent: torch.Tensor,
        num_random: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> "tuple[OutputVocabulary, torch.Tensor]":
        """Frequent tokens and labels for certain; `num_random` of the rest, uniformly.

        Returns:
            The vocabulary, and the labels as indices into it.
        """
        size, device = weight_VH.shape[0], weight_VH.device
        certain = torch.cat([frequent.to(device), labels.flatten()]).unique()
        rest = torch.ones(size, dtype=torch.bool, device=device)
        rest[certain] = False
        rest = rest.nonzero()[:, 0]
        order = torch.randperm(rest.numel(), generator=generator).to(device)
        drawn = rest[order[:num_random]]
        token_ids = torch.cat([certain, drawn])
        correction = torch.zeros(token_ids.numel(), device=device)
        if drawn.numel():
            correction[certain.numel() :] = torch.log(torch.tensor(rest.numel() / drawn.numel()))
        index = torch.full((size,), -1, device=device)
        index[token_ids] = torch.arange(token_ids.numel(), device=device)
        return cls(weight_VH, bias_V, token_ids, correction, dtype), index[labels]

    def base_logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of block states `[..., H]` at the vocabulary's tokens, in float32."""
        logits = F.linear(states.to(self.weight.dtype), self.weight).float()
        if self.bias is not None:
            logits = logits + self.bias.float()
        return logits if self.log_correction is None else logits + self.log_correction

    def correction(self, features: torch.Tensor, last: nn.Module) -> torch.Tensor:
        """The head's correction `W2 · features` at the vocabulary's tokens, in float32.

        Args:
            last: the layer of W2. Where adapters wrap it, it is applied whole: its `weight` lacks their part.
        """
        if self.token_ids is None:
            return last(features).float()
        if type(last) is not nn.Linear:
            return last(features)[..., self.token_ids].float()
        return F.linear(features, last.weight[self.token_ids]).float()


def head_matrix(output_head: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Matrix `[V, H]` and bias of a target's output head, adapters included."""
    bias = getattr(output_head, "bias", None)
    if type(output_head) is nn.Linear:
        return output_head.weight.detach(), None if bias is None else bias.detach()
    with torch.no_grad():
        weight = effective_weight(output_head)
        if bias is None:
            return weight, None
        zeros = torch.zeros(1, weight.shape[1], dtype=weight.dtype, device=weight.device)
        bias = output_head(zeros)[0]
        return weight - bias[:, None], bias
