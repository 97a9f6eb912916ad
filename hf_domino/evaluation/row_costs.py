"""What a target's forward over several tokens of each sequence costs: the price of verifying, by batch.

Where memory is what a forward waits for (a GPU at small batches), rows are nearly free; where arithmetic is, they are
not. How much drafting can bring on a machine follows from this table and the accepted length.
"""

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_domino.drafter.packing_domino import packed_rows


@torch.no_grad()
def row_costs(
    model: PreTrainedModel, batch_sizes: Sequence[int], rows: Sequence[int], context: int = 200, repeats: int = 9
) -> list[dict[str, Any]]:
    """Medians of interleaved forwards over a cache of `context` made-up tokens.

    Returns:
        Per batch size B: `plain_milliseconds` of one row of each sequence as plain `generate` runs it, and
        `milliseconds` by number of rows as the drafting loop runs it (packed weights where these help).
    """
    generator = torch.Generator().manual_seed(0)
    size = (max(batch_sizes), context + max(rows))
    ids = torch.randint(model.config.get_text_config().vocab_size, size, generator=generator).to(model.device)
    packed = packed_rows(model)
    times: dict[tuple[int, int], list[float]] = {}  # by batch size and rows; rows 0 is plain
    for batch_size in batch_sizes:
        cache = DynamicCache(config=model.config)
        with packed:
            model(ids[:batch_size, :context], cache=cache, logits_to_keep=1)
        for repeat in range(repeats + 1):  # kernels are prepared in the first
            for count in (0, *rows):
                step = ids[:batch_size, context : context + max(1, count)]
                if count:
                    with packed:
                        seconds = _seconds(model, step, cache)
                else:
                    seconds = _seconds(model, step, cache)
                if repeat:
                    times.setdefault((batch_size, count), []).append(seconds)
    middle = {key: round(1000 * statistics.median(seconds), 2) for key, seconds in times.items()}
    return [
        {
            "batch_size": batch_size,
            "plain_milliseconds": middle[batch_size, 0],
            "milliseconds": {str(count): middle[batch_size, count] for count in rows},
        }
        for batch_size in batch_sizes
    ]


def _seconds(model: PreTrainedModel, step: torch.Tensor, cache: DynamicCache) -> float:
    _wait_for(model.device)
    started = time.perf_counter()
    model(step, cache=cache)
    _wait_for(model.device)
    seconds = time.perf_counter() - started
    cache.crop(-step.shape[1])
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def table(costs: list[dict[str, Any]]) -> str:
    """Times of a forward in units of plain `generate`'s at the same batch, as a Markdown table."""
    counts = list(costs[0]["milliseconds"])
    titles = [f"{count} row{'' if count == '1' else 's'}" for count in counts]
    lines = [
        f"| batch | plain step, ms | {' | '.join(titles)} |",
        "|" + " --- |" * (2 + len(counts)),
    ]
    for entry in costs:
        plain = entry["plain_milliseconds"]
        cells = [f"{entry['milliseconds'][count] / plain:.2f}" for count in counts]
        lines.append(f"| {entry['batch_size']} | {plain:.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
