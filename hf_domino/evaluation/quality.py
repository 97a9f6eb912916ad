"""Checking answers that are programs: HumanEval's rows (`prompt`, `test`, `entry_point`)."""

from typing import Any

from .metrics.code_pass_rate.code_pass_rate import extract_code, run_program


def assemble_program(row: dict[str, Any], answer: str) -> str:
    """The answer's code with the row's tests after it.

    An answer that does not define the asked function itself is taken as the rest of the prompt's code.
    """
    code, entry_point = extract_code(answer), row.get("entry_point")
    if entry_point and f"def {entry_point}" not in code:
        code = f"{row['prompt']}{code}"
    call = f"\n\ncheck({entry_point})" if entry_point and "def check(" in row["test"] else ""
    return f"{code}\n\n{row['test']}{call}"


def check_program(row: dict[str, Any], answer: str, timeout: float = 5.0) -> bool:
    """Whether the answer's code passes the row's tests, in a process of its own under limits."""
    return run_program(assemble_program(row, answer), timeout)
