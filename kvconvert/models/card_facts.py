"""What the model card of a checkpoint says of its licence and languages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


def card_facts(directory: Path) -> dict[str, Any]:
    """Licence and languages that the front matter of the model card states, as fields of `SourceInfo`."""
    card = directory / "README.md"
    if not card.is_file():
        return {}
    text = card.read_text(encoding="utf-8", errors="replace")
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    if front is None:
        return {}
    licence = re.search(r"^license:\s*[\"']?([\w.-]+)", front[1], re.MULTILINE)
    try:
        stated = yaml.safe_load(front[1])
    except yaml.YAMLError:  # a card is for people; its line about the licence is read all the same
        stated = None
    stated = stated if isinstance(stated, dict) else {}
    named = {key: stated.get(f"license_{key}") for key in ("name", "link")}
    language = stated.get("language")
    # Norwegian is `no`, which YAML takes for false.
    codes = ["no" if code is False else code for code in (language if isinstance(language, list) else [language])]
    return {
        "licence": licence[1] if licence else None,
        "licence_name": named["name"] if isinstance(named["name"], str) else None,
        "licence_link": named["link"] if isinstance(named["link"], str) else None,
        "language": [code for code in codes if isinstance(code, str)],
    }
