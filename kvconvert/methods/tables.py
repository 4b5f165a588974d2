"""The tables of docs/bundle.md and docs/methods.md, made from the methods themselves.

python -m kvconvert.methods.tables    writes them in place; a test compares
"""

from __future__ import annotations

import re
from pathlib import Path

from kvconvert.methods.scheme import FIELDS, PARTS, PLAN_TENSORS, PRESETS, KVCalibration, KVScheme, preset_calibration

DOCUMENTS = {"docs/bundle.md": ("scheme fields", "plan tensors"), "docs/methods.md": ("methods", "presets")}


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join([_row(*header), f"|{'---|' * len(header)}", *(_row(*row) for row in rows)])


def _value(value: object) -> str:
    return "none" if value is None else f"`{value}`"


def _possible(rule: str) -> str:
    """A rule as the cell of a table: what is possible, without the verb of the message."""
    return re.sub(r"^(choose one of \(([^)]*)\)|choose |it is )", lambda match: match[2] or "", rule).rstrip(",")


def scheme_fields() -> str:
    """Every field of a scheme."""
    rows = [
        (f"`{field.name}`", field.method, _value(field.default), _possible(field.rule), field.meaning)
        for field in FIELDS.values()
    ]
    return _table(("field", "method", "default", "possible", "meaning"), rows)


def plan_tensors() -> str:
    """Every tensor that a KV plan may hold for a layer."""
    return _table(
        ("tensor", "method", "content"),
        [(f"`{name}`", part.method, PLAN_TENSORS[name]) for part in PARTS for name in part.plan_tensors],
    )


def methods() -> str:
    """Every method, with its fields."""
    return _table(
        ("method", "what it does", "source", "fields"),
        [
            (part.method, part.summary, part.source, ", ".join(f"`{name}`" for name in part.__pydantic_fields__))
            for part in PARTS
        ],
    )


def presets() -> str:
    """Every preset, with the fields in which it differs from a plain scheme, and what calibration is not asked for."""
    plain, everything = KVScheme().to_dict(), KVCalibration().to_dict()
    owners = {name: part for part in PARTS for name in (*part.presets, *part.paper_presets)}
    rows = []
    for name, scheme in PRESETS.items():
        changed = _changed(scheme.to_dict(), plain) + _changed(preset_calibration(name).to_dict(), everything)
        rows.append((f"`{name}`", owners[name].method, ", ".join(changed) or "the defaults"))
    return _table(("preset", "method", "differs from the defaults in"), rows)


def _changed(values: dict[str, object], plain: dict[str, object]) -> list[str]:
    return [f"`{key} = {value!r}`" for key, value in values.items() if value != plain[key]]


MAKERS = {"scheme fields": scheme_fields, "plan tensors": plan_tensors, "methods": methods, "presets": presets}


def with_tables(text: str, names: tuple[str, ...]) -> str:
    """A document with its tables made anew, each between two comments that name it."""
    for name in names:
        begin, end = f"<!-- {name}: written by kvconvert.methods.tables -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        _, found, tail = rest.partition(end)
        if not found:
            raise ValueError(f"the document has no place for the table {name!r}")
        text = f"{head}{begin}\n{MAKERS[name]()}\n{end}{tail}"
    return text


def main() -> None:
    """Write the tables into the documents of the working tree."""
    for file, names in DOCUMENTS.items():
        path = Path(file)
        path.write_text(with_tables(path.read_text(encoding="utf-8"), names), encoding="utf-8")


if __name__ == "__main__":
    main()
