"""The target's output head in training: over all of V, over the drafter's own vocabulary, or over a sample."""

import torch
import torch.nn.functional as F
from torch import nn

from hf_domino.drafter.head_domino import effective_weight
from hf_domino.drafter.modeling_domino import DominoDraftModel

from .data import ShardDataset


class OutputVocabulary:
    """The target's frozen output head over all of V, over a draft vocabulary, or over a sample of V with the sampling
    corrected for.

    A sampled softmax (frequent tokens always, the batch's labels always, others drawn with known probability) costs a
    fraction of the whole one; its logits are shifted by -log(probability of being drawn), which makes the sum over
    the sample an unbiased estimate of the sum over V. Argmax, and so the accepted lengths counted in training, is
    then over the sample too: a little too high.

    Args:
        weight_VH: the output head's matrix. bias_V: its bias, if it has one.
        token_ids: the tokens it is over, or `None` for all of V.
        log_correction: what is added to a sample's logits.
        dtype: of the matrix product; by default the matrix's own.
        head_is_restricted: the drafter's head has rows for these tokens only, in this order.
    """

    def __init__(
        self,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        log_correction: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        head_is_restricted: bool = False,
    ):
        self.token_ids = token_ids
        self._head_rows = None if head_is_restricted else token_ids
        self.log_correction = log_correction
        everything = torch.arange(weight_VH.shape[0], device=weight_VH.device)
        self._index = everything
        if token_ids is not None:
            self._index = torch.full_like(everything, -1)
            self._index[token_ids] = everything[: token_ids.numel()]
            weight_VH = weight_VH[token_ids]
            bias_V = None if bias_V is None else bias_V[token_ids]
        self.weight = weight_VH.to(dtype or weight_VH.dtype)
        self.bias = bias_V

    @classmethod
    def restricted(
        cls,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        token_ids: torch.Tensor,
        dtype: torch.dtype | None = None,
    ) -> "OutputVocabulary":
        """A restricted drafter's own vocabulary: the softmax over it is exact."""
        return cls(weight_VH, bias_V, token_ids, None, dtype, head_is_restricted=True)

    @classmethod
    def sampled(
        cls,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        certain: torch.Tensor,
        num_random: int,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> "OutputVocabulary":
        """Tokens that are in it for certain (the labels, frequent ones), and `num_random` of the rest, uniformly."""
        size, device = weight_VH.shape[0], weight_VH.device
        certain = certain.to(device).unique()
        rest = torch.ones(size, dtype=torch.bool, device=device)
        rest[certain] = False
        rest = rest.nonzero()[:, 0]
        order = torch.randperm(rest.numel(), generator=generator).to(device)
        drawn = rest[order[:num_random]]
        token_ids = torch.cat([certain, drawn])
        correction = torch.zeros(token_ids.numel(), device=device)
        if drawn.numel():
            correction[certain.numel() :] = torch.log(torch.tensor(rest.numel() / drawn.numel()))
        return cls(weight_VH, bias_V, token_ids, correction, dtype)

    def index(self, tokens: torch.Tensor) -> torch.Tensor:
        """Indices of tokens in this vocabulary; -1 for those outside."""
        size = self._index.numel()
        return self._index[tokens.clamp_max(size - 1)].masked_fill(tokens >= size, -1)

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
        if self._head_rows is None:
            return last(features).float()
        if type(last) is not nn.Linear:
            return last(features)[..., self._head_rows].float()
        return F.linear(features, last.weight[self._head_rows]).float()


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


def restrict_to_frequent(drafter: DominoDraftModel, dataset: ShardDataset, size: int) -> None:
    """Gives a drafter a draft vocabulary: the `size` most frequent tokens of the training text's answers.

    Raises:
        ValueError: `size` does not lie between 1 and the size of the whole vocabulary.
    """
    whole = drafter.config.vocab_size
    if not isinstance(size, int) or not 1 <= size <= whole:
        raise ValueError(f"draft_vocab_size must lie between 1 and {whole}, the whole vocabulary, got {size}.")
    drafter.restrict_vocabulary(dataset.token_counts(whole).topk(size).indices)
