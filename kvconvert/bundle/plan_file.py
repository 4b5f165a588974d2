"""The file of a bundle's KV plan: its header against the manifest, and the tensors that layers' schemes need."""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from kvconvert.bundle.manifest import PLAN_NAME, LayerPlan, Manifest
from kvconvert.bundle.weight_files import compare, is_finite, read_tensors, words
from kvconvert.errors import BundleError
from kvconvert.io.tensorfile import mismatch, read_header, tensor_info
from kvconvert.methods import PLAN_TENSORS


def check_plan_header(directory: Path, manifest: Manifest) -> None:
    """Names, types and shapes of the plan's tensors are those in the manifest (BundleError)."""

    def refuse(_: str, field: str, expected: object, found: object) -> BundleError:
        return mismatch(PLAN_NAME, field, expected, found)

    compare(PLAN_NAME, manifest.plan, read_header(directory / PLAN_NAME, refuse))


def read_plan(directory: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of the KV plan by name, finite, with all that the layers' schemes need.

    Raises:
        BundleError: naming the tensor.
    """
    plan: dict[str, Tensor] = {}
    for name, tensor in read_tensors(dict.fromkeys(manifest.plan, directory / PLAN_NAME), list(manifest.plan)):
        match = re.fullmatch(r"layers\.(\d+)\.(\w+)", name)
        if match is None or int(match[1]) >= len(manifest.layers):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"a name layers.0 to layers.{len(manifest.layers) - 1}", name)
        if match[2] not in PLAN_TENSORS:
            raise mismatch(PLAN_NAME, f"tensor {name}", f"one of {', '.join(PLAN_TENSORS)}", match[2])
        if tensor.is_floating_point() and not is_finite(tensor):
            raise mismatch(PLAN_NAME, f"tensor {name}", "finite values", "NaN or infinity")
        plan[name] = tensor
    for layer in manifest.layers:
        _check_required(layer, plan)
    return plan


def _check_required(layer: LayerPlan, plan: dict[str, Tensor]) -> None:
    """The tensors without which the layer's scheme cannot be served."""
    scheme = layer.scheme()
    wanted = {} if scheme is None else scheme.required_tensors(layer.shape())
    for what, rule in wanted.items():
        name = f"layers.{layer.index}.{what}"
        if name not in plan:
            raise mismatch(PLAN_NAME, f"tensor {name}", f"present ({rule.why})", "missing")
        info = tensor_info(plan[name])
        if (info.dtype, tuple(info.shape)) != (rule.dtype, rule.shape):
            raise mismatch(PLAN_NAME, f"tensor {name}", f"{rule.dtype} {[*rule.shape]}", words(info))
        values = plan[name].tolist()
        expected = None if rule.fault is None else rule.fault(values)
        if expected is not None:
            raise mismatch(PLAN_NAME, f"tensor {name}", expected, repr(values)[:80])
