"""Static scales: one grid per channel of a layer for all tokens, fixed by calibration.

With m_c and M_c the smallest and largest value of channel c over all calibration tokens, as the cache stores them
(after RoPE and rotation, weights folded, scaled and clipped), each KV head's keys and values get

    scale_c = r (M_c - m_c) / (2^b - 1)      offset_c = m_c + (1 - r) (M_c - m_c) / 2

in float16, r being `key_clip_ratio` or `value_clip_ratio`, given or calibrated (`clip_ratios`). Pages then hold codes
alone. Sink tokens never reach a page and are left out. The scales of keys hold for the positions of the calibration
data: RoPE takes slow channels beyond their bounds at later positions, so calibrate at the length to be served.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvconvert.calibration.attention_sample import as_cached, attention_observed
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult
from kvconvert.calibration.ranks import Ranks
from kvconvert.errors import NumericError
from kvconvert.kernels.page_formats import ChannelBounds
from kvconvert.methods.scales import SCALE_NAMES


class RunningBounds:
    """Running smallest and largest value of each channel.

    Args:
        sink_tokens: first tokens of each sequence to leave out; a sequence no longer than that counts with its last.
    """

    def __init__(self, sink_tokens: int = 0) -> None:
        self.sink_tokens = sink_tokens
        self.bounds: ChannelBounds | None = None

    def update(self, x: Tensor) -> None:
        """Add keys or values [B, H, T, channels]."""
        stored = x[:, :, min(self.sink_tokens, x.shape[2] - 1) :].float()
        self._widen(stored.amin((0, 2)), stored.amax((0, 2)))

    def combine(self, ranks: Ranks) -> None:
        """Take in what other ranks found."""
        found = ranks.gather(torch.stack(self.bounds).unsqueeze(0))
        self.bounds = None
        for low, high in found:
            self._widen(low, high)

    def _widen(self, low: Tensor, high: Tensor) -> None:
        if self.bounds is not None:
            low, high = torch.minimum(low, self.bounds.low), torch.maximum(high, self.bounds.high)
        self.bounds = ChannelBounds(low, high)


class StaticScalesPass(CalibrationPass):
    """Measure the channels of the finished layer, which costs one more run of the calibration data through it.

    Stands after passes that change weights and before those that choose clip ratios: these shrink the measured bounds.
    """

    name = "static_scales"

    def __init__(self) -> None:
        self._work: LayerWork | None = None
        self._bounds: dict[str, RunningBounds] = {}

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> StaticScalesPass | None:
        """The pass for a scheme with static scales."""
        return cls() if job.scheme is not None and job.scheme.is_static else None

    def solve(self, work: LayerWork) -> None:
        """Find the bounds of all calibration tokens."""
        cache = work.cache
        self._work = work
        self._bounds = {side: RunningBounds(cache.sink_tokens) for side in ("key", "value")}

        def record(query: Tensor, key: Tensor, value: Tensor) -> None:
            _, keys, values = as_cached(query, key, value, cache)
            self._bounds["key"].update(keys)
            self._bounds["value"].update(values)

        with attention_observed(work.layer.get_submodule(work.structure.attention), record):
            work.replay()
        for bounds in self._bounds.values():
            bounds.combine(work.ranks)

    def apply(self, work: LayerWork) -> None:
        """Put the bounds of the sides with static pages into the format of the layer's cache.

        Raises:
            NumericError: a channel that float16 scales cannot describe.
        """
        for side, found in self._bounds.items():
            f, own = work.cache.side(side == "key")
            tensors = own._replace(bounds=found.bounds if f.static else None)
            work.cache = replace(work.cache, **{f"{side}_tensors": tensors})
            scales = work.cache.static_scales(f.is_key, 1.0)
            unfit = None if scales is None else ~(scales.scale.isfinite() & scales.offset.isfinite())
            if unfit is not None and unfit.any():
                head, channel = unfit.nonzero()[0].tolist()
                raise NumericError(
                    f"Channel {channel} of {side} head {head} of {work.name}.{work.structure.attention} takes values "
                    "on the calibration data that no float16 scale and offset can describe; keep this layer's "
                    f"{side}s in 16 bits."
                )

    def result(self) -> PassResult:
        """The scales with the clip ratios that later passes chose."""
        cache = self._work.cache
        formats = {"key": cache.keys, "value": cache.values}
        sides = {side: cache.static_scales(f.is_key, f.clip_ratio) for side, f in formats.items()}
        return PassResult(
            plan={
                f"static_{side}_{part}": tensor.cpu()
                for side, scales in sides.items()
                if scales is not None
                for part, tensor in zip(SCALE_NAMES, scales, strict=True)
            }
        )
