"""What a manifest says, as plain text: coverage of the weights and the plan of the key-value cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvconvert.bundle.allocation import (
    allocation_line,
    sensitivity_rows,
    weight_allocation_line,
    weight_sensitivity_rows,
)
from kvconvert.bundle.manifest import LayerPlan, Manifest, ModuleCoverage
from kvconvert.bundle.picture import plan_picture, wrapped
from kvconvert.cache.size import LayerCache, ModelCache
from kvconvert.io.tensorfile import printable
from kvconvert.methods import spread_ratios
from kvconvert.methods.auto import DEFAULT_CONTEXT


@dataclass(frozen=True)
class KVSize:
    """Size of the cache by arithmetic (`kvconvert.cache.size`), of one sequence of `context` tokens.

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


def kv_size(manifest: Manifest, windows: Sequence[int | None] = ()) -> KVSize | None:
    """Size of the planned layers' cache; None where every layer is left to the model's own cache.

    Args:
        manifest: of a bundle; at as many tokens as its search was for, if there was one.
        windows: the sliding window of each layer, see `kvconvert.models.cache_shapes`; empty for a model without any.
    """
    context = DEFAULT_CONTEXT if manifest.allocation is None else manifest.allocation.context
    layers, only = [], set()
    for layer, scheme in zip(manifest.layers, spread_ratios(manifest.schemes()), strict=True):
        if scheme is not None:
            shape, window = layer.shape(), windows[layer.index] if windows else None
            layers.append(LayerCache(shape.num_key_value_heads, shape.head_dim, shape.head_dim, scheme, window))
            only.add(scheme.only_tokens())
    cache = ModelCache(tuple(layers))
    bits, plain = cache.bits_per_value(context), cache.plain_bytes(context) / context
    return None if bits is None else KVSize(context, bits / 16 * plain, plain, bits, tuple(sorted(only - {None})))


def layer_ranges(layers: Iterable[LayerPlan]) -> list[tuple[str, LayerPlan]]:
    """Consecutive layers with the same plan, as ("0-5", plan of the first)."""

    def plan(layer: LayerPlan) -> str:
        return str(layer.model_copy(update={"index": 0, "statistics": {}}))

    ranges = []
    for _, group in groupby(layers, key=plan):
        members = list(group)
        first, last = members[0].index, members[-1].index
        ranges.append((str(first) if first == last else f"{first}-{last}", members[0]))
    return ranges


def scheme_clauses(layer: LayerPlan) -> list[str]:
    """What to say of one layer's cache."""
    if layer.kv is None:
        return [f"left to the model's own cache{f' ({layer.reason})' if layer.reason else ''}"]
    *others, last = layer.scheme().clauses(layer.shape())
    return [*others, last + (f" ({layer.reason})" if layer.reason else "")]


def describe_scheme(layer: LayerPlan) -> str:
    """One line about one layer's cache."""
    return ", ".join(scheme_clauses(layer))


def cautions(layers: Iterable[LayerPlan]) -> list[str]:
    """What schemes of the plan are known to be poor at, one sentence each."""
    schemes = [layer.scheme() for layer in layers if layer.kv is not None]
    return [*dict.fromkeys(sentence for scheme in schemes for sentence in scheme.cautions())]


def stored_as(module: ModuleCoverage) -> str:
    """How a module is stored, in a few words."""
    if module.method == "kept":
        return "kept"
    return f"{module.method} {module.bits} bit, groups of {module.group_size}"


def coverage_rows(manifest: Manifest) -> list[tuple[str, str, str, str]]:
    """Modules with the same name but for layer and expert, gathered: (name, how many, method, reason)."""
    rows: dict[tuple[str, str, str], int] = {}
    for module in manifest.modules:
        name = ".".join("*" if part.isdecimal() else part for part in module.name.split("."))
        reason = re.sub(r"(?<=\.)\d+(?=\.)", "*", module.reason)  # other modules of the same expert
        key = (name, stored_as(module), reason)
        rows[key] = rows.get(key, 0) + 1
    return [(name, str(count), method, reason) for (name, method, reason), count in rows.items()]


def text_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Columns padded to their widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)


def weights_line(manifest: Manifest) -> str:
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


