"""The draft vocabulary: the few thousand tokens that a drafter proposes, where V is large against H.

On disk it is EAGLE-3's pair of tensors, as serving engines read it: `d2t [Vd]`, the offset from a draft index to its
token id (`token = index + d2t[index]`), and `t2d [V]`, true at the tokens that can be drafted. The head's last matrix
has Vd rows. Any other token is still generated, by the target itself; it is only never drafted.
"""

import torch


def buffers_from_tokens(token_ids: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`d2t` and `t2d` of a list of token ids.

    Raises:
        ValueError: ids are repeated or outside the vocabulary.
    """
    token_ids = token_ids.sort().values
    if token_ids.unique().numel() != token_ids.numel() or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        raise ValueError(f"A draft vocabulary lists distinct token ids between 0 and {vocab_size - 1}.")
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[token_ids] = True
    return token_ids - torch.arange(token_ids.numel()), t2d


def token_ids(d2t: torch.Tensor) -> torch.Tensor:
    """The token id of each draft index, `[Vd]`."""
    return d2t + torch.arange(d2t.numel(), device=d2t.device)


def check_buffers(d2t: torch.Tensor, t2d: torch.Tensor) -> None:
    """Refuses a pair that does not describe one list of tokens.

    Raises:
        ValueError: the two tensors disagree.
    """
    ids = token_ids(d2t)
    inside = ids.numel() > 0 and int(ids.min()) >= 0 and int(ids.max()) < t2d.numel()
    if not inside or int(t2d.sum()) != ids.numel() or not bool(t2d[ids].all()):
        raise ValueError(
            f"The checkpoint's d2t ({d2t.numel()} draft tokens) and t2d ({int(t2d.sum())} of {t2d.numel()} tokens) "
            "describe different draft vocabularies; one of them is damaged."
        )
