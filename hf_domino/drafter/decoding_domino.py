"""Our decoding loop: draft trees, text branches and batches, with every token chosen by the target.

Per round: draft -> one forward of the target over all nodes -> walk from the anchor: the target's own choice, and on
while it is among the node's children -> keep that path's cache entries. transformers has prepared everything (inputs,
cache, processors, criteria) before; where this loop does not apply (`loop_applies`), its own loops run.
"""

import itertools
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from .backbone_domino import plain_weights
from .candidate_generator_domino import DraftingStats, DraftLimits
from .cost_domino import round_costs
from .drafting_domino import DraftingSession
from .emission_domino import Emission, ends_as_padded, judges_rows_apart
from .lookup_domino import TextLookup
from .packing_domino import packed_rows
from .records_domino import ForwardRecords
from .target_domino import Target
from .tree_domino import DraftTree
from .verifying_domino import (
    can_verify_trees,
    compact,
    keep_path,
    sliding_window,
    static_length,
    tree_attention_mask,
)

if TYPE_CHECKING:
    from .modeling_domino import DominoDraftModel

# What transformers may have prepared for the model besides; anything else is a modality or a model this loop does not
# know.
_KNOWN_KWARGS = {
    "attention_mask", "cache", "inputs_embeds", "logits_to_keep", "output_attentions", "output_hidden_states",
    "position_ids", "use_cache",
}  # fmt: skip


def loop_applies(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    model_kwargs: dict[str, Any],
    streamer: Any = None,
) -> bool:
    """Whether this loop gives exactly what plain generation would for this call."""
    positions = model_kwargs.get("position_ids")
    given = {key for key, value in model_kwargs.items() if value is not None}
    if not (given <= _KNOWN_KWARGS and positions is not None and positions.ndim == 2 and model_kwargs.get("use_cache")):
        return False
    if not can_verify_trees(target, model_kwargs.get("cache")):
        return False
    if generation_config.prefill_chunk_size is not None:
        return False
    if input_ids.shape[0] == 1:
        return True
    # In a batch, sequences get ahead of each other: what ties them together or would return a shared state is left
    # to plain generation.
    window = sliding_window(target)
    return (
        judges_rows_apart(logits_processor, stopping_criteria)
        and ends_as_padded(stopping_criteria)
        and not generation_config.return_dict_in_generate
        and streamer is None
        and not getattr(model_kwargs["cache"], "_is_user_defined", False)
        and (window is None or generation_config.max_length < window)
        and "inputs_embeds" not in given
        and static_length(model_kwargs["cache"]) is None
    )


@torch.no_grad()
def domino_decoding(
    target: PreTrainedModel,
    drafter: "DominoDraftModel",
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    streamer: Any = None,
) -> "torch.Tensor | GenerateDecoderOnlyOutput":
    """Generates as plain `generate` does, sooner. Arguments and result are those of transformers' decoding methods."""
    cache = model_kwargs["cache"]
    loop = _Loop(target, drafter, input_ids, generation_config, logits_processor, stopping_criteria, streamer, cache)
    loop.prefill(input_ids, model_kwargs)
    while loop.rows:
        loop.round()
    if streamer is not None:
        streamer.end()
    return loop.result()


def _share_compilation(inputs: dict[str, Any], rows: int) -> None:
    """Lets one compiled forward serve every number of rows from two on (one row has its own)."""
    for value in inputs.values():
        for tensor in value.values() if isinstance(value, dict) else [value]:
            if isinstance(tensor, torch.Tensor):
                for dim in range(1, tensor.ndim):
                    if tensor.shape[dim] == rows:
                        torch._dynamo.maybe_mark_dynamic(tensor, dim)


