"""Whether a bundle's tensors fit the model that transformers builds from its config.json.

The model has no weights yet (meta device), so this takes no memory of the model's size, and no weight is used before.
"""

from __future__ import annotations

from torch import nn

from kvconvert.bundle.manifest import MANIFEST_NAME, LayerPlan
from kvconvert.bundle.reader import Bundle
from kvconvert.errors import BundleError
from kvconvert.io.tensorfile import mismatch


def compare_shapes(bundle: Bundle, model: nn.Module) -> int:
    """Compare a bundle's tensors with the modules of a model that was built from its config.json.

    Modules that the model builds otherwise (experts in one parameter) are left to their own checks.

    Returns:
        how many tensors were compared.

    Raises:
        BundleError: a shape that differs.
    """
    tensors, compared = bundle.manifest.tensors, 0
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for module in bundle.manifest.modules:
        if module.method != "kept":
            linear = own.get(f"{module.name}.weight")
            if linear is None or linear.dim() != 2:
                continue
            expected, found = list(linear.shape), [module.out_features, module.in_features]
            if expected != found:
                raise _misfit(f"{module.prefix}.qweight", expected, found)
            compared += 1
            continue
        for part in ("weight", "bias"):
            stored, parameter = tensors.get(f"{module.prefix}.{part}"), own.get(f"{module.name}.{part}")
            if stored is None or parameter is None:
                continue
            if list(parameter.shape) != stored.shape:
                raise _misfit(f"{module.prefix}.{part}", list(parameter.shape), stored.shape)
            compared += 1
    for module in model.modules():
        _compare_heads(module, bundle.manifest.layers)
    return compared


def _compare_heads(module: nn.Module, layers: list[LayerPlan]) -> None:
    """Compare an attention module with the plan of its layer, where both say what its keys look like."""
    index, head_dim = getattr(module, "layer_idx", None), getattr(module, "head_dim", None)
    keys = getattr(module, "k_proj", None)
    if type(index) is not int or type(head_dim) is not int or not isinstance(keys, nn.Linear) or index >= len(layers):
        return
    layer = layers[index]
    if layer.kv is None or keys.out_features % head_dim:
        return
    expected, found = (head_dim, keys.out_features // head_dim), (layer.head_dim, layer.num_key_value_heads)
    if expected != found:
        raise mismatch(MANIFEST_NAME, f"layers[{index}]: head_dim, num_key_value_heads", expected, found)


def _misfit(tensor: str, expected: list[int], found: object) -> BundleError:
    return BundleError(
        f"config.json does not fit the bundle's weights: {tensor} should stand for a matrix or vector {expected} in "
        f"the model that it describes, found {found}; the file is damaged or was changed, so fetch or export the "
        "bundle again."
    )
