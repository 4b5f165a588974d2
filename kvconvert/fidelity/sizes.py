"""Sizes of a bundle: its cache, by arithmetic and measured, and its weight files, from their headers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kvconvert.bundle.manifest import Manifest
from kvconvert.errors import BundleError
from kvconvert.fidelity.report import CacheSize, WeightSize
from kvconvert.fidelity.scoring import Comparison, Decoder, read_prompt
from kvconvert.io.tensorheader import nbytes, read_header
from kvconvert.models.configuration import model_cache
from kvconvert.models.source import SourceModel
from kvconvert.runtime import KVCache

CHUNK = 1024  # tokens per pass


@torch.no_grad()
def measure_cache(
    decoder: Decoder, ids: torch.Tensor, tokens: int, context: int, dtype: torch.dtype, comparison: Comparison | None
) -> CacheSize:
    """Fill the bundle's cache with `tokens` tokens and measure its tensors; sizes at `context` follow by arithmetic.

    Args:
        decoder: the bundle, which is left in `dtype`.
        ids: of text, repeated where it is too short.
        tokens: how many.
        context: tokens for which bits per value are stated.
        dtype: that the bundle serves, in which full-precision tokens are counted.
        comparison: while which the share of full-precision tokens was counted, if there was one.
    """
    model = decoder.model
    if model.dtype != dtype:
        model.to(dtype)
    flat = ids.flatten()
    filler = flat.repeat(-(-tokens // len(flat)))[:tokens].unsqueeze(0)
    cache = decoder.new_cache()
    read_prompt(decoder, cache, filler, CHUNK)
    schemes = cache.schemes if isinstance(cache, KVCache) else [None] * len(cache.layers)
    size = model_cache(model.config, schemes, dtype)
    bits = size.bits_per_value(context) or 0.0
    if isinstance(cache, KVCache):
        stats = cache.stats()
        used, allocated, residual = stats.bytes_used, stats.bytes_allocated, stats.residual_tokens
        if any(scheme is not None and scheme.only_tokens() for scheme in schemes):
            context, bits = tokens, stats.bits_per_value  # the filler has none of those
    else:
        used = allocated = sum(_nbytes(layer) for layer in cache.layers)
        residual = tokens
    return CacheSize(
        context=context,
        bits_per_value=bits,
        bytes_per_token=bits / 8 * size.numbers(context) / context,
        bytes_used=used,
        bytes_allocated=allocated,
        source_bytes_per_token=size.plain_bytes(context) / context,
        tokens=tokens,
        residual_tokens=residual,
        dtype=str(dtype).removeprefix("torch."),
        residual_share=None if comparison is None else comparison.residual_share,
        clamped_rows=None if comparison is None else comparison.clamped_rows,
    )


def _nbytes(layer: Any) -> int:
    return sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.ndim == 4)


def weight_size(directory: Path, manifest: Manifest, checkpoint: SourceModel) -> WeightSize:
    """Sizes from the headers of the files themselves."""
    own = manifest.weight_files()
    if not own:
        raise BundleError(f"{directory} lists no weight files; export the bundle again.")
    size = sum(nbytes(info) for name in own for info in read_header(directory / name).values())
    files = [checkpoint.file(name) for name in set(checkpoint.weight_map.values())]
    source_size = sum(_data_bytes(file) if file.suffix == ".safetensors" else file.stat().st_size for file in files)
    parameters = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return WeightSize(bytes=size, bits_per_weight=8 * size / parameters, source_bytes=source_size)


def _data_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file, whatever their types: all but the header and the length before it."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")
