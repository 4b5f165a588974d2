"""Data that looks like text and is something else: conversations that are spelled as JSON or Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from kvconvert.errors import DataError

ROWS_INSPECTED = 64
_LINES_INSPECTED = 8
# Names of lists of messages, and of the fields that a message has in one form or another.
_LISTS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "chosen")
# How Python writes such a list, which tables made by pandas hold.
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|from|speaker|content|value)': ")
_SPEAKERS, _SAID = {"role", "from", "speaker"}, {"content", "value", "text"}


def is_conversation(value: Any) -> bool:
    """Whether a value of JSON is a list of messages, or an object with one."""
    if isinstance(value, dict):
        return any(is_conversation(value[name]) for name in _LISTS if name in value)
    turns = isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
    return turns and all(_SPEAKERS & {*turn} and _SAID & {*turn} for turn in value)


def refuse_spelled_conversations(values: Iterable[Any], place: str) -> None:
    """Refuse (DataError) a column most of whose texts are conversations as JSON or Python writes them."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    spelled = sum(is_conversation(_json(text)) or _PYTHON.match(text) is not None for text in texts)
    if 2 * spelled > len(texts):
        raise DataError(
            f"Data source {place} holds conversations spelled as JSON or Python text, which would be read as prose; "
            "store them as lists of messages (json.loads of each), so that the chat template writes them."
        )


def refuse_table(text: str, file: Path) -> None:
    """Refuse (DataError) a text whose lines, or which as a whole, are JSON."""
    lines = list(islice((line for line in text.splitlines() if line.strip()), _LINES_INSPECTED))
    if all(isinstance(_json(line), dict) for line in lines):
        raise DataError(f"Data file {file} holds a JSON object a line, not prose; name it {file.stem}.jsonl.")
    rows = _json(text) if text.lstrip()[:1] == "[" else None
    if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
        raise DataError(f"Data file {file} holds a JSON list of objects, not prose; name it {file.stem}.json.")


def _json(text: str) -> Any:
    """The JSON value that a text spells, or None."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
