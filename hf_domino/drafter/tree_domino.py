"""Draft trees: what one forward of the target verifies for one sequence.

Node 0 is the anchor; every other node is a draft token whose parent comes before it. Best-first trees after DDTree and
DominoTree (arXiv:2607.08642): see `DraftingSession.propose` for why levels of best paths give the same nodes.
"""

import math
from collections.abc import Sequence

import torch


class DraftTree:
    """A tree of draft tokens after an anchor.

    Attributes:
        tokens: token of each node.
        parents: index of each node's parent; -1 for the anchor.
        depths: distance from the anchor.
        probabilities: estimated probability that the node's path becomes text; never above its parent's.
        drafted: the drafter's own probability of it; 0 for a node that came from elsewhere, 1 for the anchor.
    """

    def __init__(self, anchor: int):
        self.tokens = [anchor]
        self.parents = [-1]
        self.depths = [0]
        self.probabilities = [1.0]
        self.drafted = [1.0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def child(self, node: int, token: int) -> int | None:
        """The child of a node that holds this token, if there is one."""
        return self._children[node].get(token)

    def add(self, parent: int, token: int, probability: float, drafted: float = 0.0) -> int:
        """Adds a child, or raises the probabilities of the one that is there. Returns its index."""
        probability = min(probability, self.probabilities[parent])
        node = self._children[parent].get(token)
        if node is None:
            node = len(self.tokens)
            self._children[parent][token] = node
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
            self.probabilities.append(probability)
            self.drafted.append(drafted)
            self._children.append({})
        else:
            self.probabilities[node] = max(self.probabilities[node], probability)
            self.drafted[node] = max(self.drafted[node], drafted)
        return node

    def _adopt(self, other: "DraftTree", node: int, parent: int) -> int:
        """Adds a node of another tree as a child of `parent`. Returns its index."""
        return self.add(parent, other.tokens[node], other.probabilities[node], other.drafted[node])

    def add_levels(
        self,
        tokens: list[list[int]],
        parents: list[list[int]],
        logprobs: list[list[float]],
        scale: float = 1.0,
        confidence: float = 0.0,
    ) -> None:
        """Adds the nodes of one sequence of `DraftLevels`, each level's parents being indices into the one above.

        Args:
            scale: corrects the drafter's probabilities by what has been accepted so far.
            confidence: tokens less probable after their parent's than this, by the drafter itself, are left out, and
                what follows them.
        """
        above = [0]
        for level_tokens, level_parents, level_logprobs in zip(tokens, parents, logprobs, strict=True):
            nodes = []
            for token, parent, logprob in zip(level_tokens, level_parents, level_logprobs, strict=True):
                known = parent < len(above) and above[parent] >= 0 and logprob > -math.inf
                own = math.exp(logprob)
                sure = known and own >= confidence * self.drafted[above[parent]]
                nodes.append(self.add(above[parent], token, scale * own, own) if sure else -1)
            above = nodes

    def add_path(self, tokens: Sequence[int], token_probabilities: Sequence[float]) -> None:
        """Adds a branch from the anchor, given the probability of each token after the one before."""
        node, probability = 0, 1.0
        for token, token_probability in zip(tokens, token_probabilities, strict=True):
            probability *= token_probability
            node = self.add(node, token, probability)

    def ranked(self) -> list[int]:
        """Draft nodes by probability, parents before children where equal."""
        return sorted(range(1, len(self)), key=lambda node: (-self.probabilities[node], self.depths[node], node))

    def within(self, depth: int) -> "DraftTree":
        """The tree up to a depth."""
        tree = DraftTree(self.tokens[0])
        new_index = {0: 0}
        for node in range(1, len(self)):
            if self.depths[node] <= depth:
                new_index[node] = tree._adopt(self, node, new_index[self.parents[node]])
        return tree

    def best(self, count: int) -> "DraftTree":
        """The tree of its `count` most probable draft nodes: with their parents, as no child outranks its parent."""
        tree = DraftTree(self.tokens[0])
        new_index = {0: 0}
        for node in self.ranked()[:count]:
            new_index[node] = tree._adopt(self, node, new_index[self.parents[node]])
        return tree.sorted_by_depth()

    def sorted_by_depth(self) -> "DraftTree":
        """The same tree with nodes in order of depth: a tree without branches becomes a chain."""
        tree = DraftTree(self.tokens[0])
        new_index = {0: 0}
        for node in sorted(range(1, len(self)), key=lambda node: (self.depths[node], node)):
            new_index[node] = tree._adopt(self, node, new_index[self.parents[node]])
        return tree

    def ancestor_mask(self) -> torch.Tensor:
        """True where node `row` may attend to node `column`: itself and its ancestors. `[N, N]`."""
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask
