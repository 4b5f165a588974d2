"""What makes `from_pretrained` load bundles.

config.json says `quant_method: awq`, plus a key `kvconvert`. Where all quantized weights have 4 bits any AWQ engine
reads them; else the AWQ version is one that transformers alone refuses, and names what to import.
Importing the runtime replaces transformers' "awq" configuration class by a dispatcher: dictionaries with that key
become a `BundleConfig`, whose quantizer is registered under our own name; all others go to the stock class, untouched.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import AwqConfig, PretrainedConfig, PreTrainedModel
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from kvconvert.bundle.describe import check_cache_size
from kvconvert.bundle.files import own_files
from kvconvert.bundle.hub import upload
from kvconvert.bundle.locate import MANIFEST_NAME, fetch_repository
from kvconvert.bundle.manifest import LayerPlan
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.bundle.writer import copy_file, replacing
from kvconvert.errors import BundleError, UsageError, did_you_mean
from kvconvert.io.tensorheader import mismatch
from kvconvert.kernels.linear import DenseLinear, QuantizedLinear
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import bounded_modules, model_class, no_model, read_config, sliding_windows
from kvconvert.runtime.hf.attention import NAME
from kvconvert.runtime.hf.fuse import fuse_on_gpus
from kvconvert.runtime.hf.fused_modules import SeparateExperts, merges_experts, place_packed_experts
from kvconvert.runtime.hf.generation import adopt


class SavedAsBundle:
    """Mixed into the class of every model that is loaded from a bundle."""

    bundle_directory: Path

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        """Refuse (BundleError) parameters without a tensor, which transformers makes up at random with a warning.

        Tensors without a place are left to its warning, for checkpoints may hold layers that models do not load (MTP).
        """
        super()._adjust_missing_and_unexpected_keys(loading_info)
        require_complete(self.bundle_directory, loading_info.missing_keys)

    def save_pretrained(self, save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
        """Copy the verified bundle that this model was loaded from, tokenizer and KV plan included.

        What was changed in the model since it was loaded is not saved. An adapter of PEFT that was added is saved by
        transformers, alone, as for any other model.

        Args:
            save_directory: a new or empty directory, or one with a bundle, which is replaced.
            is_main_process: save nothing in other processes.
            options: of transformers; none of them is possible with a bundle.

        Raises:
            UsageError: an option, or a directory with something else in it.
            BundleError: the bundle's directory changed or is gone.
        """
        if getattr(self, "_hf_peft_config_loaded", False):
            return super().save_pretrained(save_directory, is_main_process=is_main_process, **options)
        given = [name for name, value in options.items() if value not in (None, False)]
        if given:
            raise UsageError(
                f"save_pretrained({given[0]}=...) is not possible with a bundle, whose files are copied as they are; "
                f"leave it out{', and use `kvconvert push`' if given[0] == 'push_to_hub' else ''}."
            )
        target = Path(save_directory)
        if not is_main_process or (os.path.exists(target) and target.samefile(self.bundle_directory)):
            return None
        bundle = open_bundle(self.bundle_directory)
        with replacing(target, force=True) as directory:
            for name in sorted(own_files(bundle.manifest) & {*bundle.files.names}):
                copied = copy_file(bundle.directory / name, directory / name)
                if name in bundle.manifest.files and copied != bundle.manifest.files[name]:
                    raise BundleError(f"{name} of {bundle.directory} changed while it was copied; save again.")
        return None

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, revision: str | None = None, **options: Any
    ) -> str:
        """Upload the verified bundle that this model was loaded from, as `kvconvert push` does; returns the commit.

        Raises:
            UsageError: another option of transformers, or see `kvconvert.bundle.hub.upload`.
            BundleError, HubError: the bundle does not verify, or the Hub refuses; see there.
        """
        given = [name for name, value in options.items() if value not in (None, False)]
        if given:
            raise UsageError(
                f"push_to_hub({given[0]}=...) is not possible with a bundle; leave it out, or use `kvconvert push`."
            )
        return upload(open_bundle(self.bundle_directory), repo_id, private=bool(private), revision=revision)


def save_as_bundle(model: PreTrainedModel, directory: Path) -> None:
    """Let a model be loaded from the bundle in `directory` as a whole, and be saved as that bundle."""
    base = type(model)
    model.bundle_directory = directory
    members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    # Of this class, what is loaded or made anew is a model of transformers' until it is given a bundle of its own.
    members |= {"from_pretrained": base.from_pretrained, "_from_config": base._from_config}
    model.__class__ = type(base.__name__, (SavedAsBundle, base), members)


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


METHOD = "kvconvert"
KEY = "kvconvert"
Verify = Literal["full", "headers"]


class BundleConfig(QuantizationConfigMixin):
    """The `quantization_config` of a bundle.

    Args:
        values: exactly what config.json says; `to_dict` writes it back.
        verify: how thoroughly the bundle is verified when it is loaded, see `kvconvert.runtime.load`.
        verified: the bundle, if that was done already.

    Attributes:
        kv_schemes: each layer's KV scheme, known once the manifest is read.
    """

    def __init__(self, values: dict[str, Any], verify: Verify = "full", verified: Bundle | None = None):
        self.quant_method = METHOD
        self.values, self.verify, self.verified = values, verify, verified
        self.kv_schemes: tuple[KVScheme | None, ...] = ()

    def get(self, name: str, default: Any = None) -> Any:
        """An entry of config.json: transformers reads a model config's `quantization_config` like a dictionary."""
        return self.values.get(name, default)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """From config.json's dictionary."""
        config = cls(copy.deepcopy(config_dict))
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """What config.json says."""
        return copy.deepcopy(self.values)


class AwqDispatch(AwqConfig):
    """The entry "awq" of transformers' registry: bundles become a `BundleConfig`, all others an `AwqConfig`."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """The configuration object for this dictionary."""
        target = BundleConfig if KEY in config_dict else AwqConfig
        return target.from_dict(config_dict, return_unused_kwargs=return_unused_kwargs, **kwargs)


WHOLE = (
    "Every process loads a bundle whole, and `tp_plan` or `distributed_config` would divide it; leave them out, or "
    "serve the bundle on several GPUs with the vLLM plugin (docs/vllm.md)."
)


class BundleQuantizer(HfQuantizer):
    """Verifies the bundle, places packed Linears according to its manifest, and gives the model its KV plan."""

    requires_calibration = True

    def update_attn_implementation(self, config: PretrainedConfig) -> PretrainedConfig:
        """Called before the model is built from `config`: what is known by then is verified by then."""
        if getattr(config, "distributed_config", None) is not None:
            raise UsageError(WHOLE)
        directory = Path(config._name_or_path)
        if self.quantization_config.verified is None and (directory / MANIFEST_NAME).is_file():
            self.quantization_config.verified = open_bundle(directory, verify=self.quantization_config.verify)
        _check_attention(config, self.quantization_config.verified)
        return config

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        directory = _directory(model, kwargs["checkpoint_files"])
        bundle, self.quantization_config.verified = self.quantization_config.verified, None
        if bundle is None or not directory.samefile(bundle.directory):
            bundle = open_bundle(directory, verify=self.quantization_config.verify)
        compare_shapes(bundle, model)
        self.files = bundle.files
        self.directory = bundle.directory.absolute()
        self.schemes, self.plan = bundle.manifest.schemes(), bundle.plan
        self.seal = bundle.manifest.manifest_sha256
        self.quantization_config.kv_schemes = tuple(self.schemes)
        # The model was built from a copy of the config, made before the plan was known.
        model.config.quantization_config = self.quantization_config
        place_packed_linears(model, bundle)
        save_as_bundle(model, self.directory)
        _check_device_map(model, kwargs.get("device_map"))

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        self.files.check_unchanged()
        place_dense_linears(model)
        fuse_on_gpus(model)
        adopt(model, self.schemes, self.plan)
        model.kv_seal = self.seal
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: PreTrainedModel) -> list[Any]:
        """Transformers' conversions without those that would fuse the tensors of separate experts."""
        if not any(isinstance(module, SeparateExperts) for module in model.modules()):
            return weight_conversions
        return [entry for entry in weight_conversions if not merges_experts(entry)]

    def is_serializable(self) -> bool:
        """A loaded bundle is saved by copying its files."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Packed weights have no gradients."""
        return False


def _check_attention(config: PretrainedConfig, bundle: Bundle | None) -> None:
    """Refuse the argument `attn_implementation`: a bundle's KV plan is served by its own attention alone."""
    asked = getattr(config, "_attn_implementation", None)
    if bundle is None or asked in (None, NAME) or not any(bundle.manifest.schemes()):
        return
    if asked not in (bundle.config.get(key) for key in ("attn_implementation", "_attn_implementation")):
        raise UsageError(
            f"attn_implementation={asked!r} is not possible with a bundle's low-bit cache, which has an attention of "
            'its own; leave it out, or generate with cache_implementation="dynamic" for a full-precision cache.'
        )


