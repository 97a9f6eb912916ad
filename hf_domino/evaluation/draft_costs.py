"""What one draft costs beside the forward that verifies it: the backbone, the tree on top of it, the target."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_domino.drafter.drafting_domino import DraftingSession
from hf_domino.drafter.modeling_domino import DominoDraftModel
from hf_domino.drafter.packing_domino import packed_rows
from hf_domino.drafter.target_domino import Target
from hf_domino.drafter.tree_domino import DraftTree
from hf_domino.drafter.verifying_domino import tree_attention_mask


@torch.no_grad()
def draft_costs(
    model: PreTrainedModel, drafter: DominoDraftModel, nodes: int = 16, context: int = 200, repeats: int = 9
) -> dict[str, Any]:
    """Medians of interleaved drafts and forwards after `context` made-up tokens, whole blocks deep.

    Returns:
        `backbone_milliseconds`: block states, base logits and candidates. `tree_milliseconds`: all else until the tree
        of so many nodes stands on the host (head, search); `draft_milliseconds`: both. `verify_milliseconds`: the
        target's forward over it, as the loop runs it.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, context), generator=generator).to(model.device)
    view, cache, packed = Target(model, drafter.config), DynamicCache(config=model.config), packed_rows(model)
    outputs = model(ids, cache=cache, output_hidden_states=view.hidden_states_indices, logits_to_keep=1)
    session = DraftingSession(drafter, view)
    session.observe(view.tapped_states(outputs.hidden_states), [context])
    anchors = outputs.logits[:, -1].argmax(-1)
    slots, length = torch.arange(context, device=model.device)[None], torch.tensor([context], device=model.device)

    def draft() -> DraftTree:
        tree = DraftTree(int(anchors))
        tree.add_levels(*session.propose(anchors, drafter.config.max_drafts, nodes, nodes).to_host()[0])
        return tree.best(nodes)

    def verify(tree: DraftTree) -> None:
        mask = tree_attention_mask(model, cache, [tree], slots, length)
        tokens, depths = torch.tensor([tree.tokens]), torch.tensor([tree.depths])
        with packed:
            logits = model(
                tokens.to(model.device),
                cache=cache,
                attention_mask=mask,
                position_ids=context + depths.to(model.device),
                output_hidden_states=view.hidden_states_indices,
            ).logits
        logits.argmax(-1).tolist()
        cache.crop(-len(tree))

    times: dict[str, list[float]] = {"backbone": [], "draft": [], "verify": []}
    for repeat in range(repeats + 2):  # kernels are prepared in the first
        timed = {}
        _, timed["backbone"] = _timed(lambda: session.candidates(anchors, drafter.config.max_drafts)[0].sum().item())
        tree, timed["draft"] = _timed(draft)
        _, timed["verify"] = _timed(partial(verify, tree))
        if repeat >= 2:
            for name, seconds in timed.items():
                times[name].append(seconds)
    trees = [draft - backbone for draft, backbone in zip(times["draft"], times["backbone"], strict=True)]
    middle = {name: round(1000 * statistics.median(seconds), 2) for name, seconds in (times | {"tree": trees}).items()}
    return {
        "nodes": nodes,
        "depth": drafter.config.max_drafts,
        **{f"{name}_milliseconds": middle[name] for name in ("backbone", "tree", "draft", "verify")},
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = call()
    return result, time.perf_counter() - started
