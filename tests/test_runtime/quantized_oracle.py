"""A slow, independent model of the quantized cache: transformers' own cache and eager attention over fake-quantized
pages.

Nothing here comes from kvconvert: keys and values are kept unrotated in full precision, and complete pages are
replaced by their quantized-and-dequantized image when the next tokens arrive, which is when the real cache first reads
them as pages.
"""

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

PAGE = 128


def sylvester(d: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < d:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / d**0.5


def fake_quantize(x: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Groups along the last dimension; scale and offset rounded to float16 as they are stored."""
    groups = x.unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().to(x.dtype)
    low = low.half().to(x.dtype)
    codes = torch.where(scale > 0, (groups - low) / scale, torch.zeros_like(groups)).round().clamp(0, 2**bits - 1)
    return (codes * scale + low).flatten(-2)


def page_image(keys: torch.Tensor, values: torch.Tensor, bits: int, group: int, oscar: bool):
    """What a page [B, H, 128, D] looks like after storage."""
    keys, values = keys.float(), values.float()
    rotation = sylvester(keys.shape[-1]).float()
    if oscar:
        keys, values = keys @ rotation, values @ rotation
    norm = torch.ones(1)
    if oscar:
        norm = keys.square().mean((1, 3), keepdim=True).sqrt().half().float()
    stored = fake_quantize((keys / norm).transpose(2, 3), bits, group).transpose(2, 3) * norm
    kept = fake_quantize(values, bits, min(group, values.shape[-1]))
    return (stored @ rotation.T, kept @ rotation.T) if oscar else (stored, kept)


class FakeQuantizedLayer(DynamicLayer):
    def __init__(self, bits: int, group: int, oscar: bool, pad: torch.Tensor):
        super().__init__()
        self.settings, self.pad, self.done = (bits, group, oscar), pad, torch.zeros(len(pad), dtype=torch.long)

    def update(self, key_states, value_states, *args, **kwargs):
        if self.is_initialized:
            for row in range(self.keys.shape[0]):
                start = int(self.pad[row] + self.done[row])
                while start + PAGE <= self.keys.shape[2]:
                    page = (slice(row, row + 1), slice(None), slice(start, start + PAGE))
                    self.keys[page], self.values[page] = page_image(self.keys[page], self.values[page], *self.settings)
                    start += PAGE
                    self.done[row] += PAGE
        return super().update(key_states, value_states, *args, **kwargs)

    def reorder_cache(self, beam_idx):
        super().reorder_cache(beam_idx)
        self.pad, self.done = self.pad[beam_idx], self.done[beam_idx]


def oracle_cache(
    model, bits: int = 2, group: int = 32, oscar: bool = True, pad: list[int] | None = None, batch: int = 1
):
    """A cache for eager attention; `pad` is each row's left padding."""
    padding = torch.tensor(pad if pad is not None else [0] * batch)
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [FakeQuantizedLayer(bits, group, oscar, padding) for _ in range(model.config.num_hidden_layers)]
    return cache
