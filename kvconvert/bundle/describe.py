"""A bundle in words and tables: described once, rendered as text, Markdown (the card) and HTML (a report)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvconvert.bundle.figures import figure, number, text
from kvconvert.bundle.manifest import Allocation, LayerPlan, Manifest, ModuleCoverage, WeightAllocation
from kvconvert.bundle.statements import compare
from kvconvert.cache import LayerCache, ModelCache
from kvconvert.errors import counted, printable
from kvconvert.io.records import DataInfo, Record
from kvconvert.methods import spread_ratios
from kvconvert.methods.auto import stated_context
from kvconvert.tables import beside, text_table


@dataclass(frozen=True)
class Table:
    """Cells as texts, a row as long as the header."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Description:
    """A bundle for people; nothing in its texts begins a new line or speaks to a terminal.

    Attributes:
        manifest: that is described, printable.
        facts: where it comes from, as (name, value).
        weights: their size in one sentence.
        modules: coverage of the weights.
        size: of the cache; None where every layer is left to the model's own.
        cache: the same in one sentence.
        layers: clauses about the cache of consecutive layers, as ("0-5", clauses). Where plans differ, what they have
            in common comes first, as ("all", clauses), or ("all planned", clauses) if some layers have no plan.
        cautions: what the plan's schemes are known to be poor at, one sentence each.
        widths, allocation: what a search of the weights' widths, or of the cache's schemes, measured and chose: the
            outcome in one sentence, and its measurements; None without a search.
    """

    manifest: Manifest
    facts: Sequence[tuple[str, str]]
    weights: str
    modules: Table
    size: KVSize | None
    cache: str
    layers: Sequence[tuple[str, Sequence[str]]]
    cautions: Sequence[str]
    widths: tuple[str, Table] | None
    allocation: tuple[str, Table] | None


def describe(manifest: Manifest, windows: Sequence[int | None] = (), positions: int | None = None) -> Description:
    """Describe a bundle.

    Args:
        manifest: the bundle's manifest.
        windows, positions: see `kv_size`.
    """
    manifest = printable_manifest(manifest)
    size, widths, allocation = kv_size(manifest, windows, positions), manifest.weight_allocation, manifest.allocation
    return Description(
        manifest=manifest,
        facts=_facts(manifest),
        weights=_weights_line(manifest),
        modules=coverage(manifest),
        size=size,
        cache=_cache_line(manifest, size),
        layers=_layers(manifest.layers),
        cautions=_cautions(manifest.layers),
        widths=None if widths is None else (_weight_allocation_line(widths), _weight_sensitivity(widths)),
        allocation=None if allocation is None else (_allocation_line(allocation), _sensitivity(allocation)),
    )


def _facts(manifest: Manifest) -> list[tuple[str, str]]:
    source, data = manifest.source, manifest.data
    facts = [("source", f"{source.id}{f' at {source.revision}' if source.revision else ''}")]
    facts += [("stored as", source.stored_as)] if source.stored_as else []
    facts += [
        ("license", (source.licence or "not stated") + (f", {source.licence_name}" if source.licence_name else "")),
        ("recipe", str(manifest.recipe.get("name"))),
        ("format", f"{manifest.format_version}, written by kvconvert {manifest.kvconvert_version}"),
        ("changes", ", ".join(manifest.transforms) or "none"),
    ]
    if data is not None:
        facts.append(("data", f"{data_size(data)}, {data_text(data.source)}, seed {data.seed}"))
    return facts


_WEIGHT, _RANDOM = re.compile(r"=([\d.e+-]+)$"), " of them random tokens"


def data_sources(source: str) -> list[str]:
    """The sources that the manifest's text about calibration data names, without their weights."""
    return [_WEIGHT.sub("", part) for part in source.split(", ") if not part.endswith(_RANDOM)]


def data_size(data: DataInfo) -> str:
    """Samples, tokens, and images."""
    images = f" with {counted(data.images, 'image')}" if data.images else ""
    return f"{counted(data.samples, 'sample')} of {data.length:,} tokens{images}"


def data_text(source: str) -> str:
    """The same text for people: equal weights of several sources are left out."""
    parts = source.split(", ")
    weights = {found[1] for part in parts if (found := _WEIGHT.search(part))}
    named = parts if len(weights) > 1 else [_WEIGHT.sub("", part) for part in parts]
    return ", ".join(part.replace(_RANDOM, " of the samples random tokens") for part in named)


