"""JSON files of a bundle, read so that every program reads the same."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from kvconvert.io.tensorfile import mismatch

# Larger files are refused before they are read.
MAX_JSON = 256_000_000


def read_object(path: Path, finite: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: of the file; messages call it by its name.
        finite: refuse NaN, infinity and numbers beyond float64, too. Configs of some models hold infinities.

    Raises:
        BundleError: the file is too large, no JSON, or no object, or a name occurs twice in one of its objects: of two
            values programs take the first or the last.
    """
    size = path.stat().st_size
    if size > MAX_JSON:
        raise mismatch(path.name, "its length", f"at most {MAX_JSON} bytes", f"{size} bytes")
    return parse_object(path.name, path.read_bytes(), finite)


def read_settings(path: Path) -> Any:
    """The JSON value in a file that is copied from the source as it is, whose reader is Python's like this one.

    Raises:
        BundleError: the file is too large or no JSON.
    """
    size = path.stat().st_size
    if size > MAX_JSON:
        raise mismatch(path.name, "its length", f"at most {MAX_JSON} bytes", f"{size} bytes")
    try:
        return json.loads(path.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise mismatch(path.name, "its content", "valid JSON", error) from error


def parse_object(file: str, content: bytes, finite: bool = False) -> dict[str, Any]:
    """The JSON object in a file's bytes; see `read_object`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            repeated = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise mismatch(file, f"the name {repeated[:80]!r}", "given once", "given more than once")
        return found

    def number(text: str) -> float:
        value = float(text)
        if finite and not math.isfinite(value):
            raise mismatch(file, "its numbers", "finite", text[:80])
        return value

    try:
        value = json.loads(content.decode("utf-8"), object_pairs_hook=unique, parse_float=number, parse_constant=number)
    except (ValueError, RecursionError) as error:
        raise mismatch(file, "its content", "valid JSON", error) from error
    if not isinstance(value, dict):
        raise mismatch(file, "its content", "a JSON object", type(value).__name__)
    return value
