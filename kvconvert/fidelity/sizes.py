"""Sizes of a bundle: its cache, measured from tensors, and its weight files, from their headers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from kvconvert.bundle.manifest import Manifest
from kvconvert.errors import BundleError
from kvconvert.fidelity.report import CacheSize, WeightSize
from kvconvert.fidelity.scoring import Comparison, Decoder, feed, read_prompt
from kvconvert.io.tensorfile import nbytes, read_header
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models.source import SourceModel
from kvconvert.runtime import KVCache

CHUNK = 1024  # tokens per pass


@torch.no_grad()
def measure_cache(
    decoder: Decoder, ids: torch.Tensor, tokens: int, dtype: torch.dtype, comparison: Comparison | None
) -> CacheSize:
    """Fill the bundle's cache with `tokens` tokens and measure its tensors.

    Args:
        decoder: the bundle, which is left in `dtype`.
        ids: of text, repeated where it is too short.
        tokens: how many; whole pages, where there is room for them.
        dtype: that the bundle serves, in which full-precision tokens are counted.
        comparison: while which the share of full-precision tokens was counted, if there was one.
    """
    model = decoder.model
    if model.dtype != dtype:
        model.to(dtype)
    flat = ids.flatten()
    filler = flat.repeat(-(-tokens // len(flat)))[:tokens].unsqueeze(0)
    cache, plain = decoder.new_cache(), Decoder.plain(model).new_cache()
    read_prompt(decoder, cache, filler, CHUNK)
    # The source's cache holds as many numbers, all of them in the model's dtype: one page tells the size of a token.
    feed(Decoder.plain(model), plain, filler[:, :PAGE_SIZE], logits_to_keep=1)
    source_bytes = sum(_nbytes(layer) for layer in plain.layers) / plain.get_seq_length()
    if isinstance(cache, KVCache):
        stats = cache.stats()
        used, allocated, bits, residual = (
            stats.bytes_used,
            stats.bytes_allocated,
            stats.bits_per_value,
            stats.residual_tokens,
        )
    else:
        used = allocated = sum(_nbytes(layer) for layer in cache.layers)
        bits, residual = 8.0 * dtype.itemsize, tokens
    return CacheSize(
        bits_per_value=bits,
        bytes_per_token=used / tokens,
        bytes_used=used,
        bytes_allocated=allocated,
        source_bytes_per_token=source_bytes,
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
