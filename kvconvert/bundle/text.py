"""A bundle's description as plain text, with the plan of the cache as a picture: a row of blocks for each layer's keys
and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvconvert.bundle.describe import describe, index_range
from kvconvert.bundle.manifest import LayerPlan, Manifest, figure
from kvconvert.tables import text_table

FULL_BITS = 16
BLOCK, PLAIN_BLOCK = "\u2588", "#"
LINE_CHARACTERS = 100
NAME_WIDTH = 11  # of facts


def manifest_text(manifest: Manifest, unicode: bool = False, windows: Sequence[int | None] = ()) -> str:
    """A manifest for people: origin, weights and their coverage, the cache's plan as a picture and in words, fidelity.

    Args:
        manifest: of a bundle.
        unicode: whether the output has block characters.
        windows: see `kvconvert.bundle.describe.kv_size`.
    """
    found = describe(manifest, windows)
    lines = [_facts(found.facts), "", f"Weights: {found.weights}", text_table(found.modules.header, found.modules.rows)]
    if found.widths is not None:
        line, table = found.widths
        lines += ["", f"Widths: {line}"]
        lines.append("KL of the whole model, in 1/1000 nats per token, with these weights alone rounded to nearest:")
        lines.append(text_table(table.header, table.rows))
    lines += ["", f"Key-value cache: {found.cache}"]
    if found.size is not None:
        lines += ["", plan_picture(found.manifest.layers, unicode), ""]
    for layers, clauses in found.layers:
        name = f"{layers} layers" if layers.startswith("all") else f"layer{'s' if '-' in layers else ''} {layers}"
        lines += [name, wrapped(clauses, "    ")]
    lines += [f"Caution: {sentence}" for sentence in found.cautions]
    if found.allocation is not None:
        line, table = found.allocation
        lines += ["", f"Allocation: {line}"]
        lines.append(
            "KL of the whole model, in 1/1000 nats per token, with one layer's keys or values alone stored so:"
        )
        lines.append(text_table(table.header, table.rows))
    lines += ["", f"Fidelity: {_fidelity_line(found.manifest)}"]
    return "\n".join(lines)


def summary(manifest: Manifest, windows: Sequence[int | None] = ()) -> str:
    """The same in about ten lines: consecutive layers differ in little but clip ratios.

    Args:
        manifest: of a bundle.
        windows: see `kvconvert.bundle.describe.kv_size`.
    """
    found = describe(manifest, windows)
    facts = [*found.facts, ("weights", found.weights), ("cache", found.cache)]
    kinds = Counter(both for layer in found.manifest.layers if (both := _bits(layer)) is not None)
    if kinds:
        widths = [f"{count} with keys at {k} bit and values at {v} bit" for (k, v), count in kinds.most_common()]
        facts.append(("layers", "; ".join(widths[:4]) + ("; ..." if widths[4:] else "")))
    facts += [("caution", sentence) for sentence in found.cautions]
    facts += [("fidelity", _fidelity_line(found.manifest)), ("more", "--layers shows every module and layer")]
    return _facts(facts)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<{NAME_WIDTH}}{value}" for name, value in facts)


def _fidelity_line(manifest: Manifest) -> str:
    if manifest.fidelity is None:
        return "not measured at export; kvconvert eval measures it"
    kl, fit = (figure(manifest.fidelity.report, name) for name in ("kl.mean", "verdict"))
    said = [f"mean KL {kl:.4g} nats per token"] if isinstance(kl, int | float) else []
    said += manifest.fidelity.missed or ["all limits of the recipe met"]
    said += [fit] if isinstance(fit, str) else []
    return "; ".join(said)


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
        keys, values = ("own cache", "") if both is None else (f"{block * n} {n}" for n in both)
        rows.append((index_range(members), keys.ljust(width + 3), values.ljust(width + 3)))
    column = max(len(row[0]) for row in rows)
    return "\n".join(f"{name.ljust(column)}  {keys}  {values}".rstrip() for name, keys, values in rows)


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
