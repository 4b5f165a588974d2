"""Weights of bundles as methods of vLLM's: those of 4 bits through its own kernels and ours, others through ours."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.auto_awq import AutoAWQConfig, AutoAWQMarlinLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from kvconvert.bundle.manifest import ModuleCoverage
from kvconvert.errors import BundleError
from kvconvert.kernels.linear import QuantizedLinear, packed_product, unsupported
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.kernels.linear.packed_layout import PackedWeight, pack_weight
from kvconvert.vllm.bundle import is_bundle, served_bundle

# Up to so many rows kvconvert's kernels are faster than vLLM's; benchmarks/KERNELS.md.
FEW_ROWS = 16
# Weights are kept in a second layout for them if they take no larger share of a GPU's memory.
LARGEST_SHARE = 1 / 8


@register_quantization_config("kvconvert")
class BundleWeights(QuantizationConfig):
    """The weights of a bundle, each Linear as the manifest says.

    Attributes:
        directory: of the bundle, once vLLM has told it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.directory = ""

    def get_name(self) -> str:
        """As registered."""
        return "kvconvert"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Those of the cache."""
        return [torch.float16, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Ampere."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: it is in config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BundleWeights:
        """From a config.json's quantization_config, which says less than the manifest."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take what is a bundle's and no AWQ checkpoint."""
        ours = is_bundle({"quantization_config": hf_quant_cfg}) and hf_quant_cfg.get("version") != "gemm"
        return "kvconvert" if ours else None

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Where the bundle lies."""
        self.directory = model_name

    @cached_property
    def _modules(self) -> dict[str, ModuleCoverage]:
        return {module.name: module for module in served_bundle(self.directory).bundle.manifest.modules}

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a module is stored.

        Raises:
            BundleError: parts of it are quantized and others are not, or it is no Linear.
        """
        parent, _, name = prefix.rpartition(".")
        names = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(name, [name])]
        found = [self._modules.get(full) for full in names]
        parts = [module for module in found if module is not None and module.method != "kept"]
        if not parts:
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if len(parts) < len(found) or not isinstance(layer, LinearBase):
            raise BundleError(
                f"Of {prefix} this bundle quantizes {', '.join(module.name for module in parts)}, which vLLM does not "
                "take apart from the rest; use `kvconvert serve`."
            )
        return BundleLinearMethod(prefix, parts)


# The Linears of each module of vLLM's, by its name, for the operator that torch.compile sees.
_linears: dict[str, list[QuantizedLinear]] = {}


@torch.library.custom_op("kvconvert_vllm::quantized_linears", mutates_args=())
def quantized_linears(x: Tensor, name: str, outputs: int) -> Tensor:
    """The outputs of a module's Linears side by side: [..., in] to [..., outputs]."""
    parts = [linear(x) for linear in _linears[name]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@quantized_linears.register_fake
def _(x: Tensor, name: str, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


class BundleLinearMethod(LinearMethodBase):
    """Linears whose weights stay packed, those that vLLM has merged beside each other.

    Args:
        prefix: of the module.
        parts: of the manifest, in the order of the outputs.
    """

    def __init__(self, prefix: str, parts: list[ModuleCoverage]):
        self.prefix, self.parts = prefix, parts

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Make room for the stored tensors, which are loaded into the Linears themselves."""
        linears = [QuantizedLinear(m.in_features, m.out_features, m.group_size, bits=m.bits) for m in self.parts]
        _linears[self.prefix] = linears

        def load(name: str) -> Any:
            def weight_loader(param: Parameter, loaded: Tensor, shard: str | int | None = None) -> None:
                number = {"q": 0, "k": 1, "v": 2, None: 0}.get(shard, shard)
                getattr(linears[number], name).copy_(loaded)

            return weight_loader

        for name in ("qweight", "qzeros", "scales"):
            # Only a name, under which vLLM finds the loader.
            parameter = Parameter(torch.empty(0), requires_grad=False)
            parameter.weight_loader = load(name)
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] to [..., out]."""
        y = quantized_linears(x, self.prefix, sum(m.out_features for m in self.parts))
        return y if bias is None else y + bias


@register_quantization_config("kvconvert_awq")
class BundleAwqWeights(AutoAWQConfig):
    """The weights of a bundle that is an AWQ checkpoint, on a GPU.

    Attributes:
        directory: of the bundle, once vLLM has told it.
    """

    directory = ""

    @classmethod
    def get_name(cls) -> str:
        """As registered."""
        return "kvconvert_awq"

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take bundles where vLLM's kernels for such weights and ours both run, unless the user says otherwise."""
        ours = is_bundle({"quantization_config": hf_quant_cfg}) and hf_quant_cfg.get("version") == "gemm"
        asked = user_quant == cls.get_name() or (user_quant is None and current_platform.is_cuda())
        return cls.get_name() if ours and asked else None

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Where the bundle lies, and what vLLM reads there."""
        super().maybe_update_config(model_name, *args, **kwargs)
        self.directory = model_name

    @cached_property
    def _has_room(self) -> bool:
        """Whether a second layout of all weights is a small part of the GPU's memory."""
        modules = served_bundle(self.directory).bundle.manifest.modules
        weights = sum(m.in_features * m.out_features for m in modules if m.method != "kept")
        each = weights * self.weight_bits // 8 // get_tensor_model_parallel_world_size()
        return each <= LARGEST_SHARE * current_platform.get_device_total_memory()

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """vLLM's, with our kernels beside them for few rows."""
        method = super().get_quant_method(layer, prefix)
        # Activations that vLLM quantizes, too, are left to its kernels.
        if type(method) is AutoAWQMarlinLinearMethod and method.input_dtype is None:
            return FewRowsLinearMethod(self, self._has_room)
        return method


# Weights in our layout, and the methods and modules that they are of, by the address of their lanes: an operator's
# argument by which layers are told apart without making torch.compile compile each of them.
_packed: dict[int, tuple[PackedWeight, FewRowsLinearMethod, torch.nn.Module]] = {}


def _awq_linear(x: Tensor, lanes: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    weight, method, layer = _packed[lanes.data_ptr()]
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > FEW_ROWS:
        return method.kernel.apply_weights(layer, x, bias)
    y = packed_product(rows, weight)
    # vLLM's kernel has the other one in an order of its own.
    y = y if bias is None else y + layer.few_rows_bias
    return y.view(*x.shape[:-1], outputs)


def _awq_linear_shape(x: Tensor, lanes: Tensor, bias: Tensor | None, outputs: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], outputs)


direct_register_custom_op("kvconvert_awq_linear", _awq_linear, fake_impl=_awq_linear_shape)


def rehearse_products() -> None:
    """Launch our kernels for every number of rows that they serve, once for all weights of the same shape."""
    found = {(w.inputs, w.outputs, w.group_size): (w, method.dtype) for w, method, _ in _packed.values()}
    for weight, dtype in found.values():
        for rows in range(1, FEW_ROWS + 1):
            packed_product(torch.zeros(rows, weight.inputs, dtype=dtype, device=weight.lanes.device), weight)


class FewRowsLinearMethod(AutoAWQMarlinLinearMethod):
    """vLLM's way with 4-bit weights, and for up to `FEW_ROWS` rows ours, with a copy of the weights if there is room.

    Args:
        config: of all weights.
        has_room: whether to keep a copy.
    """

    def __init__(self, config: BundleAwqWeights, has_room: bool):
        super().__init__(config)
        self.has_room = has_room

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """As vLLM's, with scales as they are stored until they are loaded, so that it need not warn of their dtype."""
        sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)
        self.dtype, layer.scales.data = params_dtype, layer.scales.data.half()

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Make both layouts."""
        layer.scales.data = layer.scales.data.to(self.dtype)
        # The same numbers in both.
        stored = AwqWeight(layer.qweight.data, layer.qzeros.data, layer.scales.data.half())
        # No parameter: some of vLLM's kernels replace all that a layer has.
        layer.register_buffer("few_rows", None, persistent=False)
        reason = unsupported(stored.scales.device, self.dtype, len(stored.qweight) // len(stored.scales))
        if self.has_room and reason is None:
            weight = pack_weight(stored)
            layer.few_rows, layer.few_rows_outputs = weight.lanes, weight.outputs
            layer.few_rows_bias = None if getattr(layer, "bias", None) is None else layer.bias.data.clone()
            _packed[layer.few_rows.data_ptr()] = weight, self, layer
        super().process_weights_after_loading(layer)

    def apply(self, layer: torch.nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[..., in] to [..., out]."""
        if layer.few_rows is None:
            return super().apply(layer, x, bias)
        return torch.ops.vllm.kvconvert_awq_linear(x, layer.few_rows, bias, layer.few_rows_outputs)