@dataclass(frozen=True)
class KVSize:
    """Size of the cache by arithmetic (`kvconvert.cache`), of one sequence of `context` tokens.

    Attributes:
        context: tokens.
        bytes_per_token: of keys and values, over all layers with a plan.
        plain_bytes_per_token: the same in 16 bits.
        bits_per_value: average over all keys and values, with everything stored beside them.
        only_tokens: kinds of tokens that alone are compressed ("visual"), of which the sequence then consists; empty
            where all are.
    """

    context: int
    bytes_per_token: float
    plain_bytes_per_token: float
    bits_per_value: float
    only_tokens: tuple[str, ...] = ()


def kv_size(manifest: Manifest, windows: Sequence[int | None] = (), positions: int | None = None) -> KVSize | None:
    """Size of the planned layers' cache; None where every layer is left to the model's own cache.

    Args:
        manifest: a bundle's manifest; at as many tokens as its search was for, if there was one.
        windows: the sliding window of each layer, see `kvconvert.models.configuration`; empty for a model without any.
        positions: over which the model may attend; None for any number.
    """
    context = stated_context(positions) if manifest.allocation is None else manifest.allocation.context
    only = {t for scheme in manifest.schemes() if scheme is not None and (t := scheme.only_tokens()) is not None}
    cache = kv_cache(manifest, windows)
    bits, plain = cache.bits_per_value(context), cache.plain_bytes(context) / context
    return None if bits is None else KVSize(context, bits / 16 * plain, plain, bits, tuple(sorted(only)))


def smaller(size: KVSize) -> str:
    """How much smaller than in 16 bits, as "5.1x"."""
    return f"{size.plain_bytes_per_token / size.bytes_per_token:.1f}x"


def kv_cache(manifest: Manifest, windows: Sequence[int | None] = ()) -> ModelCache:
    """The cache of the planned layers; arguments are those of `kv_size`."""
    return _cache_of([layer.index for layer in manifest.layers], manifest, windows)


def check_cache_size(manifest: Manifest, windows: Sequence[int | None]) -> None:
    """Compare the size of the cache that a search states with that of the schemes.

    Args:
        manifest: one that `check_statements` has accepted.
        windows: the sliding window of each layer.

    Raises:
        BundleError: naming the field.
    """
    if (found := manifest.allocation) is not None:
        cache = _cache_of([own.index for own in found.layers], manifest, windows)
        bits = cache.bits_per_value(found.context) or 0.0
        plain = cache.plain_bytes(found.context) / found.context
        compare(
            [
                ("allocation.bits_per_value", bits, found.bits_per_value),
                ("allocation.bytes_per_token", bits / 16 * plain, found.bytes_per_token),
            ]
        )


def _cache_of(indices: Collection[int], manifest: Manifest, windows: Sequence[int | None]) -> ModelCache:
    layers: list[LayerCache] = []
    for layer, scheme in zip(manifest.layers, spread_ratios(manifest.schemes()), strict=True):
        if scheme is not None and layer.index in indices:
            shape, window = layer.shape(), windows[layer.index] if windows else None
            layers.append(LayerCache(*shape.sizes, scheme, window))
    return ModelCache(tuple(layers))


def _ranges(layers: Iterable[LayerPlan]) -> list[tuple[str, LayerPlan]]:
    """Consecutive layers with the same plan, as ("0-5", plan of the first)."""

    def plan(layer: LayerPlan) -> str:
        return str(layer.model_copy(update={"index": 0, "statistics": {}}))

    ranges = []
    for _, group in groupby(layers, key=plan):
        members = list(group)
        ranges.append((index_range([layer.index for layer in members]), members[0]))
    return ranges


def _layers(layers: Sequence[LayerPlan]) -> list[tuple[str, list[str]]]:
    """What to say of the layers' cache, said once where they have it in common."""
    ranges = [(name, plan.kv is not None, _clauses(plan)) for name, plan in _ranges(layers)]
    planned = [clauses for _, has_plan, clauses in ranges if has_plan]
    shared = [clause for clause in planned[0] if all(clause in clauses for clauses in planned)] if planned[1:] else []
    if not shared:
        return [(name, clauses) for name, _, clauses in ranges]
    rest = [
        (name, [clause for clause in clauses if not plan or clause not in shared]) for name, plan, clauses in ranges
    ]
    everywhere = "all" if len(planned) == len(ranges) else "all planned"
    return [(everywhere, shared), *((name, clauses) for name, clauses in rest if clauses)]


