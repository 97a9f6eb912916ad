"""Stage, check and publish a drafter. Nothing goes up without --push: by default the command shows what would.

python scripts/publish.py --checkpoint runs/mine --record record.json --folder staged/mine --target org/target
python scripts/publish.py --folder staged/mine --push
python scripts/publish.py --adapter runs/mine/final --record record.json --folder staged/mine_lora
"""

import argparse
import json
from pathlib import Path

from hf_domino import DominoDraftModel
from hf_domino.hub import complete, inspect_staged, plan_push, push, stage, stage_adapter, try_drafter
from hf_domino.hub.layout import RECORD
from hf_domino.hub.results import result_of_benchmark

PROMPT = "Explain in a few sentences why the sky is blue."


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    record = read_record(options)
    if options.adapter:
        files = stage_adapter(options.adapter, options.folder, record)
        print("\n".join(f"  + {name}  {size:,} bytes" for name, size in files.items()))
        print(f"Nothing was sent. To publish: hf upload {record['repo_id']} {options.folder} .")
        return
    if options.checkpoint:
        stage(options.checkpoint, options.folder, record, options.max_shard_size)
    elif options.record:
        complete(options.folder, record)
    report = inspect_staged(options.folder).raise_if_refused()
    print(
        f"{options.folder}: {report.parameters:,} parameters, {', '.join(report.dtypes)}, {report.size:,} bytes; "
        "files, code, tensors and checksums are right."
    )
    if options.target:
        try_with_target(options.folder, options.target)
    if options.engines:
        DominoDraftModel.from_pretrained(options.folder, dtype="auto").export_for_engines(options.engines)
        print(f"{options.engines}: the variant for serving engines.")
    plan = plan_push(options.folder, record["repo_id"], compare=options.push or options.compare)
    print(plan)
    if options.push:
        print(push(plan, private=options.private or None))
    else:
        print("Nothing was sent. Add --push to publish.")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="the staged repo: made from --checkpoint, completed if only --record is given, else taken as it is",
    )
    parser.add_argument("--checkpoint", help="a trained drafter, folder or Hub id")
    parser.add_argument("--adapter", help="a PEFT adapter of a drafter, folder: stage it (publishing is `hf upload`)")
    parser.add_argument("--record", type=Path, help="JSON record of the card (docs/publishing.md)")
    parser.add_argument(
        "--benchmark",
        type=Path,
        action="append",
        default=[],
        help="JSON of scripts/benchmark.py, added to the card's results; may be repeated",
    )
    parser.add_argument("--target", help="folder or Hub id of the target, to draft a few rounds with")
    parser.add_argument("--engines", type=Path, help="write the variant for serving engines here")
    parser.add_argument("--max-shard-size", default="5GB")
    parser.add_argument("--compare", action="store_true", help="ask the Hub what is there, also without --push")
    parser.add_argument("--push", action="store_true", help="publish, as one commit")
    parser.add_argument("--private", action="store_true", help="if the repo is new")
    options = parser.parse_args(arguments)
    if options.checkpoint and not options.record:
        parser.error("--checkpoint needs --record: a drafter is not published without its card.")
    if options.adapter and (not options.record or options.checkpoint or options.push or options.engines):
        parser.error("--adapter takes --record and --folder, and none of --checkpoint, --engines and --push.")
    if options.benchmark and not options.record:
        parser.error("--benchmark adds to --record, which is not given.")
    return options


def read_record(options: argparse.Namespace) -> dict:
    path = options.record or options.folder / RECORD
    record = json.loads(path.read_text(encoding="utf-8"))
    for benchmark in options.benchmark:
        record.setdefault("results", []).append(result_of_benchmark(json.loads(benchmark.read_text(encoding="utf-8"))))
    return record


def try_with_target(folder: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(name)
    messages = [{"role": "user", "content": PROMPT}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    trial = try_drafter(folder, target, prompt["input_ids"])
    print(
        f"{name}: {trial.rounds} rounds, {trial.acceptance_length:.2f} tokens per forward, output "
        f"{'identical' if trial.identical else 'NOT identical'} ({target.dtype})."
    )
    if not trial.identical and str(target.dtype) == "torch.float32":
        raise SystemExit("In float32 the output must be identical: this drafter or this target is not right.")


if __name__ == "__main__":
    main()
