"""Makes a Markdown report with plots from records of `benchmark.py` and `studies.py`.

python scripts/report.py record.json ... -o report
"""

import argparse
import json
import sys
from pathlib import Path

from hf_domino.evaluation.report import write_report


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", metavar="RECORD.json")
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER")
    options = parser.parse_args(arguments)
    records = {}
    for path in map(Path, options.records):
        record = json.loads(path.read_text(encoding="utf-8"))
        if "methods" not in record and "points" not in record:
            raise ValueError(f"{path} is neither a benchmark's record nor a study's.")
        if path.stem in records:
            raise ValueError(f"Two records are named {path.stem}; the report needs different names.")
        records[path.stem] = record
    print(write_report(records, options.output))


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"report.py: {error}")
