"""Hidden states and attentions of emitted tokens, in the shapes that plain `generate` returns."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import StaticLayer

from .tree_domino import DraftTree


class ForwardRecords:
    """Collects what the user asked to have returned, for a single sequence (batches do not come here).

    Plain generation has one forward per token: the whole prompt first, then one row each. Here a token's row is its
    node in the tree.
    """

    def __init__(self, generation_config: GenerationConfig):
        recorded = generation_config.return_dict_in_generate
        self.hidden_states: tuple | None = () if recorded and generation_config.output_hidden_states else None
        self.attentions: tuple | None = () if recorded and generation_config.output_attentions else None

    def add_prefill(self, outputs: Any) -> None:
        if self.hidden_states is not None:
            self.hidden_states += (outputs.hidden_states,)
        if self.attentions is not None:
            self.attentions += (outputs.attentions,)

    def add(self, outputs: Any, trees: list[DraftTree], paths: list[list[int]], num_nodes: int, length: int) -> None:
        """Adds one entry per node of the first sequence's path.

        Args:
            length: slots of the cache before the nodes, of a static one.
        """
        for step, node in enumerate(paths[0]):
            if self.hidden_states is not None:
                self.hidden_states += (tuple(states[:, node : node + 1] for states in outputs.hidden_states),)
            if self.attentions is not None:
                path = paths[0][: step + 1]
                # Attention without weights to show (sdpa) gives none: no layer then, as in plain generation.
                self.attentions += (
                    tuple(
                        self._row(attention, node, path, num_nodes, length, layer)
                        for attention, layer in zip(outputs.attentions, outputs.cache.layers)
                    ),
                )

    @staticmethod
    def _row(
        attention: torch.Tensor, node: int, path: list[int], num_nodes: int, length: int, layer: Any
    ) -> torch.Tensor:
        """One node's attention over the context and its own path, `[1, heads, 1, T + step + 1]`, and over as many
        slots as there are where the layer of the cache is static. A sliding one that grows shows what it would have
        kept in plain generation.
        """
        static, width = isinstance(layer, StaticLayer), attention.shape[-1]
        context = length if static else width - num_nodes
        row = attention[:, :, node : node + 1]
        row = torch.cat([row[..., :context], row[..., [context + n for n in path]]], dim=-1)
        if static:
            return torch.nn.functional.pad(row, (0, width - row.shape[-1]))
        window = getattr(layer, "sliding_window", None)
        return row if window is None else row[..., -window:]