def _check_device_map(model: PreTrainedModel, device_map: Any) -> None:
    """Refuse a dict that names what the model does not have, or leaves a part of it without a device (UsageError)."""
    if not isinstance(device_map, dict):
        return
    parameters = [name for name, _ in model.named_parameters()]
    known = {*parameters, *(name for name, _ in model.named_modules())}
    for name in device_map:
        if name not in known:
            outermost = [child for child, _ in model.named_children()]
            raise UsageError(
                f"`device_map` names {name!r:.80}, which is no module of the model; "
                f"{did_you_mean(str(name), outermost, known)}"
            )
    for name in parameters:
        if not any(not place or name == place or name.startswith(f"{place}.") for place in device_map):
            raise UsageError(
                f"`device_map` gives {name} no device; name a module that it is in, or '' for the whole model."
            )


def place_packed_linears(model: PreTrainedModel, bundle: Bundle) -> None:
    """Replace, on the meta device, each Linear and each expert that the manifest calls quantized.

    Raises:
        BundleError: the model has no such Linear, or experts of its own that the manifest does not cover.
    """
    quantized = {module.name: module for module in bundle.manifest.modules if module.method != "kept"}
    place_packed_experts(model, bundle.manifest.modules)
    for name, module in quantized.items():
        try:
            linear = model.get_submodule(name)
        except AttributeError:
            linear = None
        if isinstance(linear, QuantizedLinear):
            continue
        if not isinstance(linear, torch.nn.Linear):
            raise BundleError(
                f"{MANIFEST_NAME} says that {name} is quantized, but {type(model).__name__} has no Linear of that "
                "name; load it as the class that config.json names, unless the bundle belongs to another version of "
                "transformers."
            )
        with torch.device("meta"):
            packed = QuantizedLinear(
                linear.in_features,
                linear.out_features,
                module.group_size,
                bias=linear.bias is not None,
                bits=module.bits,
            )
        model.set_submodule(name, packed)


def place_dense_linears(model: PreTrainedModel) -> None:
    """Replace each unquantized Linear on a CPU by one that is no slower there in 16 bits than in float32."""
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and module.weight.device.type == "cpu":
            model.set_submodule(name, DenseLinear.of(module))


def _directory(model: PreTrainedModel, checkpoint_files: list[str]) -> Path:
    """The bundle's directory; of a repository on the Hub, first fetch the files that from_pretrained did not."""
    directory = Path(checkpoint_files[0]).parent
    if (directory / MANIFEST_NAME).exists() or Path(model.config._name_or_path).exists():
        return directory
    return fetch_repository(model.config._name_or_path, revision=getattr(model.config, "_commit_hash", None))


def register() -> None:
    """Make bundles known to `from_pretrained`."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = BundleConfig
    auto.AUTO_QUANTIZER_MAPPING[METHOD] = BundleQuantizer
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING["awq"] = AwqDispatch


def require_complete(bundle: str | Path, absent: Iterable[str]) -> None:
    """Refuse (BundleError) a model with parameters that no tensor of the bundle stands for."""
    if names := sorted(absent):
        more = f" and {len(names) - 1} more tensors" if names[1:] else ""
        raise BundleError(
            f"The bundle {bundle} lacks {names[0]}{more}, which the model needs; load it as the class that config.json "
            "names, or export it again."
        )


def check_fits(bundle: Bundle, complete: bool = False) -> int:
    """Build the bundle's model without weights and compare every module with its tensors.

    Args:
        bundle: an open bundle.
        complete: also refuse parameters that the bundle lacks; of models whose tensors have the names of parameters.

    Returns:
        how many tensors were compared.

    Raises:
        BundleError: config.json makes no model, or one that other tensors belong to.
    """
    config = read_config(bundle.directory, bundle.config)
    del config.quantization_config
    try:
        with torch.device("meta"), bounded_modules(len(bundle.manifest.tensors)):
            model = model_class(config).from_config(config)
    except BundleError:
        raise
    except Exception as error:  # models are built by code of many authors
        raise no_model(error) from error
    compared = compare_shapes(bundle, model)
    check_cache_size(bundle.manifest, sliding_windows(config))
    if complete:
        packed = {f"{module.name}.weight" for module in bundle.manifest.modules if module.method != "kept"}
        parameters = {name for name, _ in model.named_parameters()}  # of tied ones the first alone
        require_complete(bundle.directory, parameters - packed - bundle.manifest.tensors.keys())
    place_packed_linears(model, bundle)  # refuses what the manifest calls quantized and the model does not have
    return compared
