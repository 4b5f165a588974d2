"""What a manifest says, as plain text: coverage of the weights and the plan of the key-value cache."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from kvconvert.bundle.manifest import LayerPlan, Manifest, ModuleCoverage
from kvconvert.bundle.scheme import KVScheme

PLAIN_BITS = 16  # a bfloat16 or float16 cache, with which sizes are compared


@dataclass(frozen=True)
class KVEstimate:
    """Size of the cache in complete pages, computed from the plan and NOT measured.

    Attributes:
        bytes_per_token: of keys and values, over all layers with a plan; per token of the prompt where only some are
            kept, and per token of the modality where only that is compressed.
        plain_bytes_per_token: the same in 16 bits.
        bits_per_value: average over all stored keys and values, with scales, zero_points and norms.
        modalities: of the layers' schemes, "all" unless only visual or audio tokens are compressed.
    """

    bytes_per_token: float
    plain_bytes_per_token: float
    bits_per_value: float
    modalities: tuple[str, ...] = ("all",)


def estimate_kv(layers: Iterable[LayerPlan]) -> KVEstimate | None:
    """Size of the planned layers' cache by arithmetic; None where every layer is left to the model's own cache."""
    bits = values = 0.0
    modalities = set()
    for layer in layers:
        if layer.kv is not None:
            scheme = KVScheme.from_dict(layer.kv)
            modalities.add(scheme.modality)
            bits += _bits_per_token(layer, scheme)
            values += 2 * (layer.num_key_value_heads or 0) * (layer.head_dim or 0)
    if not values:
        return None
    return KVEstimate(bits / 8, values * PLAIN_BITS / 8, bits / values, tuple(sorted(modalities)))


def _bits_per_token(layer: LayerPlan, scheme: KVScheme) -> float:
    heads, head_dim = layer.num_key_value_heads or 0, layer.head_dim or 0
    if scheme.is_span:  # scales and zero_points are per channel: none per token
        return heads * head_dim * (scheme.key_bits + scheme.value_bits)
    value_group = layer.value_group_size or head_dim
    if scheme.static_scales == "calibrated":
        return heads * head_dim * (scheme.key_bits + scheme.value_bits)
    # Scale and minimum are float16: 32 bits for each group; a norm is one float16 per token, or per token and head.
    bits = heads * head_dim * (scheme.key_bits + (32 / scheme.key_group_size if scheme.key_bits < 16 else 0))
    bits += heads * head_dim * (scheme.value_bits + (32 / value_group if scheme.value_bits < 16 else 0))
    bits += {"none": 0, "joint": 16, "per_head": 16 * heads}[scheme.token_norm]
    # Boosted channels take as many bits again, and a byte each for their number where every page ranks anew.
    index_bits = 8 / scheme.page_size if scheme.boost_select == "dynamic" else 0
    bits += heads * scheme.boosted_for(head_dim) * (scheme.key_bits + index_bits)
    return bits * min(1.0, scheme.heavy_ratio + scheme.recent_ratio) if scheme.evicts else bits


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


def describe_scheme(layer: LayerPlan) -> str:
    """One line about one layer's cache."""
    if layer.kv is None:
        return f"left to the model's own cache{f' ({layer.reason})' if layer.reason else ''}"
    scheme = KVScheme.from_dict(layer.kv)
    if scheme.is_span:
        what = "prompts" if scheme.modality == "all" else f"{scheme.modality} tokens of prompts"
        parts = [f"{what} as spans, keys {scheme.key_bits} bit and values {scheme.value_bits} bit per channel"]
    elif scheme.static_scales == "calibrated":
        parts = [f"keys {scheme.key_bits} bit and values {scheme.value_bits} bit with static scales per channel"]
    else:
        parts = [
            f"keys {scheme.key_bits} bit in groups of {scheme.key_group_size} tokens",
            f"values {scheme.value_bits} bit in groups of {layer.value_group_size} channels",
        ]
    if scheme.boost_fraction:
        channels = f"{scheme.boosted_for(layer.head_dim or 0)} key channels of each head"
        parts.append(f"{channels} at {2 * scheme.key_bits} bit ({scheme.boost_select})")
    if scheme.evicts:
        parts.append(
            f"of the prompt {scheme.heavy_ratio:.3g} kept as heavy hitters and {scheme.recent_ratio:.3g} as its newest"
        )
    if scheme.rotate_keys != "none":
        parts.append(f"keys rotated ({scheme.rotate_keys})")
    if scheme.rotate_values != "none":
        parts.append(f"values rotated ({scheme.rotate_values})")
    if scheme.token_norm != "none":
        parts.append(f"{scheme.token_norm} token norm ({scheme.token_norm_measure})")
    if scheme.sink_tokens:
        parts.append(f"first {scheme.sink_tokens} tokens in full precision")
    for side, recent in (("keys", scheme.key_recent_tokens), ("values", scheme.value_recent_tokens)):
        if recent:
            parts.append(f"{side} of the last {recent} tokens in full precision")
    if scheme.tau1 or scheme.tau2:
        parts.append(f"scores shifted by tau1 = {scheme.tau1:g}, tau2 = {scheme.tau2:g}")
    if (scheme.key_clip_ratio, scheme.value_clip_ratio) != (1, 1):
        parts.append(f"ranges shrunk to {scheme.key_clip_ratio} (keys) and {scheme.value_clip_ratio} (values)")
    return ", ".join(parts) + (f" ({layer.reason})" if layer.reason else "")


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
    return line


def kv_line(manifest: Manifest) -> str:
    """Estimated size of the cache in one sentence that says that it is an estimate."""
    estimate = estimate_kv(manifest.layers)
    if estimate is None:
        return "left to the model's own cache"
    planned = sum(layer.kv is not None for layer in manifest.layers)
    only = [modality for modality in estimate.modalities if modality != "all"]
    rest = f"; holds for {' and '.join(only)} tokens, others stay in full precision" if only else ""
    return (
        f"{planned} of {len(manifest.layers)} layers; estimated from the plan, not measured: "
        f"{estimate.bytes_per_token:,.1f} bytes per token in complete pages, {estimate.bits_per_value:.2f} bits per "
        f"value ({estimate.plain_bytes_per_token:,.0f} bytes in 16 bits){rest}"
    )


def figure(report: dict[str, Any], name: str) -> Any:
    """A figure of a fidelity report by its dotted name, or None where it was not measured."""
    value: Any = report
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def manifest_text(manifest: Manifest) -> str:
    """A manifest for people: origin, weights and their coverage, the cache's plan, fidelity."""
    source, data = manifest.source, manifest.data
    lines = [
        f"source    {source.id}{f' at {source.revision}' if source.revision else ''}",
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
    lines += ["", f"Key-value cache: {kv_line(manifest)}"]
    rows = [(layers, describe_scheme(plan)) for layers, plan in layer_ranges(manifest.layers)]
    lines += [text_table(("layers", "plan"), rows), "", f"Fidelity: {_fidelity_line(manifest)}"]
    return "\n".join(lines)


def _fidelity_line(manifest: Manifest) -> str:
    if manifest.fidelity is None:
        return "not measured at export; kvconvert eval measures it"
    kl = figure(manifest.fidelity.report, "kl.mean")
    verdict = "; ".join(manifest.fidelity.missed) or "all limits of the recipe met"
    return f"mean KL {kl:.4g} nats per token; {verdict}" if isinstance(kl, int | float) else verdict
