"""JSON objects that carry a checksum of themselves, so that a damaged file is not taken for another result."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

_CHECKSUM = "checksum"


def sealed_json(values: dict[str, Any]) -> str:
    """The text of a JSON object with its checksum in front; equal values in equal order give equal text."""
    plain = json.loads(json.dumps(values))  # keys are text from here on, as in the file
    return json.dumps({_CHECKSUM: _checksum(plain), **plain}, indent=1) + "\n"


def read_sealed(file: Path) -> dict[str, Any]:
    """The object in a file.

    Raises:
        OSError: there is no such file, or it cannot be read.
        ValueError: it is not what was written.
    """
    values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or values.pop(_CHECKSUM, None) != _checksum(values):
        raise ValueError("its content does not fit its checksum")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
