"""Two processes train the drafter that one would: by DDP, and by FSDP with the weights shared out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_domino import DominoDraftModel
from hf_domino.training.acceptance import HeldOutPrompts
from hf_domino.training.data import ShardDataset
from hf_domino.training.trainer import RECORD, DominoTrainer
from tests.tiny import VOCAB_SIZE, prompt_ids

from .conftest import answers_mask, small_drafter, training_arguments, write_shard

ROOT = Path(__file__).resolve().parents[2]
FSDP = {"fsdp": True, "fsdp_config": {"version": 2}}
JOBS = {
    "ddp": {},
    "restricted": {"max_steps": 4},
    "fsdp": {**FSDP, "save_strategy": "steps", "save_steps": 3},
}


@pytest.fixture(scope="module")
def folder(target, texts, tmp_path_factory) -> Path:
    """Where all jobs have run: 20 sequences of various lengths as text, and a drafter to start from."""
    folder = tmp_path_factory.mktemp("processes")
    cut = [text[: 20 + i] for i, text in enumerate(texts[:20])]
    write_shard(folder / "data", cut, [answers_mask(len(text)) for text in cut])
    small_drafter(target).save_pretrained(folder / "start")
    restricted = small_drafter(target)
    counts = ShardDataset(folder / "data").token_counts(VOCAB_SIZE)
    restricted.restrict_vocabulary(counts.topk(24).indices)
    restricted.save_pretrained(folder / "start-restricted")
    jobs = [
        {"data": str(folder / "data"), "start": start_of(folder, name), "output": str(folder / name)} | settings
        for name, settings in JOBS.items()
    ]
    jobs.append(jobs[-1] | {"output": str(folder / "resumed"), "resume": str(folder / "fsdp" / "checkpoint-3")})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    script = str(Path(__file__).with_name("two_processes.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*launch, str(folder / "jobs.json")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def start_of(folder: Path, job: str) -> str:
    return str(folder / ("start-restricted" if job == "restricted" else "start"))


def alone(target, folder: Path, job: str, **settings) -> DominoTrainer:
    """The same run in one process, with the batch of two."""
    drafter = DominoDraftModel.from_pretrained(start_of(folder, job), dtype=torch.float32)
    arguments = training_arguments(folder / f"{job}-alone", per_device_train_batch_size=4, **settings)
    prompts = HeldOutPrompts(prompt_ids(3, 77, batch=3).tolist())
    trainer = DominoTrainer(drafter, target, arguments, ShardDataset(folder / "data"), prompts)
    trainer.train()
    return trainer


def log_of(folder: Path, job: str) -> list[dict[str, float]]:
    return json.loads((folder / job / RECORD).read_text())["log_history"]


@pytest.mark.parametrize("job", list(JOBS))
def test_two_processes_are_one(target, folder, job):
    wanted = alone(target, folder, job, max_steps=JOBS[job].get("max_steps", 6))
    found = log_of(folder, job)
    assert found[0]["base_weight"] == 1.0, "the head had no part in the first steps"
    for key in ("loss", "base_loss", "final_loss", "base_acceptance", "final_acceptance"):
        ours, theirs = ([entry[key] for entry in log if key in entry] for log in (found, wanted.state.log_history))
        assert ours == pytest.approx(theirs, rel=1e-3), key
    trained = DominoDraftModel.from_pretrained(folder / job, dtype=torch.float32).state_dict()
    for name, tensor in wanted.model.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=1e-2, atol=3e-4, msg=name)
    if job == "fsdp":
        length = found[-1]["eval_acceptance_length"]
        assert length == pytest.approx(wanted.evaluate()["eval_acceptance_length"], abs=1e-3)


def test_a_sharded_run_goes_on_where_it_was(folder):
    whole, resumed = (DominoDraftModel.from_pretrained(folder / job).state_dict() for job in ("fsdp", "resumed"))
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=0, msg=name)
    assert log_of(folder, "resumed")[:6] == log_of(folder, "fsdp")[:6]
