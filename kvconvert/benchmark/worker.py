"""The process that measures one model: a job as JSON on stdin, one JSON object on stdout for each case."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch
from transformers.utils import logging

from kvconvert.benchmark.contender import Contender, Measurement
from kvconvert.errors import KvconvertError
from kvconvert.io.logs import log_as_text


def work(job: dict, answers: IO[str]) -> None:
    """Measure every case of a job; what fails is an answer, too."""

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    contender, failure = None, None
    try:
        contender = Contender(job["model"], Path(job["directory"]), Path(job["tokenizer"]), job["device"], job["dtype"])
    except KvconvertError as error:
        answer(error=type(error).__name__, message=str(error))
        return
    except Exception as error:
        failure = reason(error)
    for batch, context in job["cases"]:
        if contender is None:
            measured = Measurement(job["model"], batch, context, failure=failure)
        else:
            try:
                measured = contender.measure(batch, context, job["new_tokens"])
            except Exception as error:
                measured = Measurement(job["model"], batch, context, failure=reason(error))
        answer(measured=asdict(measured))


def reason(error: Exception) -> str:
    """Why something failed, in a few words."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    if isinstance(error, KvconvertError):
        return str(error)
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}".rstrip(": ")[:200]


def main() -> None:
    """Entry point; whatever else is printed goes to stderr."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        log_as_text()
        logging.disable_progress_bar()
        work(json.load(sys.stdin), answers)


if __name__ == "__main__":
    main()
