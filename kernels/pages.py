"""Pages: fixed runs of tokens whose keys and values are quantized together and never touched again.

A page holds `page_size` tokens of every KV head of one layer. Keys are quantized per channel over groups of tokens and
packed along the tokens; values are quantized per token over groups of channels and packed along the channels. Both are
what the
decode kernels read: the axis that is contracted with the probabilities or the query is not the packed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import torch

from kvconvert.errors import NumericError
from kvconvert.kernels.packing import pack_codes, unpack_codes
from kvconvert.kernels.quantizer import dequantize, quantize


@dataclass(frozen=True)
class PageFormat:
    """The meaning of one layer's page bytes.

    Attributes:
        num_key_value_heads, key_head_dim, value_head_dim: shape of the layer's K and V.
        page_size: tokens per page.
        key_bits, value_bits: 1, 2, 4, 8, or 16 for unquantized.
        key_group_size: tokens per key group; divides `page_size`.
        value_group_size: channels per value group; divides `value_head_dim`.
        token_norm: whether keys are divided by a norm before quantization, over all heads jointly or each head alone.
        token_norm_measure: root mean square ("l2") or mean magnitude.
        key_range, value_range: factor applied to each group's (min, max) about its midpoint.
    """

    num_key_value_heads: int
    key_head_dim: int
    value_head_dim: int
    page_size: int
    key_bits: int
    value_bits: int
    key_group_size: int
    value_group_size: int
    token_norm: Literal["none", "joint", "per_head"] = "none"
    token_norm_measure: Literal["l2", "mean_abs"] = "l2"
    key_range: float = 1.0
    value_range: float = 1.0


@dataclass(frozen=True)
class Pages:
    """N pages; the first dimension of every tensor counts pages. H KV heads, D key and E value channels, P tokens.

    Attributes:
        key_codes: int16 [N, H, D, P * key_bits / 16], or the model's dtype [N, H, D, P] at 16 bits.
        key_scale, key_minimum: float16 [N, H, D, P / key_group_size], None at 16 bits.
        key_norm: float16 [N, H or 1, P], None without a token norm.
        value_codes: int16 [N, H, P, E * value_bits / 16], or the model's dtype [N, H, P, E] at 16 bits.
        value_scale, value_minimum: float16 [N, H, P, E / value_group_size], None at 16 bits.
    """

    key_codes: torch.Tensor
    key_scale: torch.Tensor | None
    key_minimum: torch.Tensor | None
    key_norm: torch.Tensor | None
    value_codes: torch.Tensor
    value_scale: torch.Tensor | None
    value_minimum: torch.Tensor | None

    def __len__(self) -> int:
        return self.key_codes.shape[0]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that this format has, with their names."""
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is not None:
                yield field.name, tensor

    def select(self, index: slice | torch.Tensor) -> Pages:
        """Some of the pages: a view for a slice, a copy for an index tensor."""
        return Pages(*(None if (t := getattr(self, field.name)) is None else t[index] for field in fields(self)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors())


def empty_pages(count: int, format: PageFormat, dtype: torch.dtype, device: torch.device) -> Pages:
    """Uninitialised room for `count` pages; `dtype` is the model's, used by 16-bit codes."""
    f = format
    shape = (count, f.num_key_value_heads)

    def codes(rows: int, length: int, bits: int) -> torch.Tensor:
        if bits == 16:
            return torch.empty(*shape, rows, length, dtype=dtype, device=device)
        return torch.empty(*shape, rows, length * bits // 16, dtype=torch.int16, device=device)

    def metadata(rows: int, groups: int, bits: int) -> torch.Tensor | None:
        return None if bits == 16 else torch.empty(*shape, rows, groups, dtype=torch.float16, device=device)

    key_groups, value_groups = f.page_size // f.key_group_size, f.value_head_dim // f.value_group_size
    norm_heads = {"none": 0, "joint": 1, "per_head": f.num_key_value_heads}[f.token_norm]
    return Pages(
        key_codes=codes(f.key_head_dim, f.page_size, f.key_bits),
        key_scale=metadata(f.key_head_dim, key_groups, f.key_bits),
        key_minimum=metadata(f.key_head_dim, key_groups, f.key_bits),
        key_norm=torch.empty(count, norm_heads, f.page_size, dtype=torch.float16, device=device)
        if norm_heads
        else None,
        value_codes=codes(f.page_size, f.value_head_dim, f.value_bits),
        value_scale=metadata(f.page_size, value_groups, f.value_bits),
        value_minimum=metadata(f.page_size, value_groups, f.value_bits),
    )


def token_norms(
    keys: torch.Tensor, scope: Literal["joint", "per_head"], measure: Literal["l2", "mean_abs"]
) -> torch.Tensor:
    """The size of each key token, float32 [N, 1 or H, P], from keys [N, H, P, D].

    OScaR (section 4.2) divides by the L2 norm over all KV heads; the mean over heads and channels replaces the sum
    here, so that normalised values stay near 1 whatever the number of heads. `mean_abs` is the paper's table 10
    alternative.

    Raises:
        NumericError: a norm is not finite or does not fit float16, in which it is stored.
    """
    x = keys.float()
    dims = (1, 3) if scope == "joint" else (3,)
    norms = x.square().mean(dims).sqrt() if measure == "l2" else x.abs().mean(dims)
    norms = norms.unsqueeze(1) if scope == "joint" else norms
    if not bool((norms <= torch.finfo(torch.float16).max).all()):
        raise NumericError("the norm of a key token is not finite or exceeds float16")
    return norms


def quantize_pages(keys: torch.Tensor, values: torch.Tensor, format: PageFormat) -> Pages:
    """Quantize whole pages.

    Args:
        keys: [N, H, P, D], any float dtype, after RoPE and after the rotation if the scheme has one.
        values: [N, H, P, E].
        format: what to store; `page_size` equals P.

    Returns:
        N pages. Key codes are computed from the stored norm, scale and minimum.

    Raises:
        NumericError: NaN, infinity, or a norm, scale or minimum beyond float16.
    """
    key_norm = None
    transposed = keys.transpose(2, 3)
    if format.token_norm != "none":
        key_norm = token_norms(keys, format.token_norm, format.token_norm_measure).half()
        # Zero-norm tokens (all-zero keys, or below float16's range) store zeros and come back as zeros.
        reciprocal = torch.where(key_norm > 0, key_norm.float().reciprocal(), 0.0)
        transposed = transposed.float() * reciprocal.unsqueeze(2)
    if format.key_bits == 16:
        key_codes, key_scale, key_minimum = transposed.to(keys.dtype).contiguous(), None, None
    else:
        quantized = quantize(transposed, format.key_bits, format.key_group_size, dim=3, value_range=format.key_range)
        key_codes = pack_codes(quantized.codes, format.key_bits, dim=3)
        key_scale, key_minimum = quantized.scale, quantized.minimum
    if format.value_bits == 16:
        value_codes, value_scale, value_minimum = values.contiguous(), None, None
    else:
        quantized = quantize(values, format.value_bits, format.value_group_size, dim=3, value_range=format.value_range)
        value_codes = pack_codes(quantized.codes, format.value_bits, dim=3)
        value_scale, value_minimum = quantized.scale, quantized.minimum
    return Pages(key_codes, key_scale, key_minimum, key_norm, value_codes, value_scale, value_minimum)


def page_keys(pages: Pages, format: PageFormat) -> torch.Tensor:
    """Dequantized keys, float32 [N, H, D, P], token norms applied."""
    if format.key_bits == 16:
        keys = pages.key_codes.float()
    else:
        codes = unpack_codes(pages.key_codes, format.key_bits, 3, format.page_size)
        keys = dequantize(codes, pages.key_scale, pages.key_minimum, format.key_group_size, 3)
    return keys if pages.key_norm is None else keys * pages.key_norm.float().unsqueeze(2)


def page_values(pages: Pages, format: PageFormat) -> torch.Tensor:
    """Dequantized values, float32 [N, H, P, E]."""
    if format.value_bits == 16:
        return pages.value_codes.float()
    codes = unpack_codes(pages.value_codes, format.value_bits, 3, format.value_head_dim)
    return dequantize(codes, pages.value_scale, pages.value_minimum, format.value_group_size, 3)
