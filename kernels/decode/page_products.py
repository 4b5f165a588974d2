"""The two products of attention over quantized pages: queries with keys, and attention weights with values.

Codes are unpacked to float32 in three passes over memory that is used again and again. Scales are multiplied into the
queries and the weights where these are few; where they are many, the codes themselves are dequantized, once for all.
"""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import torch

from kvconvert.kernels.packing import LANE_BITS, field_bits, fields_per_lane
from kvconvert.kernels.pages.formats import LayerFormat
from kvconvert.kernels.pages.records import KeyPages, ValuePages
from kvconvert.kernels.pages.reference import key_codes, key_scales


def page_scores(queries: torch.Tensor, pages: KeyPages | torch.Tensor, format: LayerFormat) -> torch.Tensor:
    """Dot products of queries float32 [N or 1, H, R, D] with N pages of keys, or full-precision keys [N, H, P, D].

    Returns:
        float32 [N, H, R, P].
    """
    if isinstance(pages, torch.Tensor):
        return queries @ pages.float().transpose(2, 3)
    f = format.keys
    if f.bits == 16:
        return queries @ pages.codes.float().transpose(2, 3)
    codes = key_codes(pages, f, format.boosted).transpose(2, 3).float() if f.boosted else _unpacked(pages.codes, f.bits)
    # A row [N, H, groups, 1, D] for each group of tokens.
    scale, zero_point = (part.float().transpose(2, 3).unsqueeze(3) for part in key_scales(pages, format.static_keys))
    groups = f.page_size // f.group_size
    codes = codes.unflatten(2, (groups, f.group_size))
    if queries.shape[2] * groups > f.page_size:
        scores = queries @ codes.mul_(scale).add_(zero_point).flatten(2, 3).transpose(2, 3)
    else:
        scores = _grouped_product(queries, scale, zero_point, codes)
    return scores if pages.norm is None else scores.mul_(pages.norm.float().unsqueeze(2))


def weighted_page_values(weights: torch.Tensor, pages: ValuePages | torch.Tensor, format: LayerFormat) -> torch.Tensor:
    """Sums of N pages of values, or of full-precision values [N, H, P, E], by weights float32 [N, H, R, P].

    Returns:
        float32 [N, H, R, E].
    """
    if isinstance(pages, torch.Tensor):
        return weights @ pages.float()
    f, static = format.values, format.static_values
    if f.bits == 16:
        return weights @ pages.codes.float()
    codes = _unpacked(pages.codes, f.bits)
    if f.static:
        # Tokens share the scales, which therefore leave the product.
        offset = weights.sum(-1, keepdim=True) * static.zero_point.float().unsqueeze(1)
        return (weights @ codes.transpose(2, 3)).mul_(static.scale.float().unsqueeze(1)).add_(offset)
    # A row [N, H, groups, 1, P] for each group of channels.
    scale, zero_point = (part.float().transpose(2, 3).unsqueeze(3) for part in (pages.scale, pages.zero_point))
    groups = f.head_dim // f.group_size
    codes = codes.unflatten(2, (groups, f.group_size))
    if weights.shape[2] * groups > f.head_dim:
        return weights @ codes.mul_(scale).add_(zero_point).flatten(2, 3).transpose(2, 3)
    return _grouped_product(weights, scale, zero_point, codes)


def _grouped_product(
    left: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """left (codes scale + zero_point)^T with the scales multiplied into `left`.

    Args:
        left: [N or 1, H, R, k].
        scale, zero_point: [N or 1, H, G, 1, k].
        codes: [N, H, G, n, k].

    Returns:
        [N, H, R, G n].
    """
    count, heads, groups, n, inner = codes.shape
    by_group = left.unsqueeze(2)
    scaled = (by_group * scale).expand(count, -1, -1, -1, -1).reshape(-1, left.shape[2], inner)
    product = torch.bmm(scaled, codes.view(-1, n, inner).transpose(1, 2)).view(count, heads, groups, -1, n)
    product.add_((by_group * zero_point).sum(-1, keepdim=True))
    return product.transpose(2, 3).flatten(3)


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of words int16 [N, H, lanes, rows], packed along tokens of keys or channels of values, as float32.

    Returns:
        [N, H, packed axis, other axis], valid until the next call on the same thread.
    """
    if bits == 3:
        rows = words.shape[3] * 2 // 3
        upper, lowest = words.split([rows, words.shape[3] - rows], 3)
        codes = _unpacked(upper, 2)
        return codes.mul_(2).add_(_fields(lowest, 1)[..., : codes.shape[3]])
    fields = _fields(words, bits)
    return _workspace(torch.float32, words.device, fields.shape).copy_(fields)


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`_unpacked` as int16, of codes that lie in one plane."""
    n, heads, lanes, rows = words.shape
    planes, parts = fields_per_lane(bits), field_bits(bits) // bits
    shape = (n, heads, planes, lanes, parts, rows)
    fields = _workspace(torch.int16, words.device, shape)
    # The shift is arithmetic; the mask removes the sign that it drags in.
    torch.bitwise_right_shift(words[:, :, None, :, None], _places(bits, words.device), out=fields)
    return fields.bitwise_and_(2**bits - 1).view(n, heads, planes * lanes, parts * rows)


@lru_cache(maxsize=32)
def _places(bits: int, device: torch.device) -> torch.Tensor:
    """Where the fields of a word begin, in bits: int16 [planes, 1, parts, 1]; see `kernels/packing.py` for 1 bit."""
    with torch.inference_mode(False):
        places = torch.arange(0, LANE_BITS, bits, dtype=torch.int16, device=device)
        return places.view(fields_per_lane(bits), 1, -1, 1)


_workspaces = threading.local()


def _workspace(dtype: torch.dtype, device: torch.device, shape: tuple[int, ...]) -> torch.Tensor:
    """Uninitialised memory that one thread's calls share, for what is used up before the next call.

    Fresh memory of this size would come from the operating system page by page, for every layer and step. On a CPU
    alone; elsewhere torch keeps memory by itself.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape)
    buffers = _workspaces.__dict__
    if dtype not in buffers or buffers[dtype].numel() < size:
        with torch.inference_mode(False):
            buffers[dtype] = torch.empty(size, dtype=dtype)
    return buffers[dtype][:size].view(shape)
