"""Share of generated programs that pass their tests, each run in a process of its own under limits."""

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import evaluate

_DESCRIPTION = """
Share of programs that pass their tests, as in HumanEval (pass@1 with one sample a problem). Every program runs in a
new process: isolated interpreter, empty environment, an empty folder to work in, and limits on time, memory, file
size and processes. That stops accidents, not attackers: run text of models you do not trust in a container without
network.
"""
_INPUTS = """
Args:
    predictions: programs, or answers that hold one in a fenced block.
    references: test code for each, run after it; it fails by raising.
    allow_code: must be True: says that you mean to run the model's code.
    timeout: seconds per program. memory_mib: address space of each.
Returns:
    pass_rate: share that passed. passed: one truth value per program.
"""
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Limits are set inside the child, before it reads the program: no code runs between fork and exec.
_RUNNER = """
import resource, sys
seconds, memory = int(sys.argv[1]), int(sys.argv[2])
for kind, limit in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, 1 << 20),
                    (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NPROC, 64)):
    resource.setrlimit(kind, (limit, limit))
exec(compile(open("program.py").read(), "program.py", "exec"), {"__name__": "__main__"})
"""


def extract_code(answer: str) -> str:
    """The fenced block of an answer that defines something (else its last), or all of it if there is none."""
    blocks = _FENCE.findall(answer)
    if not blocks:
        return answer
    return next((block for block in blocks if "def " in block or "class " in block), blocks[-1])


def run_program(program: str, timeout: float = 5.0, memory_mib: int = 512) -> bool:
    """Whether a program runs to its end without an error, within the limits.

    Ending early does not count: the last line has to be reached, which prints a word the program cannot know.
    """
    word = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(f"{program}\n\nprint({word!r})\n", encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, str(int(timeout) + 1), str(memory_mib << 20)],
            cwd=folder,
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = b""
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with all that it started
            except ProcessLookupError:
                pass
            process.communicate()
    return process.returncode == 0 and output.rstrip().endswith(word.encode())


def code_pass_rate(
    predictions: list[str], references: list[str], timeout: float = 5.0, memory_mib: int = 512
) -> dict[str, float | list[bool]]:
    """Runs each program with its tests after it."""
    passed = [
        run_program(f"{extract_code(answer)}\n\n{tests}", timeout, memory_mib)
        for answer, tests in zip(predictions, references, strict=True)
    ]
    return {"pass_rate": sum(passed) / len(passed), "passed": passed}


class CodePassRate(evaluate.Metric):
    """See the description."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references, allow_code=False, timeout: float = 5.0, memory_mib: int = 512):
        if not allow_code:
            raise ValueError("This metric runs code that a model wrote. Pass allow_code=True if you mean to.")
        return code_pass_rate(predictions, references, timeout, memory_mib)