def kv_line(manifest: Manifest, windows: Sequence[int | None] = ()) -> str:
    """Size of the cache in one sentence; arguments as of `kv_size`."""
    size = kv_size(manifest, windows)
    if size is None:
        return "left to the model's own cache"
    planned = sum(layer.kv is not None for layer in manifest.layers)
    only = " and ".join(size.only_tokens)
    rest = f"; holds for {only} tokens, others stay in full precision" if only else ""
    return (
        f"{planned} of {len(manifest.layers)} layers; {size.bits_per_value:.2f} bits per value at {size.context:,} "
        f"tokens, {size.bytes_per_token:,.1f} bytes per token ({size.plain_bytes_per_token:,.0f} in 16 bits){rest}"
    )


def figure(report: dict[str, Any], name: str) -> Any:
    """A figure of a fidelity report by its dotted name, or None where it was not measured."""
    value: Any = report
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def printable_manifest(manifest: Manifest) -> Manifest:
    """A manifest to be shown: nothing in its texts begins a new line or speaks to the terminal."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            return {clean(key): clean(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [clean(entry) for entry in value]
        return printable(value) if isinstance(value, str) else value

    return Manifest.model_validate(clean(manifest.model_dump(mode="json")))


def manifest_text(manifest: Manifest, unicode: bool = False, windows: Sequence[int | None] = ()) -> str:
    """A manifest for people: origin, weights and their coverage, the cache's plan as a picture and in words, fidelity.

    Args:
        manifest: of a bundle.
        unicode: whether the output has block characters.
        windows: see `kv_size`.
    """
    manifest = printable_manifest(manifest)
    source, data = manifest.source, manifest.data
    lines = [
        f"source    {source.id}{f' at {source.revision}' if source.revision else ''}",
        *([f"stored    as {source.stored_as}"] if source.stored_as else []),
        f"licence   {source.licence or 'not stated'}",
        f"recipe    {manifest.recipe.get('name')}",
        f"format    {manifest.format_version}, written by kvconvert {manifest.kvconvert_version}",
        f"changes   {', '.join(manifest.transforms) or 'none'}",
    ]
    if data is not None:
        images = f" with {data.images} images" if data.images else ""
        lines.append(
            f"data      {data.samples} samples of {data.length} tokens{images}, {data.source}, seed {data.seed}"
        )
    lines += ["", f"Weights: {weights_line(manifest)}"]
    lines.append(text_table(("module", "number", "stored as", "note"), coverage_rows(manifest)))
    if manifest.weight_allocation is not None:
        lines += ["", f"Widths: {weight_allocation_line(manifest.weight_allocation)}"]
        lines.append("KL of the whole model, in 1/1000 nats per token, with these weights alone rounded to nearest:")
        lines.append(text_table(*weight_sensitivity_rows(manifest.weight_allocation)))
    lines += ["", f"Key-value cache: {kv_line(manifest, windows)}"]
    if any(layer.kv is not None for layer in manifest.layers):
        lines += ["", plan_picture(manifest.layers, unicode), ""]
    for layers, plan in layer_ranges(manifest.layers):
        lines += [f"layer{'s' if '-' in layers else ''} {layers}", wrapped(scheme_clauses(plan), "    ")]
    lines += [f"Caution: {sentence}" for sentence in cautions(manifest.layers)]
    if manifest.allocation is not None:
        lines += ["", f"Allocation: {allocation_line(manifest.allocation)}"]
        lines.append(
            "KL of the whole model, in 1/1000 nats per token, with one layer's keys or values alone stored so:"
        )
        lines.append(text_table(*sensitivity_rows(manifest.allocation)))
    lines += ["", f"Fidelity: {_fidelity_line(manifest)}"]
    return "\n".join(lines)


def _fidelity_line(manifest: Manifest) -> str:
    if manifest.fidelity is None:
        return "not measured at export; kvconvert eval measures it"
    kl, fit = (figure(manifest.fidelity.report, name) for name in ("kl.mean", "verdict"))
    said = [f"mean KL {kl:.4g} nats per token"] if isinstance(kl, int | float) else []
    said += manifest.fidelity.missed or ["all limits of the recipe met"]
    said += [fit] if isinstance(fit, str) else []
    return "; ".join(said)