def _clauses(layer: LayerPlan) -> list[str]:
    """Clauses that describe one layer's cache."""
    scheme = layer.scheme()
    if scheme is None:
        return [f"left to the model's own cache{f' ({layer.reason})' if layer.reason else ''}"]
    *others, last = scheme.clauses(layer.shape())
    return [*others, last + (f" ({layer.reason})" if layer.reason else "")]


def index_range(members: Sequence[int]) -> str:
    """The first and the last of consecutive numbers."""
    return str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}"


def _cautions(layers: Iterable[LayerPlan]) -> list[str]:
    """Known weaknesses of the plan's schemes, one sentence each."""
    schemes = [scheme for layer in layers if (scheme := layer.scheme()) is not None]
    return [*dict.fromkeys(sentence for scheme in schemes for sentence in scheme.cautions())]


def _stored_as(module: ModuleCoverage) -> str:
    """How a module is stored, in a few words."""
    if module.method == "kept":
        return "kept"
    return f"{module.bits}-bit {module.method}, groups of {module.group_size}"


def coverage(manifest: Manifest) -> Table:
    """Modules with the same name but for layer and expert, gathered."""
    rows: dict[tuple[str, str, str], int] = {}
    for module in manifest.modules:
        name = ".".join("*" if part.isdecimal() else part for part in module.name.split("."))
        reason = re.sub(r"(?<=\.)\d+(?=\.)", "*", module.reason)  # other modules of the same expert
        key = (name, _stored_as(module), reason)
        rows[key] = rows.get(key, 0) + 1
    gathered = [(name, str(count), method, reason) for (name, method, reason), count in rows.items()]
    return Table(("module", "number", "stored as", "note"), gathered)


def _weights_line(manifest: Manifest) -> str:
    """Size of the weights in one sentence."""
    weights = manifest.weights
    line = f"{weights.bytes:,} bytes for {weights.parameters:,} parameters, {weights.bits_per_weight:.2f} bits each"
    if weights.quantized_bits_per_weight is not None:
        line += (
            f"; {weights.quantized_parameters:,} of them in quantized Linears at "
            f"{weights.quantized_bits_per_weight:.2f} bits"
        )
    kept = [found for layer in manifest.layers if (found := figure(layer.statistics, "awq.kept")) is not None]
    if kept:
        line += f"; AWQ's scales kept in {kept.count('scales and clips')} of {len(kept)} layers"
    return line


def _cache_line(manifest: Manifest, size: KVSize | None) -> str:
    """Size of the cache in one sentence."""
    if size is None:
        return "left to the model's own cache"
    planned = sum(layer.kv is not None for layer in manifest.layers)
    only = " and ".join(size.only_tokens)
    rest = f"; holds for {only} tokens, others stay in full precision" if only else ""
    return (
        f"{planned} of {counted(len(manifest.layers), 'layer')}; {size.bits_per_value:.2f} bits per value "
        f"at {size.context:,} "
        f"tokens, {size.bytes_per_token:,.1f} bytes per token ({size.plain_bytes_per_token:,.0f} in 16 bits){rest}"
    )


