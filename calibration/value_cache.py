"""Values as read back from a cache, for passes that change weights and must not make values harder to store."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvconvert.cache.format import CacheFormat
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform


def value_rounding(cache: CacheFormat | None) -> Callable[[Tensor], Tensor] | None:
    """How a cache rounds values [..., head_dim]; None where scaling channels changes nothing about their error.

    That is so where values are not quantized, and for spans and static pages, which have one scale per channel.
    """
    if cache is None or cache.span is not None or cache.pages.values.static or cache.pages.values.bits == 16:
        return None
    f = cache.pages.values
    return lambda values: simulate_value_cache(values, f.bits, f.group_size, f.clip_ratio, cache.rotations.values)


def simulate_value_cache(values: Tensor, bits: int, group_size: int, clip_ratio: float, rotate: bool) -> Tensor:
    """Values [..., head_dim] as read back from a cache: quantized per token over groups of channels, float32.

    Args:
        bits, group_size, clip_ratio: as in a KV scheme; 16 bits leave values as they are.
        rotate: rotate before and back after quantizing (schemes that rotate at run time; folded weights give rotated
            values).

    Raises:
        GroupRangeError: values beyond fp16.
    """
    if bits == 16:
        return values
    stored = hadamard_transform(values) if rotate else values
    quantized = quantize(stored, bits, group_size, dim=-1, clip_ratio=clip_ratio)
    read = dequantize(*quantized, group_size, dim=-1)
    return hadamard_transform(read, inverse=True) if rotate else read
