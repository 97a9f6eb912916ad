"""Measures what a forward of the target over several tokens of each sequence costs, by batch: the price of verifying;
and what a draft of a whole block costs beside it.

python scripts/row_costs.py --output row_costs.json
"""

import argparse
import sys

from hf_domino.evaluation.contenders import add_model_arguments, load_contenders
from hf_domino.evaluation.draft_costs import draft_costs
from hf_domino.evaluation.record import environment
from hf_domino.evaluation.row_costs import row_costs, table
from hf_domino.record import write_record


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, metavar="RECORD.json")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache before")
    parser.add_argument("--repeats", type=int, default=9)
    add_model_arguments(parser)
    options = parser.parse_args(arguments)
    contenders = load_contenders(options)
    model = contenders.model
    costs = row_costs(model, options.batch_sizes, options.rows, options.context, options.repeats)
    drafts = {
        label: draft_costs(model, drafter, context=options.context, repeats=options.repeats)
        for label, drafter in contenders.drafters.items()
    }
    record = {"environment": environment(model), "context": options.context, "costs": costs, "drafts": drafts}
    write_record(options.output, record)
    print(table(costs))
    for label, draft in drafts.items():
        print(label, draft)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"row_costs.py: {error}")
