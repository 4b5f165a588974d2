"""Checks of those fields of a manifest that follow from the bundle itself: each is computed again and compared.

The headers of the weight files say how large they are, schemes and head sizes how keys and values are rotated, the
chosen candidates of a search what it predicts, a report which limits are missed. Where a bundle comes from, what it was
calibrated on, and what was measured cannot be computed again: `source`, `recipe`, `data`, `versions`, `statistics`,
`reason`, and divergences are their author's word.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, cast

from kvconvert.bundle.figures import missed_limits, number
from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import EARLIER_NAMES, Manifest, ModuleCoverage, WeightsInfo, widths
from kvconvert.cache import rotation_kinds
from kvconvert.errors import UsageError
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorheader import mismatch, nbytes
from kvconvert.methods.awq import StoredMethod

_PARTS = ("qweight", "qzeros", "scales")
# Divergences are recorded with six digits.
_RELATIVE = 1e-4
# A field's place, what it has to be, and what it is.
Statement = tuple[str, Any, Any]


def weights_info(modules: Collection[ModuleCoverage], tensors: Mapping[str, TensorInfo]) -> WeightsInfo:
    """The size of weights, from the types and shapes of their tensors.

    Args:
        modules: coverage, whose quantized modules have `in_features` and `out_features`.
        tensors: all of the weight files, by name.
    """
    quantized = {module.prefix: module for module in modules if module.method != "kept"}
    total = packed = parameters = 0
    for name, info in tensors.items():
        total += nbytes(info)
        module, _, part = name.rpartition(".")
        if module in quantized and part in _PARTS:
            packed += nbytes(info)
        else:
            parameters += math.prod(info.shape)
    quantized_parameters = sum((module.in_features or 0) * (module.out_features or 0) for module in quantized.values())
    parameters += quantized_parameters
    # All of them agree, but for their widths: they are one recipe's or one source's.
    first, stored = next(iter(quantized.values()), None), widths([*modules])
    return WeightsInfo.model_construct(  # a manifest whose files were not looked at may state tensors of any size
        method="none" if first is None else cast(StoredMethod, first.method),
        bits=stored[0] if len(stored) == 1 else None,
        group_size=None if first is None else first.group_size,
        bytes=total,
        parameters=parameters,
        bits_per_weight=8 * total / parameters if parameters else 0.0,
        quantized_bytes=packed,
        quantized_parameters=quantized_parameters,
        quantized_bits_per_weight=8 * packed / quantized_parameters if quantized_parameters else None,
    )


def check_statements(manifest: Manifest) -> None:
    """Compare what a manifest says with what follows from its tensors and schemes.

    Args:
        manifest: its `tensors` are those of the files, and its modules and schemes were checked.

    Raises:
        BundleError: naming the field.
    """
    for statements in (_weights, _modules, _layers, _allocation, _weight_allocation, _fidelity):
        compare(statements(manifest))


def compare(statements: Iterable[Statement]) -> None:
    """Refuse (BundleError) the first statement of a manifest that is not what it has to be."""
    for field, expected, found in statements:
        measures = isinstance(expected, float) and isinstance(found, float)
        if not (math.isclose(expected, found, rel_tol=_RELATIVE) if measures else expected == found):
            raise mismatch(MANIFEST_NAME, field, expected, found)


def _weights(manifest: Manifest) -> Iterator[Statement]:
    computed = weights_info(manifest.modules, manifest.tensors)
    for name in WeightsInfo.model_fields:
        yield f"weights.{name}", getattr(computed, name), getattr(manifest.weights, name)


def _modules(manifest: Manifest) -> Iterator[Statement]:
    for module in manifest.modules:
        if module.method == "kept":
            weight = manifest.tensors.get(f"{module.prefix}.weight")
            said = [module.out_features, module.in_features]
            shape = said if said == [None, None] else None if weight is None else weight.shape
            yield f"modules: {module.name}: out_features and in_features", shape, said
            yield f"modules: {module.name}: bits and group_size", [None, None], [module.bits, module.group_size]


def _layers(manifest: Manifest) -> Iterator[Statement]:
    matrices: dict[str, str | None] = {}
    for layer, scheme in zip(manifest.layers, manifest.schemes(), strict=True):
        where, keys, values = f"layers[{layer.index}]", layer.head_dim, layer.value_head_dim
        if scheme is None:
            for name in ("head_dim", "value_head_dim", "num_key_value_heads"):
                yield f"{where}.{name}", None, getattr(layer, name)
            group = None
            kinds: tuple[str | None, str | None] = None, None
        else:
            keys = keys or 0
            group = scheme.value_group_for(values or keys)
            try:
                kinds = rotation_kinds(scheme, keys, values or keys)
            except UsageError as error:
                raise mismatch(MANIFEST_NAME, f"{where}.kv", "a scheme for its head size", error) from error
            matrices |= {str(dim): kind for dim, kind in zip((keys, values), kinds, strict=True) if kind}
            missing = set(scheme.transforms()) - set(manifest.transforms)
            yield "transforms", [*manifest.transforms, *sorted(missing)], manifest.transforms
        yield f"{where}.value_group_size", group, layer.value_group_size
        yield f"{where}.rotation", kinds[0], layer.rotation
        yield f"{where}.value_rotation", kinds[1], layer.value_rotation
    rotation = manifest.conventions.get("rotation")
    if isinstance(rotation, dict) and "matrix" in rotation:
        yield "conventions.rotation.matrix", matrices, rotation["matrix"]


def _allocation(manifest: Manifest) -> Iterator[Statement]:
    if (found := manifest.allocation) is None:
        return
    schemes, predicted = manifest.schemes(), 0.0
    for place, own in enumerate(found.layers):
        where = f"allocation.layers[{place}]"
        scheme = schemes[own.index] if own.index < len(schemes) else None
        yield f"{where}.index", True, scheme is not None and own.index not in [o.index for o in found.layers[:place]]
        for side in (own.keys, own.values):
            yield f"{where}: the candidate {side}", True, side in found.candidates and side in own.kl
            predicted += own.kl[side]
        stated = found.candidates[own.keys] | found.candidates[own.values] | own.treatments.get(own.keys, {})
        fields = {} if scheme is None else scheme.to_dict()
        yield f"{where}: its candidates", {name: fields.get(name, "no field") for name in stated}, stated
    yield "allocation.predicted_kl", predicted, found.predicted_kl
    most = found.budget_bytes_per_token
    yield "allocation.bytes_per_token", min(most, found.bytes_per_token), found.bytes_per_token


def _weight_allocation(manifest: Manifest) -> Iterator[Statement]:
    if (found := manifest.weight_allocation) is None:
        return
    modules = {module.name: module for module in manifest.modules if module.method != "kept"}
    chosen: dict[str, int] = {}
    predicted = 0.0
    for place, unit in enumerate(found.units):
        where = f"weight_allocation.units[{place}]"
        own = [modules[name].bits if name in modules and name not in chosen else None for name in {*unit.linears}]
        yield f"{where}: bits of its Linears", [unit.bits] * len(unit.linears), own
        yield f"{where}.kl: {unit.bits} bits", True, str(unit.bits) in unit.kl
        predicted += unit.kl[str(unit.bits)]
        chosen |= dict.fromkeys(unit.linears, unit.bits)
    found_modules = [modules[name] for name in chosen]
    names = {f"{module.prefix}.{part}" for module in found_modules for part in _PARTS}
    size = weights_info(found_modules, {name: info for name, info in manifest.tensors.items() if name in names})
    yield "weight_allocation.bits_per_weight", size.bits_per_weight, found.bits_per_weight
    yield "weight_allocation.predicted_kl", predicted, found.predicted_kl
    least = min(found.budget_bits_per_weight, found.bits_per_weight)
    yield "weight_allocation.bits_per_weight", least, found.bits_per_weight


def _fidelity(manifest: Manifest) -> Iterator[Statement]:
    if (found := manifest.fidelity) is None:
        return
    recorded = manifest.recipe.get("limits")
    limits = (
        {EARLIER_NAMES.get(name, name): bound for name, bound in recorded.items()} if isinstance(recorded, dict) else {}
    )
    yield "fidelity.limits", {name: bound for name, bound in limits.items() if bound is not None}, found.limits
    missed = missed_limits(found.limits, found.report)
    yield "fidelity.missed", missed if len(missed) != len(found.missed) else found.missed, found.missed
    if (size := number(found.report, "weights.bytes")) is not None:
        yield "fidelity.report.weights.bytes", manifest.weights.bytes, size
