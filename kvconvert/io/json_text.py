"""JSON from files that anybody may have written: parsed without surprises, or refused in a few words."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from kvconvert.io.regular import read_regular

MAX_DEPTH = 100  # of lists and objects in each other: what reads the value afterwards may call itself for each level
MAX_INTEGER = 2**64
MAX_JSON = 256_000_000  # bytes of a file; a larger one is refused before it is read
# Commas, lists and objects in a text, those in its strings included: a list of empty lists takes 24 times its own size
# of memory, and no manifest of a large model has a tenth as many.
MAX_VALUES = 20_000_000


def parse_json(content: bytes | str, *, unique: bool = False, bounded: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        content: UTF-8, or text.
        unique: refuse a name that occurs twice in one object: of two values programs take the first or the last.
        bounded: refuse numbers that are not finite, or integers beyond 64 bits; -0 is no integer.

    Raises:
        ValueError: the text is no JSON, nested too deeply, of too many values, holds what is no character, or is
            refused as above; its message completes "found ...".
    """

    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(entries)
        if len(found) != len(entries):
            repeated = Counter(name for name, _ in entries).most_common(1)[0][0]
            raise ValueError(f"the name {repeated[:80]!r} more than once in one object")
        return found

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            raise ValueError(f"a number that is not finite ({text[:80]})")
        return value

    def integer(text: str) -> int | float:
        if len(text) > 21 or abs(int(text)) > MAX_INTEGER:
            raise ValueError(f"an integer beyond 64 bits ({text[:40]})")
        return int(text) if text != "-0" else -0.0  # as it is to readers in other languages

    hooks: dict[str, Any] = {"object_pairs_hook": pairs} if unique else {}
    if bounded:
        hooks |= {"parse_float": number, "parse_constant": number, "parse_int": integer}
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        if sum(map(text.count, ",[{")) > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES:,} commas, lists and objects")
        value = json.loads(text, **hooks)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is no character") from None
    if _is_deeper(value, MAX_DEPTH):
        raise ValueError(_TOO_DEEP)
    return value


def read_json(file: Path) -> Any:
    """The value of a file of at most `MAX_JSON` bytes (OSError, ValueError: see `parse_json`)."""
    if (content := read_regular(file, MAX_JSON)) is None:
        raise ValueError(f"{file.stat().st_size:,} bytes, more than {MAX_JSON:,}")
    return parse_json(content)


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_TOO_DEEP = f"more than {MAX_DEPTH} lists and objects in each other"


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more than that number of levels; looks at one level after another."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(levels):
        level = [
            entry
            for container in level
            for entry in (container.values() if isinstance(container, dict) else container)
            if isinstance(entry, dict | list)
        ]
        if not level:
            return False
    return True
