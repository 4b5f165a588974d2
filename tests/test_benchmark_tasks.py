"""The comparison of answers to public tasks that benchmarks/task_answers.py prints."""

import gzip
import json

import task_answers


def answer(right, *tokens):
    return {"right": right, "tokens": [*tokens], "cut_off": False, "text": ""}


def test_answers_are_compared_problem_by_problem(tmp_path, capsys):
    how = "gsm8k, 0 tokens before, greedy"
    source = {how: {"1": [answer(True, 5, 6)], "2": [answer(False, 7, 8, 9, 10)]}}
    other = {how: {"2": [answer(True, 7, 8, 1, 10)], "1": [answer(True, 5, 6)]}}
    files = [tmp_path / f"{name}.json.gz" for name in ("source", "other")]
    for file, answers in zip(files, (source, other), strict=True):
        file.write_bytes(gzip.compress(json.dumps(answers).encode()))
    task_answers.compare(files)
    first, second = (line for line in capsys.readouterr().out.splitlines() if how in line)
    assert "source" in first
    assert "50.0%" in first
    assert "100.0%" in second
    assert "+50.0 (" in second
    # Two tokens of the first problem and two of the second.
    assert second.split()[-1] == "2"
