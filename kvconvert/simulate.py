"""Weights as quantization would leave them, in a live model, at any width: to compare methods, not to convert.

A bundle holds 4-bit weights; the comparison of methods at 3 bits, or with deliberately wrong statistics, needs none.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconvert.adapters import require_adapter
from kvconvert.calibration.activations import ActivationRecorder, Observed
from kvconvert.calibration.awq import apply_clips, apply_scales, search_clips, search_scales
from kvconvert.errors import UsageError
from kvconvert.kernels.awq_format import fake_quantize_weight


@torch.no_grad()
def fake_quantize_weights(
    model: PreTrainedModel,
    method: Literal["awq", "rtn"],
    bits: int,
    group_size: int,
    ids: Tensor | None = None,
    shuffle_seed: int | None = None,
) -> None:
    """Replace the weights of every decoder layer's Linears, in place, by what they become when quantized and read back.

    Args:
        model: a causal language model of a known architecture, in float32.
        method: "awq", or "rtn" for rounding to nearest alone.
        bits: 2 to 8.
        group_size: inputs that share one scale and zero.
        ids: int64 [samples, length], calibration tokens, needed for "awq".
        shuffle_seed: permute each activation statistic over its channels first, to see that it matters which channel is
            salient; None leaves the statistics alone.
    """
    adapter = require_adapter(model.config)
    structure = adapter.structure(model.config)
    layers = list(model.get_submodule(adapter.layers))
    if method == "awq":
        if ids is None:
            raise UsageError("AWQ needs calibration tokens; pass ids.")
        recorders = [ActivationRecorder(structure, *ids.shape, group_size) for _ in layers]
        with ExitStack() as hooks:
            for layer, recorder in zip(layers, recorders, strict=True):
                hooks.enter_context(recorder.attached(layer))
            for sequence in ids.split(1):
                model(input_ids=sequence.to(model.device), use_cache=False)
        for index, (layer, recorder) in enumerate(zip(layers, recorders, strict=True)):
            observed = recorder.result()
            if shuffle_seed is not None:
                observed = _shuffled(observed, shuffle_seed + index)
            scalings, _ = search_scales(layer, structure, observed, bits, group_size)
            apply_scales(layer, structure, scalings, torch.float32)
            clips = search_clips(layer, structure, observed, scalings, bits, group_size)
            apply_clips(layer, clips, group_size)
    for layer in layers:
        for name in structure.linears:
            weight = layer.get_submodule(name).weight
            weight.copy_(fake_quantize_weight(weight, bits, group_size))


def _shuffled(observed: Observed, seed: int) -> Observed:
    generator = torch.Generator().manual_seed(seed)
    mean_abs = {
        name: values[torch.randperm(values.numel(), generator=generator).to(values.device)]
        for name, values in observed.mean_abs.items()
    }
    return replace(observed, mean_abs=mean_abs)
