"""Whether a bundle's tensors fit the model that transformers builds from its config.json.

The model has no weights yet (meta device), so this takes no memory of the model's size, and no weight is used before.
"""

from __future__ import annotations

from torch import nn
from transformers import AutoConfig, PretrainedConfig

from kvconvert.bundle.manifest import MANIFEST_NAME, LayerPlan
from kvconvert.bundle.reader import Bundle
from kvconvert.errors import BundleError
from kvconvert.io.tensorfile import mismatch

# Every layer has a tensor, so a config with more layers than the bundle has tensors is wrong. Small models leave out
# towers that their config describes.
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "depth", "encoder_layers", "decoder_layers")
_SPARE_LAYERS = 1000
_MAX_LABELS = 1_000_000


def read_config(bundle: Bundle) -> PretrainedConfig:
    """transformers' configuration of a verified bundle; BundleError where its config.json makes none."""
    _check_counts(bundle)
    try:
        return AutoConfig.from_pretrained(bundle.directory, trust_remote_code=False)
    except Exception as error:  # classes of configs validate with exceptions of many kinds
        raise no_model(error) from error


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


def _check_counts(bundle: Bundle) -> None:
    """Refuse counts for which building a model would take for ever."""
    limit = max(_SPARE_LAYERS, len(bundle.manifest.tensors))
    for path, key, value in _integers(bundle.config):
        most = limit if key in _LAYERS else _MAX_LABELS if key == "num_labels" else None
        if most is not None and value > most:
            raise mismatch("config.json", path, f"at most {most}", value)


def _integers(value: object, path: str = "") -> list[tuple[str, str, int]]:
    found = []
    for key, entry in value.items() if isinstance(value, dict) else ():
        where = f"{path}.{key}" if path else key
        found += [(where, key, entry)] if isinstance(entry, int | float) else _integers(entry, where)
    return found


def _misfit(tensor: str, expected: list[int], found: object) -> BundleError:
    return BundleError(
        f"config.json does not fit the bundle's weights: {tensor} should stand for a matrix or vector {expected} in "
        f"the model that it describes, found {found}; the file is damaged or was changed, so fetch or export the "
        "bundle again."
    )


def no_model(error: Exception) -> BundleError:
    """The error for a config.json from which transformers builds nothing."""
    reason = " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
    return BundleError(
        f"config.json describes no model that this version of transformers builds without other code ({reason}); "
        "update transformers, or fetch or export the bundle again."
    )
