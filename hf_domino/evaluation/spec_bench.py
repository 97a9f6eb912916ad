"""Spec-Bench's answer format, out: its users can put these numbers beside other methods' with its own scripts.

In: `prompts.read_prompts` reads its `question.jsonl` as it is.
"""

import json
from pathlib import Path
from typing import Any


def write_answers(rows: list[dict[str, Any]], method: str, model_id: str, path: str | Path) -> None:
    """Writes one method's answers, one line per question: `choices[0]` has `turns`, `new_tokens`, `wall_time`
    (a value per turn) and `accept_lengths` (a value per target forward, the bonus included).

    Args:
        rows: of a benchmark with batch size 1.
        model_id: the name that Spec-Bench lists the run under.

    Raises:
        ValueError: the method has no rows.
    """
    questions: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["method"] == method:
            questions.setdefault(row["unit"], []).append(row)
    if not questions:
        raise ValueError(f"There are no rows of {method!r} to write.")
    lines = []
    for number, (unit, turns) in enumerate(questions.items()):
        turns.sort(key=lambda row: row["turn"])
        choice = {
            "index": 0,
            "turns": [row["text"] for row in turns],
            "decoding_steps": [len(row["accepted"]) or row["tokens"] for row in turns],
            "new_tokens": [row["tokens"] for row in turns],
            "wall_time": [row["seconds"] for row in turns],
            "accept_lengths": [count + 1 for row in turns for count in row["accepted"]]
            or [1] * sum(row["tokens"] for row in turns),
        }
        question_id = turns[0].get("question_id")
        lines.append(
            {
                "question_id": number if question_id is None else question_id,
                "category": turns[0].get("category") or turns[0]["set"],
                "answer_id": unit,
                "model_id": model_id,
                "choices": [choice],
            }
        )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
