"""Weights of bundles that are no AWQ checkpoint, as a quantization method of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from kvconvert.vllm.bundle import is_bundle


@register_quantization_config("kvconvert")
class BundleWeights(QuantizationConfig):
    """Weights of a bundle that declares no AWQ checkpoint."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config

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
        """From a config.json's quantization_config."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Take what is a bundle's and no AWQ checkpoint."""
        ours = is_bundle({"quantization_config": hf_quant_cfg}) and hf_quant_cfg.get("version") != "gemm"
        return "kvconvert" if ours else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """How a Linear is stored."""
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