class _Loop:
    """State of one call. `rows` are the sequences that still grow, by their place in the whole batch; everything
    named for them (anchors, positions, cache, context memory) holds them only, in this order."""

    def __init__(
        self, target, drafter, input_ids, generation_config, logits_processor, stopping_criteria, streamer, cache
    ):
        from .integration_domino import decoding_forward

        self.model = target
        self.compiled = decoding_forward(target, generation_config, cache)
        self.static_length = static_length(cache)
        self.generation_config = generation_config
        self.view = Target(target, drafter.config)
        self.limits = DraftLimits.of_call(drafter, generation_config)
        self.session = DraftingSession(drafter, self.view, self.limits.temperature)
        self.stats = drafter.drafting_stats = DraftingStats()
        self.emission = Emission(input_ids, generation_config, logits_processor, stopping_criteria, streamer)
        self.records = ForwardRecords(generation_config)
        # A drafting session holds the weights that it reads by itself packed already.
        of_target = packed_rows(target)
        self.packed = of_target if plain_weights(drafter) is not None else of_target + packed_rows(drafter)
        batch_size, context = input_ids.shape
        self.costs = round_costs(
            target, drafter, batch_size, context, compiled=self.compiled is not None, tile=of_target.tile
        )
        self.max_nodes = drafter.config.max_tree_nodes
        self.width = min(drafter.config.max_tree_width or self.max_nodes, self.max_nodes)
        self.asks_drafter = drafter.config.draft_sources != "text"
        self.asks_text = (
            drafter.config.draft_sources != "drafter" or generation_config.prompt_lookup_num_tokens is not None
        )
        self.rows = list(range(input_ids.shape[0]))
        self.lookups = [self._text_lookup(prompt.tolist()) for prompt in input_ids]
        self.depth = self.limits.tokens
        # Other text may suit the drafter better than the last call's, so a new call tries at once.
        self.pause = 0 if self.limits.constant else self.costs.plain_rounds_due

    def _text_lookup(self, prompt: list[int]) -> TextLookup:
        config = self.generation_config
        max_ngram = (config.max_matching_ngram_size or 3) if self.asks_text else 0
        lookup = TextLookup(max_ngram, config.prompt_lookup_num_tokens or self.max_nodes)
        lookup.extend(prompt)
        return lookup

    # Prefill

    def prefill(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
        """The target over the prompts, and the first token of each."""
        from .integration_domino import prefill

        padding_mask = model_kwargs.get("attention_mask")
        wants_hidden_states = model_kwargs.get("output_hidden_states")
        self.kwargs = {
            key: value
            for key, value in model_kwargs.items()
            if key not in ("attention_mask", "position_ids", "cache", "inputs_embeds")
        }
        if not wants_hidden_states:
            self.kwargs["output_hidden_states"] = self.view.hidden_states_indices
        inputs = model_kwargs | {"output_hidden_states": self.kwargs["output_hidden_states"]}
        with self.packed:
            outputs = prefill(self.model, input_ids, self.generation_config, inputs)
        self.cache = outputs.cache
        self.cache.activate_past_recording()
        self.records.add_prefill(outputs)

        length = int(self.cache.get_seq_length())
        device = input_ids.device
        self.slot_positions = torch.arange(length, device=device).repeat(len(self.rows), 1)
        self.has_empty_slots = padding_mask is not None
        if padding_mask is not None:
            self.slot_positions = self.slot_positions.masked_fill(padding_mask[:, :length] == 0, -1)
        # Two counts: in the cache as plain generation would fill it (masks), and as the model was told (rotation).
        self.positions = torch.full((len(self.rows),), length, device=device)
        self.rotary_positions = model_kwargs["position_ids"][:, -1].to(device) + 1

        tapped = self.view.tapped_states(outputs.hidden_states)
        self.pending = [self._without_padding(tapped)]
        tokens = outputs.logits[:, -1].argmax(-1).tolist() if self.emission.plain_greedy else None
        done, self.anchors = [], []
        for row in self.rows:
            token, ended = self.emission.emit(row, outputs.logits[row, -1], None if tokens is None else tokens[row])
            self.lookups[row].extend([token])
            self.anchors.append(token)
            done.append(ended)
        self._leave(done)

    def _without_padding(self, tapped_BST: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """The prompts' states, real tokens first, and how many of them each sequence has."""
        states = tapped_BST.shape[1]
        real = self.slot_positions[:, -states:] >= 0
        counts = real.sum(-1).tolist()
        if min(counts) == states or max(counts) == 0:  # without any real token, plain generation goes on from all
            return tapped_BST, [states] * len(counts)
        order = torch.argsort(~real, dim=1, stable=True)[:, : max(counts)].to(tapped_BST.device)
        return tapped_BST.gather(1, order[..., None].expand(-1, -1, tapped_BST.shape[-1])), counts

    # One round

    def round(self) -> None:
        started = time.perf_counter()
        with self.packed:
            trees, offers = self._draft()
            drafted = time.perf_counter()
            outputs = self._verify(trees)
        paths, done = self._emit(trees, outputs)
        ended = time.perf_counter()
        self.stats.draft_seconds += drafted - started
        self.stats.verify_seconds += ended - drafted
        rows = max(len(tree) for tree in trees)
        self.costs.record_verify(rows, ended - drafted)
        if not self.limits.constant and not self.text_suffices:  # else drafting is not on trial
            self.costs.record_round(self.drafting, rows, sum(map(len, paths)) / len(paths))
        if self.drafting:
            self.pause = 0 if self.limits.constant else self.costs.pause
            self._learn_of_drafter(trees, paths)
        for row, tree, path, offer in zip(self.rows, trees, paths, offers, strict=True):
            self.stats.record(row, len(tree) - 1, max(tree.depths), len(path) - 1)
            self._learn_of_text(row, tree, path, offer)
        self._advance(trees, paths, outputs)
        self._leave(done)

    def _draft(self) -> tuple[list[DraftTree], list[tuple[list[int], int]]]:
        """A tree per sequence, and what its text offered: tokens, and the length of the match they followed."""
        trees = [DraftTree(anchor) for anchor in self.anchors]
        offers: list[tuple[list[int], int]] = [([], 0)] * len(trees)
        rooms = [self.limits.depth(self.emission.texts[row].length) for row in self.rows]
        confidence = self.limits.confidence or 0.0
        self.drafting = self.text_suffices = False
        if max(rooms) <= 0:
            return trees, offers
        offers = [self._add_text_branch(row, tree, confidence) for row, tree in zip(self.rows, trees, strict=True)]
        if not self.limits.constant:
            self.text_suffices = self.costs.suffices(self._mean_probabilities(trees, self.max_nodes))
        self.drafting = self.asks_drafter and self.pause == 0 and not self.text_suffices
        if self.drafting:
            started = time.perf_counter()
            self._observe()
            anchors = torch.tensor(self.anchors, device=self.slot_positions.device)
            depth = max(rooms) if self.limits.constant else min(max(rooms), self.depth)
            levels = self.session.propose(anchors, depth, self.width, self.max_nodes)
            scale = 1.0 if self.limits.constant else self.costs.calibration
            for tree, nodes in zip(trees, levels.to_host(), strict=True):
                tree.add_levels(*nodes, scale=scale, confidence=confidence)
            self.costs.record_draft(time.perf_counter() - started)
        elif self.pause:
            self.pause -= 1
        trees = [tree.within(room) for tree, room in zip(trees, rooms, strict=True)]
        count = self.max_nodes
        if self.static_length is not None:
            count = min(count, self.static_length - self.slot_positions.shape[1] - 1)
        if not self.limits.constant:
            count = self.costs.worthwhile(self._mean_probabilities(trees, count), self.drafting)
        return [tree.best(count) for tree in trees], offers

    def _add_text_branch(self, row: int, tree: DraftTree, confidence: float) -> tuple[list[int], int]:
        """Adds what a sequence's text offers, up to the first token that is less likely than asked."""
        tokens, match = self.lookups[row].continuation()
        probabilities = [self.lookups[row].token_probability(match + k) for k in range(len(tokens))]
        likely = list(itertools.takewhile(lambda probability: probability >= confidence, probabilities))
        tree.add_path(tokens[: len(likely)], likely)
        return tokens[: len(likely)], match

    def _mean_probabilities(self, trees: list[DraftTree], most: int) -> list[float]:
        """Of each tree's `most` best nodes, the most probable first: means over the sequences."""
        ranked = [[tree.probabilities[node] for node in tree.ranked()[:most]] for tree in trees]
        return [sum(r[i] for r in ranked if i < len(r)) / len(ranked) for i in range(max(map(len, ranked)))]

    def _verify(self, trees: list[DraftTree]):
        """One forward of the target over all nodes of all trees."""
        from .integration_domino import decoding_context

        nodes = max(len(tree) for tree in trees)
        device = self.slot_positions.device
        tokens = torch.tensor([tree.tokens + tree.tokens[:1] * (nodes - len(tree)) for tree in trees], device=device)
        depths = torch.tensor([tree.depths + [0] * (nodes - len(tree)) for tree in trees], device=device)
        mask = None  # the model's own causal mask does for one chain behind an unbroken context
        several = nodes > 1 and self.compiled is not None  # compiled for one kind of mask
        if len(trees) > 1 or self.has_empty_slots or not trees[0].is_chain or several:
            mask = tree_attention_mask(self.model, self.cache, trees, self.slot_positions, self.positions)
        inputs = self.model.prepare_inputs_for_generation(
            tokens,
            next_sequence_length=nodes,
            cache=self.cache,
            attention_mask=next(iter(mask.values())) if isinstance(mask, dict) else mask,
            position_ids=self.rotary_positions[:, None] + depths,
            is_first_iteration=False,
            **self.kwargs,
        )
        if isinstance(mask, dict):  # which transformers does not expect here, with a static cache
            inputs["attention_mask"] = mask
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = 0  # all
        with decoding_context(self.model):
            if self.compiled is None:
                return self.model(**inputs, return_dict=True)
            if nodes > 1:
                _share_compilation(inputs, nodes)
            return self.compiled(**inputs, return_dict=True)

    def _emit(self, trees: list[DraftTree], outputs) -> tuple[list[list[int]], list[bool]]:
        """Walks each tree by the target's choices. Returns the nodes passed, and which sequences ended."""
        choices = outputs.logits.argmax(-1).tolist() if self.emission.plain_greedy else None
        paths, done = [], []
        for i, (row, tree) in enumerate(zip(self.rows, trees, strict=True)):
            node, path, ended = 0, [], False
            while True:
                path.append(node)
                choice = None if choices is None else choices[i][node]
                token, ended = self.emission.emit(row, outputs.logits[i, node], choice)
                child = tree.child(node, token)
                if ended or child is None:
                    break
                node = child
            self.lookups[row].extend([tree.tokens[n] for n in path[1:]] + [token])
            self.anchors[i] = token
            paths.append(path)
            done.append(ended)
        return paths, done

    def _learn_of_drafter(self, trees: list[DraftTree], paths: list[list[int]]) -> None:
        """What this round says about the drafter's probabilities, and how deep the next draft is to be."""
        verified = [(tree, path) for tree, path in zip(trees, paths, strict=True) if any(tree.drafted[1:])]
        if not verified:
            return
        expected = sum(sum(tree.drafted[1:]) for tree, _ in verified)
        accepted = sum(sum(tree.drafted[node] > 0 for node in path[1:]) for tree, path in verified)
        self.costs.record_acceptance(expected / len(verified), accepted / len(verified))
        deepest = max(max(max(tree.depths) + 2, len(path) + 1) for tree, path in verified)
        self.depth = min(self.limits.tokens, deepest)

    def _learn_of_text(self, row: int, tree: DraftTree, path: list[int], offer: tuple[list[int], int]) -> None:
        """What this round says about the text's branches."""
        tokens, match = offer
        node, offered = 0, 0
        accepted = set(path)
        for token in tokens:
            child = tree.child(node, token)
            if child is None:
                break
            offered += 1
            if child not in accepted:
                self.lookups[row].record(match, offered, offered - 1)
                return
            node = child
        self.lookups[row].record(match, offered, offered) if offered else None

    def _advance(self, trees: list[DraftTree], paths: list[list[int]], outputs) -> None:
        """Keeps the accepted paths in cache, records and context."""
        nodes = max(len(tree) for tree in trees)
        length = self.slot_positions.shape[1]
        self.records.add(outputs, trees, paths, nodes, length)
        keep_path(self.cache, length, nodes, paths)
        tapped = self.view.tapped_states(outputs.hidden_states)
        counts = [len(path) for path in paths]
        longest = max(counts)
        self.has_empty_slots |= min(counts) < longest
        device = self.slot_positions.device
        index = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=tapped.device)
        kept = tapped.gather(1, index[..., None].expand(-1, -1, tapped.shape[-1]))
        if self.asks_drafter:
            self.pending.append((kept, counts))

        steps = torch.arange(longest, device=device)
        count_B = torch.tensor(counts, device=device)
        slots = (self.positions[:, None] + steps).masked_fill(steps >= count_B[:, None], -1)
        self.slot_positions = torch.cat([self.slot_positions, slots], dim=1)
        self.positions = self.positions + count_B
        self.rotary_positions = self.rotary_positions + count_B

    def _observe(self) -> None:
        """Gives the drafter the context that has come since it last drafted."""
        if len(self.rows) == 1 and len(self.pending) > 1:
            states = torch.cat([tapped[:, : counts[0]] for tapped, counts in self.pending], dim=1)
            self.pending = [(states, [states.shape[1]])]
        for tapped, counts in self.pending:
            self.session.observe(tapped, counts)
        self.pending = []

    def _leave(self, done: list[bool]) -> None:
        """Takes sequences that have ended out of the batch."""
        batch = len(self.rows)
        stay = [i for i, ended in enumerate(done) if not ended]
        if 0 < len(stay) < batch:
            self._observe()  # what is pending is for the batch as it was
            self.session.select(stay)
            self.anchors = [self.anchors[i] for i in stay]
            index = torch.tensor(stay, device=self.slot_positions.device)
            self.cache.batch_select_indices(index)
            self.slot_positions, self.positions = self.slot_positions[index], self.positions[index]
            self.rotary_positions = self.rotary_positions[index]
        self.rows = [self.rows[i] for i in stay]
        if stay and batch > 1:
            self.slot_positions = compact(self.cache, self.slot_positions)
            if self.emission.noise is not None:
                steps = [self.emission.texts[row].length - self.emission.prompt_length for row in self.rows]
                self.emission.noise.forget(min(steps))

    def result(self) -> "torch.Tensor | GenerateDecoderOnlyOutput":
        sequences = self.emission.sequences(self.generation_config._pad_token_tensor)
        if not self.generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=self.emission.scores,
            logits=self.emission.logits,
            attentions=self.records.attentions,
            hidden_states=self.records.hidden_states,
            cache=self.cache,
        )
