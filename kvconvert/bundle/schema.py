"""The JSON Schema of `kvconvert.json`, for other languages; `python -m kvconvert.bundle.schema` writes it into docs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvconvert.bundle.manifest import FORMAT_VERSION, Manifest

SCHEMA_NAME = "manifest.schema.json"


def manifest_schema() -> dict[str, Any]:
    """The schema (draft 2020-12). It says what fields there are; docs/bundle.md says what they mean."""
    found = Manifest.model_json_schema()
    # Descriptions would be the docstrings of Python classes, whose attribute lists say nothing to a validator.
    for record in (found, *found.get("$defs", {}).values()):
        record["description"] = record.get("description", "").split("\n")[0]
    for key in ("config_sha256", "sha256", "measured_on", "manifest_sha256"):
        for record in (found, *found["$defs"].values()):
            if key in record.get("properties", {}):
                record["properties"][key]["pattern"] = "^[0-9a-f]{64}$"
    found["properties"]["format_version"] |= {"minimum": 0, "maximum": FORMAT_VERSION}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def schema_text() -> str:
    """The schema as the file in docs has it."""
    return json.dumps(manifest_schema(), indent=1) + "\n"


if __name__ == "__main__":
    (Path("docs") / SCHEMA_NAME).write_text(schema_text(), encoding="utf-8")
