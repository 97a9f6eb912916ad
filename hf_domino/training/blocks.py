"""Training blocks: anchors drawn in a sequence, and the packed forward of all their blocks in one go.

Source: arXiv:2605.29707, section 3.4. A block sees context strictly before its own anchor, and itself, and no other
block (a test compares this with blocks run one at a time).
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hf_domino.drafter.modeling_domino import DominoDraftModel


@dataclass
class Blocks:
    """A anchors per sequence, and the true tokens of the J drafts after each. Positions are 0-based in the sequence.

    anchors_BA: position of each block's anchor.
    tokens_BAJ: token ids `[B, A, 1 + J]`: the anchor's, then the true drafts'.
    supervised_BAJ: true where a draft counts: up to the first token that is not the answer's, except at tokens that the
        drafter cannot propose.
    real_BA: false for a filler, which stands where a sequence has fewer anchors than A.
    """

    anchors_BA: torch.Tensor
    tokens_BAJ: torch.Tensor
    supervised_BAJ: torch.Tensor
    real_BA: torch.Tensor


def sequence_generators(seed: int, step: int, indices: Iterable[int]) -> list[torch.Generator]:
    """One random generator per sequence, given by (seed, step, index of the sequence) alone.

    So a resumed run, and a run on several processes, draws the anchors that an unbroken run on one process draws.
    """
    return [torch.Generator().manual_seed(random.Random(f"{seed} {step} {index}").getrandbits(63)) for index in indices]


def sample_anchors(
    loss_mask_BS: torch.Tensor, num_anchors: int, generators: list[torch.Generator] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws up to `num_anchors` anchors per sequence, without repeats.

    A position can be an anchor if the token after it is supervised and there is context before it.

    Args:
        loss_mask_BS: true at the tokens that are to be predicted (the answers').
        generators: one per sequence; by default torch's global one.

    Returns:
        Positions `[B, A]` with A at least 1, and which of them are real (`[B, A]`): the others are fillers.
    """
    mask = loss_mask_BS.bool().cpu()
    usable = torch.zeros_like(mask)
    usable[:, 1:-1] = mask[:, 2:]
    if generators is None:
        noise = torch.rand(usable.shape)
    else:
        noise = torch.stack([torch.rand(usable.shape[1], generator=generator) for generator in generators])
    most = max(1, min(num_anchors, int(usable.sum(-1).max())))
    keys, anchors = noise.masked_fill(~usable, -1.0).topk(most, dim=-1)
    device = loss_mask_BS.device
    return anchors.clamp_min(1).to(device), (keys >= 0).to(device)


def make_blocks(
    input_ids_BS: torch.Tensor,
    loss_mask_BS: torch.Tensor,
    lengths_B: torch.Tensor,
    num_drafts: int,
    anchors_BA: torch.Tensor,
    real_BA: torch.Tensor,
    draftable_V: torch.Tensor | None = None,
) -> Blocks:
    """Blocks at these anchors: draft j (0-based) is the token at anchor + 1 + j, whatever row it is read from.

    Args:
        draftable_V: true at the tokens of a draft vocabulary; a draft of any other token is not supervised, and those
            after it still are, teacher-forced. `None`: all.
    """
    steps = torch.arange(num_drafts + 1, device=input_ids_BS.device)
    positions = anchors_BA[..., None] + steps
    inside = positions < lengths_B[:, None, None]
    positions = positions.clamp_max(input_ids_BS.shape[1] - 1)
    rows = torch.arange(input_ids_BS.shape[0], device=input_ids_BS.device)[:, None, None]
    supervised = (loss_mask_BS.bool()[rows, positions] & inside & real_BA[..., None])[..., 1:].long().cumprod(-1).bool()
    tokens = input_ids_BS[rows, positions]
    real = supervised[..., 0]
    if draftable_V is not None:
        supervised = supervised & draftable_V.to(tokens.device)[tokens[..., 1:]]
    return Blocks(anchors_BA, tokens, supervised, real)


class PackedContext:
    """Stands in for the context memory in a packed training forward: context first, then all blocks' rows.

    It is only ever read, so layers under activation checkpointing may replay it.
    """

    def __init__(self, keys_values: list[tuple[torch.Tensor, torch.Tensor]]):
        self._keys_values = keys_values

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args, **kwargs):
        context_keys, context_values = self._keys_values[layer_idx]
        return torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)


def packed_mask(
    anchors_BA: torch.Tensor, sequence_length: int, block_size: int, sliding_window: int | None = None
) -> torch.Tensor:
    """What each block row may attend to: `[B, 1, A·K, S + A·K]`, true where visible."""
    batch, num_anchors = anchors_BA.shape
    device = anchors_BA.device
    anchor_of_row = anchors_BA.repeat_interleave(block_size, dim=1)[..., None]
    context = torch.arange(sequence_length, device=device)
    sees_context = context < anchor_of_row
    if sliding_window is not None:
        row_position = anchor_of_row + torch.arange(block_size, device=device).repeat(num_anchors)[:, None]
        sees_context = sees_context & (row_position - context < sliding_window)
    block_of_row = torch.arange(num_anchors, device=device).repeat_interleave(block_size)
    own_block = (block_of_row[:, None] == block_of_row).expand(batch, -1, -1)
    return torch.cat([sees_context, own_block], dim=-1)[:, None]


def block_states(
    drafter: DominoDraftModel,
    tapped_BST: torch.Tensor,
    anchor_embeds_BAH: torch.Tensor,
    mask_embed_H: torch.Tensor,
    anchors_BA: torch.Tensor,
    block_size: int,
) -> torch.Tensor:
    """Block states of all blocks of all sequences, `[B, A, K, H]`, by one backbone forward.

    Args:
        tapped_BST: the target's tapped states `[B, S, M·H]`.
        anchor_embeds_BAH: raw embeddings of the anchor tokens.
        mask_embed_H: raw embedding of the mask token.
    """
    batch, sequence_length = tapped_BST.shape[:2]
    num_anchors, hidden = anchors_BA.shape[1], anchor_embeds_BAH.shape[-1]
    positions = torch.arange(sequence_length, device=tapped_BST.device)[None].expand(batch, -1)
    context = PackedContext(drafter.context_keys_values(tapped_BST, positions))
    masks = mask_embed_H.expand(batch, num_anchors, block_size - 1, hidden)
    embeds = torch.cat([anchor_embeds_BAH[:, :, None], masks], dim=2).flatten(1, 2)
    rows = anchors_BA[..., None] + torch.arange(block_size, device=anchors_BA.device)
    config = drafter.config
    attention_mask = {}
    for layer_type in set(config.layer_types):
        window = config.sliding_window if layer_type == "sliding_attention" else None
        visible = packed_mask(anchors_BA, sequence_length, block_size, window)
        additive = torch.zeros(visible.shape, dtype=embeds.dtype, device=embeds.device)
        attention_mask[layer_type] = additive.masked_fill_(~visible, torch.finfo(embeds.dtype).min)
    states = drafter(embeds, rows.flatten(1), context, attention_mask)
    return states.unflatten(1, (num_anchors, block_size))
