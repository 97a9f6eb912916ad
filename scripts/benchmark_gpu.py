"""Measures on a GPU in under eight minutes: a record like `benchmark.py`'s, with times of a draft round and of rows.

    python scripts/benchmark_gpu.py --prompts scripts/prompts/code.jsonl --output gpu.json [--model ... --drafter ...]

Prompts are taken one after another until the time is used up, so it ends in time on any GPU.
"""

import argparse
import statistics
import sys
import time

import torch

from hf_domino.evaluation.benchmark import Settings, run
from hf_domino.evaluation.contenders import add_model_arguments, load_contenders
from hf_domino.evaluation.dispatches import prepared_round
from hf_domino.evaluation.prompts import read_prompts
from hf_domino.evaluation.report import summary_table
from hf_domino.evaluation.row_costs import row_costs, table
from hf_domino.record import write_record

METHODS = ("domino", "domino-chain", "base", "native-dflash", "prompt-lookup")
ROUNDS = 20


def time_round(contenders) -> dict[str, float]:
    """Milliseconds of one draft round, chain and tree: the median of several, each waited for."""
    drafter = contenders.drafters[""]
    milliseconds = {}
    for name, width in (("chain", 1), ("tree", drafter.config.max_tree_nodes)):
        one_round = prepared_round(contenders.model, drafter, width)
        times = []
        for _ in range(ROUNDS):
            torch.cuda.synchronize()
            started = time.perf_counter()
            one_round()
            torch.cuda.synchronize()
            times.append(1000 * (time.perf_counter() - started))
        milliseconds[name] = statistics.median(times[ROUNDS // 4 :])
    return milliseconds


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE.jsonl")
    parser.add_argument("--output", required=True, metavar="RECORD.json")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=6.0, help="to measure for, after loading")
    add_model_arguments(parser)
    parser.set_defaults(device="cuda")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise ValueError("This script needs a GPU that torch can use; on a CPU, use benchmark.py.")
    contenders = load_contenders(options)
    settings = Settings(methods=list(METHODS), max_new_tokens=options.max_new_tokens)
    record = run(contenders, read_prompts(options.prompts), settings, options.output, seconds=60 * options.minutes)
    record["draft_round_milliseconds"] = time_round(contenders)
    record["row_costs"] = row_costs(contenders.model, (1, 4, 16, 64), (1, 4, 8, 16, 32))
    write_record(options.output, record)
    print(summary_table(record))
    print(record["draft_round_milliseconds"])
    print(table(record["row_costs"]))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"benchmark_gpu.py: {error}")
