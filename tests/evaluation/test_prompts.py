import json

import pytest

from hf_domino.evaluation.prompts import conversation_ids, read_prompts


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_reads_every_format(tmp_path):
    own = write(tmp_path / "own.jsonl", {"prompt": "a", "set": "s"}, {"turns": ["b", "c"]})
    spec_bench = write(
        tmp_path / "q.jsonl",
        {"question_id": 1, "category": "writing", "turns": ["d"]},
        {"question_id": 2, "category": "rag", "turns": ["e"]},
    )
    gsm8k = write(tmp_path / "gsm8k_test.jsonl", {"question": "f", "answer": "#### 1"})
    prompts = read_prompts([own, spec_bench, gsm8k])
    assert [(p.set, p.turns) for p in prompts] == [
        ("s", ("a",)),
        ("own", ("b", "c")),
        ("mt_bench", ("d",)),
        ("rag", ("e",)),
        ("gsm8k_test", ("f",)),
    ]
    assert prompts[2].row["question_id"] == 1
    assert prompts[4].row["answer"] == "#### 1"


def test_limit_counts_each_set(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": str(i), "set": "ab"[i % 2]} for i in range(10)))
    assert [p.turns[0] for p in read_prompts([path], limit=2)] == ["0", "1", "2", "3"]


def test_sets_asked_for(tmp_path):
    path = write(tmp_path / "p.jsonl", *({"prompt": str(i), "set": "abc"[i % 3]} for i in range(9)))
    assert [p.turns[0] for p in read_prompts([path], limit=2, sets=["c", "a"])] == ["0", "2", "3", "5"]
    with pytest.raises(ValueError, match="No prompts of d, x .* a, b, c"):
        read_prompts([path], sets=["a", "x", "d"])


def test_hash_follows_the_text_only(tmp_path):
    path = write(tmp_path / "p.jsonl", {"prompt": "a", "set": "x"}, {"turns": ["a"]}, {"prompt": "b"})
    one, same, other = (prompt.hash for prompt in read_prompts([path]))
    assert one == same != other


@pytest.mark.parametrize("row", ["{", "[1]", {"text": "a"}, {"turns": ["a", 3]}, {"prompt": " "}])
def test_bad_line_is_named(tmp_path, row):
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(ValueError, match="p.jsonl, line 2"):
        read_prompts([path])


def test_no_prompts(tmp_path):
    with pytest.raises(ValueError, match="no prompts"):
        read_prompts([write(tmp_path / "p.jsonl")])


def test_conversation_with_and_without_template(contenders):
    tokenizer = contenders.tokenizer
    assert tokenizer.decode(conversation_ids(tokenizer, ["ab", "cd"], ["x"])) == "ab<unk>x<unk>cd"
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'][0] }}.{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}?{% endif %}"
    )
    try:
        assert tokenizer.decode(conversation_ids(tokenizer, ["ab", "cd"], ["x"])) == "u.aba.xu.cd?"
    finally:
        tokenizer.chat_template = None
