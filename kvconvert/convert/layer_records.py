"""What a working directory says of a layer: its converted tensors, their coverage, and its cache's scheme."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.calibration.protocol import LayerJob, LayerWork
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.convert.layer_runner import PackedLinear
from kvconvert.convert.work_records import LayerRecord
from kvconvert.errors import NumericError
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight, pack_bits, quantize_weight
from kvconvert.kernels.quantizer import GroupRangeError
from kvconvert.kernels.rotate import hadamard_kind
from kvconvert.methods import KVScheme
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.experts import expert_modules


def resolved_fields(scheme: KVScheme | None, channels: int, kv_heads: int) -> dict[str, Any]:
    """Fields of a `LayerRecord` that describe the scheme."""
    if scheme is None:
        return {"scheme": None}
    return {
        "scheme": scheme.to_dict(),
        "head_dim": channels,
        "num_key_value_heads": kv_heads,
        "value_group_size": scheme.value_group_for(channels),
        "rotation": hadamard_kind(channels) if scheme.rotates else None,
    }


def untouched_record(job: LayerJob) -> LayerRecord:
    """A layer of an architecture without adapter: weights stay in the source, only the cache is described."""
    reason, searched = job.reason, job.search.searched(job.scheme)
    if job.scheme is not None and searched:
        note = f"{', '.join(searched)} are the scheme's own, for no adapter describes this architecture's layers"
        reason = "; ".join(filter(None, (reason, note)))
    return LayerRecord(
        index=job.index, modules=[], reason=reason, **resolved_fields(job.scheme, job.head_dim, job.heads)
    )


def converted_tensors(
    work: LayerWork,
    dtypes: dict[str, torch.dtype],
    weights: WeightsRecipe,
    kept: Mapping[str, PackedLinear],
    keep: Callable[[Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The layer's tensors under the model's names, Linears packed unless the recipe keeps weights.

    Those of `kept` are the source's own codes. Everything else is stored in the source's dtype: exactly the source's
    bytes where no pass changed it. `keep` puts packed tensors elsewhere than in memory.
    """
    tensors = {}
    keep = keep or (lambda tensor: tensor)
    # The source's own form of experts is copied, which may be a fused one.
    copied = expert_modules(work.layer) if not weights.quantizes else ()
    for name, parameter in work.layer.state_dict().items():
        if name.startswith(copied):
            continue
        module, _, kind = name.rpartition(".")
        # The layer may own a tensor itself (Gemma 4's layer_scalar).
        full = f"{work.name}.{module}".rstrip(".")
        if kind == "weight" and module in kept:
            packed = kept[module].weight
            if not torch.equal(parameter, dequantize_weight(packed).to(parameter.device)):
                raise ValueError(f"a pass has changed {full}, whose codes are the source's")
            tensors.update({f"{full}.{field}": value for field, value in packed._asdict().items()})
        elif weights.quantizes and kind == "weight" and module in work.structure.linears:
            try:
                grid = work.grids.get(module)
                packed = (
                    quantize_weight(parameter, work.bits[module], weights.group_size)
                    if grid is None
                    else _pack(parameter, grid)
                )
            except GroupRangeError as error:
                raise NumericError(f"{full} cannot be quantized: {error}") from error
            tensors.update({f"{full}.{field}": keep(value.cpu()) for field, value in packed._asdict().items()})
        else:
            tensors[f"{full}.{kind}"] = parameter.to(dtypes[name]).cpu()
    return tensors


def _pack(weight: Tensor, grid: WeightGrid) -> AwqWeight:
    """A weight that consists of a grid's values, as it is stored."""
    return AwqWeight(
        qweight=pack_bits(grid.codes(weight).T, grid.bits),
        qzeros=pack_bits(grid.zero.T.to(torch.uint8), grid.bits),
        scales=grid.scale.T.to(torch.float16).contiguous(),
    )


def layer_coverage(
    work: LayerWork, weights: WeightsRecipe, reasons: dict[str, str], kept: Mapping[str, PackedLinear]
) -> list[ModuleCoverage]:
    """What became of every module of a layer that has parameters; `reasons` are the passes', by Linear."""
    copied = expert_modules(work.layer) if not weights.quantizes else ()
    coverage = [
        ModuleCoverage(
            name=f"{work.name}.{name}".rstrip("."), kind="other", method="kept", reason="the recipe keeps weights"
        )
        for name in copied
    ]
    for name, module in work.layer.named_modules():
        if name.startswith(copied) or not any(True for _ in module.parameters(recurse=False)):
            continue
        full, linear = f"{work.name}.{name}".rstrip("."), name in work.structure.linears
        if name in kept:
            packing = kept[name].packing
            coverage.append(
                ModuleCoverage(
                    name=full,
                    method=packing.method,
                    bits=packing.bits,
                    group_size=packing.group_size,
                    reason="quantized in the source, whose codes are kept",
                )
            )
        elif linear and weights.quantizes:
            coverage.append(
                ModuleCoverage(
                    name=full,
                    method=weights.method,
                    bits=work.bits[name],
                    group_size=weights.group_size,
                    reason=reasons.get(name, ""),
                )
            )
        else:
            reason = work.structure.unquantized.get(name, "norms and other vectors keep the source's dtype")
            reason = "the recipe keeps weights" if linear else reason
            # A router is a matrix for engines too, which have to be told that it is not quantized.
            matrix = name in work.structure.unquantized and getattr(module, "weight", None) is not None
            kind = "linear" if matrix else module_kind(module)
            coverage.append(ModuleCoverage(name=full, kind=kind, method="kept", reason=reason))
    return coverage


def module_kind(module: nn.Module) -> str:
    """A module in the words of `ModuleCoverage.kind`."""
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "norm" if "norm" in type(module).__name__.lower() else "other"