def printable_manifest(manifest: Manifest) -> Manifest:
    """A manifest to be shown: nothing in its texts begins a new line or speaks to the terminal."""

    def clean(value: Any) -> Any:
        if isinstance(value, Record):  # its limits are those of what was read, and escapes are longer
            return value.model_copy(update={name: clean(getattr(value, name)) for name in type(value).model_fields})
        if isinstance(value, dict):
            return {clean(key): clean(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [clean(entry) for entry in value]
        return printable(value) if isinstance(value, str) else value

    cleaned: Manifest = clean(manifest)
    return cleaned


def _allocation_line(found: Allocation) -> str:
    """The budget and the outcome in one sentence."""
    size = (
        f"{found.bits_per_value:.3f} bits per value at {found.context:,} tokens, {found.bytes_per_token:,.1f} bytes "
        f"per token of {found.budget_bytes_per_token:,.1f} allowed"
    )
    return f"{size}; {_divergence(found, 'for the whole plan', f'{found.plans} plans')}"


def _sensitivity(found: Allocation) -> Table:
    """Divergences in 1/1000 nats, chosen ones with a star: a row for each layer."""
    names = [name for name in found.candidates if any(name in layer.kl for layer in found.layers)]
    rows = []
    for layer in found.layers:
        cells = [_cell(layer.kl.get(name), name in (layer.keys, layer.values)) for name in names]
        rows.append((str(layer.index), *cells))
    return Table(("layer", *names), rows)


def _weight_allocation_line(found: WeightAllocation) -> str:
    """The budget of the weights and the outcome in one sentence."""
    size = f"{found.bits_per_weight:.3f} bits per weight of {found.budget_bits_per_weight:g} allowed"
    return f"{size}; {_divergence(found, 'with all weights rounded so', f'{found.allocations} allocations')}"


def _weight_sensitivity(found: WeightAllocation) -> Table:
    """Divergences in 1/1000 nats, the chosen one with a star: a row for each unit."""
    widths = sorted({bits for unit in found.units for bits in unit.kl}, key=int)
    rows = []
    for unit in found.units:
        names = ", ".join(name.rpartition(".")[2] for name in unit.linears[:4]) + (", ..." if unit.linears[4:] else "")
        rows.append((str(unit.layer), names, *(_cell(unit.kl.get(b), b == str(unit.bits)) for b in widths)))
    return Table(("layer", "Linears", *(f"{bits} bits" for bits in widths)), rows)


def _divergence(found: Allocation | WeightAllocation, of: str, tried: str) -> str:
    """Measured and predicted divergence, and the text."""
    text = found.data
    return (
        f"KL {found.measured_kl:.3g} measured {of}, {found.predicted_kl:.3g} as the sum of its parts ({tried} "
        f"measured, {text.samples} x {text.length:,} tokens of {text.source}, {found.dtype})"
    )


def _cell(kl: float | None, chosen: bool) -> str:
    shown = "-" if kl is None else "0" if kl == 0 else f"{1000 * kl:.3g}"
    return f"{shown}*" if chosen else shown


FULL_BITS = 16
BLOCK, PLAIN_BLOCK = "\u2588", "#"
LINE_CHARACTERS = 100
NAME_WIDTH = 11  # of facts


def manifest_text(
    manifest: Manifest, unicode: bool = False, windows: Sequence[int | None] = (), positions: int | None = None
) -> str:
    """A manifest for people: origin, weights and their coverage, the cache's plan as a picture and in words, fidelity.

    Args:
        manifest: a bundle's manifest.
        unicode: whether the output has block characters.
        windows, positions: see `kvconvert.bundle.describe.kv_size`.
    """
    found = describe(manifest, windows, positions)
    lines = [
        _fact_lines(found.facts),
        "",
        f"Weights: {found.weights}",
        text_table(found.modules.header, found.modules.rows),
    ]
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


def summary(manifest: Manifest, windows: Sequence[int | None] = (), positions: int | None = None) -> str:
    """The same in about ten lines: consecutive layers differ in little but clip ratios.

    Args:
        manifest: a bundle's manifest.
        windows, positions: see `kvconvert.bundle.describe.kv_size`.
    """
    found = describe(manifest, windows, positions)
    facts = [*found.facts, ("weights", found.weights), ("cache", found.cache)]
    kinds = Counter(both for layer in found.manifest.layers if (both := _bits(layer)) is not None)
    if kinds:
        widths = [f"{count} with {k}-bit keys and {v}-bit values" for (k, v), count in kinds.most_common()]
        facts.append(("layers", "; ".join(widths[:4]) + ("; ..." if widths[4:] else "")))
    facts += [("caution", sentence) for sentence in found.cautions]
    facts += [("fidelity", _fidelity_line(found.manifest)), ("more", "--layers shows every module and layer")]
    return _fact_lines(facts)


def _fact_lines(facts: Iterable[tuple[str, str]]) -> str:
    return "\n".join(beside(f"{name:<{NAME_WIDTH}}", value) for name, value in facts)


def _fidelity_line(manifest: Manifest) -> str:
    if manifest.fidelity is None:
        return "not measured at export; kvconvert eval measures it"
    kl, fit = number(manifest.fidelity.report, "kl.mean"), text(manifest.fidelity.report, "verdict")
    said = [] if kl is None else [f"mean KL {kl:.4g} nats per token"]
    said += [f"limit missed: {sentence}" for sentence in manifest.fidelity.missed]
    if manifest.fidelity.limits and not manifest.fidelity.missed:
        said.append("all limits of the recipe met")
    said += [fit] if fit else []
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
