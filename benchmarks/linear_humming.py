"""Humming's kernels over AWQ tensors, as a peer of ours; needs the package `humming-kernels` and a CUDA toolkit.

Humming compiles a kernel per Linear shape and range of rows when it is first called (NVRTC, with CUDA's headers), keeps
them in ~/.humming, and repacks the weight into a layout of its own, in which scales have the activations' dtype: with
bf16 activations AWQ's fp16 scales are rounded to bf16.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kvconvert.kernels.linear.awq_format import AwqWeight


def unsupported() -> str | None:
    """Why Humming cannot be measured here; None if it can."""
    try:
        import humming.layer  # noqa: F401
    except Exception as error:  # whatever its own imports and its search for CUDA raise
        return f"{type(error).__name__}: {error}"
    return None


class HummingProduct:
    """One weight in Humming's layout, and copies of it that take turns.

    Args:
        weight: AWQ's tensors on a GPU.
        copies: how many times the weight is held.
        dtype: of the activations.
    """

    def __init__(self, weight: AwqWeight, copies: int, dtype: torch.dtype) -> None:
        from humming.layer import HummingLayer

        inputs, groups = weight.qweight.shape[0], weight.scales.shape[0]
        config = {"quant_method": "awq", "bits": 4, "group_size": inputs // groups, "zero_point": True}
        layer = HummingLayer(
            shape_n=weight.scales.shape[1], shape_k=inputs, weight_config=config, torch_dtype=dtype
        ).cuda()
        layer.load_from_tensors({"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales.to(dtype)})
        layer.transform()
        self.layers = [layer, *(copy.deepcopy(layer) for _ in range(copies - 1))]

    @property
    def nbytes(self) -> int:
        """Bytes of one weight with its scales and zeros."""
        return sum(parameter.nbytes for parameter in self.layers[0].parameters())

    def config(self, rows: int) -> dict:
        """What Humming would run for so many rows."""
        from humming.tune import get_heuristics_config

        return get_heuristics_config(self.layers[0].humming_config, shape_m=rows)

    def calls(self, x: Tensor, layers: int | None = None) -> list[partial[Tensor]]:
        """The product with each copy of the weight."""
        tuning = json.dumps(self.config(len(x)))
        return [partial(layer, x, tuning_config=tuning) for layer in self.layers[:layers]]

    def specifications(self, row_counts: Sequence[int]) -> list[tuple[type, dict]]:
        """What `compile_all` compiles for these numbers of rows."""
        from humming.kernel.humming import HummingKernel

        found = {}
        for rows in row_counts:
            layer, _, tuning = HummingKernel._resolve_configs(
                self.layers[0].humming_config.to_str(), None, json.dumps(self.config(rows))
            )
            kernel = {name: value for name, value in (layer | tuning).items() if name != "num_sms"}
            found[json.dumps(kernel, sort_keys=True)] = (HummingKernel, kernel)
        return list(found.values())


def compile_all(products: Sequence[HummingProduct], row_counts: Sequence[int]) -> int:
    """Compile what all products need for these numbers of rows, on all cores at a time; how many kernels that is."""
    from humming.kernel.humming import HummingKernel

    specifications = [one for product in products for one in product.specifications(row_counts)]
    HummingKernel.compile_many(specifications)
    return len(specifications)
