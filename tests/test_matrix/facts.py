"""What the matrix finds out about an architecture, as data: models.json keeps it, docs/models.md shows it."""

from __future__ import annotations

import re
from typing import Any

from tiny.models import ARCHITECTURES, TinyModel
from tiny.structures import REFUSED_WEIGHTS, architecture_of

from kvconvert.bundle.manifest import Manifest
from kvconvert.errors import UnsupportedModelError
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import layer_types_of, pages_unsupported

# Limits of the figures below; where they come from is said in test_kv.py and test_weights.py.
LIMITS = {"error": 0.02, "padding_error": 0.02, "preserved": 1e-4, "loaded": 1e-3, "generated": 0.02}


def identity(entry: TinyModel) -> dict[str, Any]:
    """Model type, class, features and modality."""
    model = entry.build()
    return {
        "model_type": entry.model_type,
        "architecture": type(model).__name__,
        "features": sorted(entry.features - {"vision", "audio"}),
        "supports_images": "vision" in entry.features,
        "supports_audio": "audio" in entry.features,
    }


def cache_facts(entry: TinyModel) -> dict[str, Any]:
    """Layer types that have pages, and why others keep their own cache; or the reason of a refusal."""
    config = entry.config()
    scheme = KVScheme.preset("default")
    unsupported_reasons = {kind: pages_unsupported(config, kind, scheme) for kind in layer_types_of(config)[0]}
    if all(unsupported_reasons.values()):
        return {"refused": next(iter(unsupported_reasons.values()))}
    pages = sorted(kind for kind, reason in unsupported_reasons.items() if reason is None)
    return {"pages": pages, "own": {kind: reason for kind, reason in sorted(unsupported_reasons.items()) if reason}}


def refused_weights(entry: TinyModel) -> dict[str, Any] | None:
    """The reason of a refusal, or None where weights are converted."""
    try:
        architecture_of(entry.config())
    except UnsupportedModelError:
        return {"refused": REFUSED_WEIGHTS[next(name for name, tiny in ARCHITECTURES.items() if tiny is entry)]}
    return None


def weight_facts(entry: TinyModel, manifest: Manifest) -> dict[str, Any]:
    """What became of the Linears of a bundle's decoder layers.

    Returns:
        "quantized": their names, without numbers; "kept": reasons by name; "skipped": reasons by scaling pair;
        "folded": whether some layer's weights carry the values' rotation; "not_folded": why others' do not.

    Raises:
        ValueError: a reason of the architecture's structure that the bundle's coverage does not repeat.
    """
    config = entry.config()
    architecture = architecture_of(config)
    reasons = " ".join(module.reason for module in manifest.modules)
    quantized: dict[str, None] = {}
    kept: dict[str, str] = {}
    for module in manifest.modules:
        name = re.sub(r"\.\d+\.", ".*.", module.name.removeprefix(f"{architecture.layers}."))
        name = re.sub(r"^\d+\.", "", name)
        if module.method != "kept":
            quantized[name] = None
        elif module.name.startswith(f"{architecture.layers}.") and module.kind == "linear":
            kept[name] = module.reason
    skipped: dict[str, str] = {}
    for structure in architecture.structures:
        pairs = [
            (f"{group.norm or 'input'} → {_short(group.readers)}", group.unsupported_reason)
            for group in structure.norm_groups
        ]
        pairs += [(f"{_short([p.up.linear])} → {_short([p.down])}", p.unsupported_reason) for p in structure.pairs]
        value = _short([structure.value.linear]) if structure.value else "values"
        pairs.append((f"{value} → {_short([structure.output])}", structure.value_scaling_unsupported_reason))
        skipped |= {pair: reason for pair, reason in pairs if reason}
    lost = [reason for reason in skipped.values() if reason not in reasons]
    if lost:
        raise ValueError(f"the coverage does not say: {lost[0]}")
    folds = {layer.kv["rotate_values"] for layer in manifest.layers if layer.kv}
    not_folded = [re.search(r"values are rotated [\w ]+: (.*)", layer.reason) for layer in manifest.layers]
    return {
        "quantized": list(quantized),
        "kept": kept,
        "skipped": skipped,
        "folded": "folded" in folds,
        "not_folded": sorted({found[1] for found in not_folded if found}),
    }


def _short(names: Any) -> str:
    names = [re.sub(r"\.\d+\.", ".*.", name) for name in names]
    return ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
