"""The tables of docs/methods.md and docs/bundle.md, made from the methods themselves."""

from __future__ import annotations

import re

from tables import table

from kvconvert.methods.scheme import (
    FIELDS,
    PAPER_PRESETS,
    PARTS,
    PLAN_TENSORS,
    PRESETS,
    KVCalibration,
    KVScheme,
    preset_calibration,
)


def scheme_fields() -> str:
    """Every field of a scheme."""
    rows = [
        (f"`{field.name}`", field.method, _value(field.default), _possible(field.rule), field.meaning)
        for field in FIELDS.values()
    ]
    return _escaped(("field", "method", "default", "possible", "meaning"), rows)


def plan_tensors() -> str:
    """Every tensor that a KV plan may hold for a layer."""
    rows = [(f"`{name}`", part.method, PLAN_TENSORS[name]) for part in PARTS for name in part.plan_tensors]
    return _escaped(("tensor", "method", "content"), rows)


def methods() -> str:
    """Every method."""
    return _escaped(("method", "what it does", "source"), [(part.method, part.summary, part.source) for part in PARTS])


def presets() -> str:
    """Every preset but the papers', with the fields in which it differs from a plain scheme."""
    plain, everything = KVScheme().to_dict(), KVCalibration().to_dict()
    rows = []
    for name, scheme in PRESETS.items():
        if name not in PAPER_PRESETS:
            changed = _changed(scheme.to_dict(), plain) + _changed(preset_calibration(name).to_dict(), everything)
            rows.append((f"`{name}`", ", ".join(changed) or "the defaults"))
    return _escaped(("preset", "differs from the defaults in"), rows)


def _escaped(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return table(head, [[cell.replace("|", r"\|") for cell in row] for row in rows])


def _value(value: object) -> str:
    return "none" if value is None else f"`{value}`"


def _possible(rule: str) -> str:
    """A rule as the cell of a table: what is possible, without the verb of the message."""
    return re.sub(r"^(choose one of \(([^)]*)\)|choose |it is )", lambda match: match[2] or "", rule).rstrip(",")


def _changed(values: dict[str, object], plain: dict[str, object]) -> list[str]:
    return [f"`{key}={value!r}`" for key, value in values.items() if value != plain[key]]
