"""The plan of the key-value cache as a picture for a terminal: a row of blocks for each layer's keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvconvert.bundle.manifest import LayerPlan

FULL_BITS = 16
BLOCK, PLAIN_BLOCK = "\u2588", "#"
LINE_CHARACTERS = 100


def plan_picture(layers: Iterable[LayerPlan], unicode: bool) -> str:
    """Bits of stored keys and values, a block for each bit; consecutive layers that look the same share a row.

    Args:
        layers: plans of all layers.
        unicode: whether the output has block characters; number signs stand for them otherwise.
    """
    block = BLOCK if unicode else PLAIN_BLOCK
    bits = [(layer.index, _bits(layer)) for layer in layers]
    width = max((n for _, both in bits for n in both or (FULL_BITS,)), default=1)
    rows = [("layers", "keys".ljust(width + 3), "values")]
    for both, group in groupby(bits, key=lambda entry: entry[1]):
        members = [index for index, _ in group]
        if both is None:
            bars = ("own cache".ljust(width + 3), "")
        else:
            bars = tuple(f"{block * n} {n}".ljust(width + 3) for n in both)
        rows.append((index_range(members), *bars))
    column = max(len(row[0]) for row in rows)
    return "\n".join(f"{name.ljust(column)}  {keys}  {values}".rstrip() for name, keys, values in rows)


def index_range(members: Sequence[int]) -> str:
    """The first and the last of consecutive numbers."""
    return str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def _bits(layer: LayerPlan) -> tuple[int, int] | None:
    """Width of the codes of keys and of values; None where the model's own cache holds them."""
    scheme = layer.scheme()
    return None if scheme is None else (scheme.keys.bits, scheme.values.bits)


def wrapped(clauses: Iterable[str], indent: str) -> str:
    """Clauses joined by commas, on lines of `LINE_CHARACTERS` that end between two of them."""
    lines = [""]
    for clause in clauses:
        longer = f"{lines[-1]}, {clause}" if lines[-1] else clause
        if lines[-1] and len(indent + longer) > LINE_CHARACTERS:
            lines[-1] += ","
            lines.append(clause)
        else:
            lines[-1] = longer
    return "\n".join(indent + line for line in lines)
