"""Passes over prompts and decoding rows as CUDA graphs, recorded for a few numbers of tokens, to which they are padded.

All that changes from pass to pass is in tables of fixed addresses and fixed rooms (`runtime/cache/prompt_tables.py`,
`runtime/cache/steps.py`), so that a pass costs the host its plan, an upload and a replay. Tokens beyond a pass's own
are computed and stored nowhere. A pass is recorded when it comes the second time, and used if its replay gives the
logits of the layers' own launches.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvconvert.kernels.launches import skips_launches

logger = logging.getLogger(__name__)

# Tokens of recorded passes; 320 for 256 beside 64 rows. Longer ones keep a GPU busy for longer than the host takes to
# launch them.
SIZES = (64, 128, 192, 256, 320, 384, 512, 768, 1024, 1280, 1536, 2176)
TOLERANCE = 0.02


@dataclass(frozen=True)
class _Recording:
    """One recorded pass.

    Attributes:
        graph: of its launches.
        read: int64 [2, N], ids and positions of its tokens; keep: int64 [rows], those whose logits are wanted.
        logits: [rows, V], overwritten by every replay.
        formats: of the caches' layers, whose tensors its launches read.
    """

    graph: torch.cuda.CUDAGraph
    read: Tensor
    keep: Tensor
    logits: Tensor
    formats: list[Any]

    def replay(self, read: Tensor, keep: Tensor) -> Tensor:
        """The pass over other tokens, [2, N]; its logits are overwritten by the next replay."""
        self.read.copy_(read)
        self.keep.copy_(keep)
        self.graph.replay()
        return self.logits


class CapturedPasses:
    """Records and replays one model's passes over prompts and rows.

    Args:
        captured: the model's `CapturedSteps`, whose memory these share.

    Attributes:
        reason: why passes run without graphs, or None.
        replayed: passes replayed so far; recorded: graphs made.
    """

    def __init__(self, captured: Any):
        self._captured = captured
        self.reason: str | None = None
        self.replayed = self.recorded = 0
        self._seen: set[Hashable] = set()
        self._recordings: dict[Hashable, _Recording] = {}

    def padded(self, tokens: int, device: torch.device) -> int | None:
        """To how many tokens a pass over so many is padded; None where it is not recorded.

        Steps of the model have to hold in recordings, which is tested at other positions (`runtime/hf/captured.py`).
        """
        if device.type != "cuda" or self.reason is not None or not self._captured.recorded or self._captured.reason:
            return None
        return next((size for size in SIZES if tokens <= size), None)

    def logits(self, cache: Any, read: Tensor, keep: Tensor) -> Tensor:
        """Logits [rows, V] of a planned pass.

        Args:
            cache: a `PackedCache` with a key, within `planned`.
            read: int64 [2, N], ids and positions.
            keep: int64 [rows], the tokens whose logits are wanted.
        """
        rooms, _ = cache.key
        key = cache.key, keep.shape, read.device
        padded = torch.nn.functional.pad(read, (0, rooms.tokens - read.shape[1]))
        if skips_launches():
            return self._launch(cache, padded, keep)
        recording = self._recordings.get(key)
        if recording is not None:
            self.replayed += 1
            return recording.replay(padded, keep).clone()
        if key not in self._seen or self.reason is not None:
            # Kernels are compiled, and the tables are told how work is divided.
            logits = self._launch(cache, padded, keep)
            if cache.key is None:
                self.reason = "a mask is neither causal nor a sliding window"
            self._seen.add(key)
            return logits
        return self._record(key, cache, padded, keep)

    def _launch(self, cache: Any, read: Tensor, keep: Tensor) -> Tensor:
        options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": keep}
        with cache.launches():
            return self._captured.forward(input_ids=read[:1], position_ids=read[1:], **options).logits[0]

    def _record(self, key: Hashable, cache: Any, read: Tensor, keep: Tensor) -> Tensor:
        expected, stored = self._launch(cache, read, keep), cache.are_stored(keep)
        if not stored.any():  # nothing by which a replay could be judged
            return expected
        try:
            graph, static = torch.cuda.CUDAGraph(), (read.clone(), keep.clone())
            torch.cuda.synchronize()
            # Other threads, which add requests, may go on meanwhile.
            with torch.cuda.graph(graph, pool=self._captured.pool, capture_error_mode="thread_local"):
                logits = self._launch(cache, *static)
            self._captured.pool = self._captured.pool or graph.pool()
            recording = _Recording(graph, *static, logits, cache.formats())
            with cache.counted_once():
                found = recording.replay(read, keep)[stored].float()
            wanted = expected[stored].float()
            error = (found - wanted).nan_to_num().norm() / wanted.nan_to_num().norm().clamp(min=1e-30)
            if float(error) > TOLERANCE:
                self.reason = "a replay gives other logits"
        except RuntimeError as error:
            self.reason = str(error).strip().split("\n")[0].rstrip(".")
            torch.cuda.synchronize()
        if self.reason is None:
            self._recordings[key], self.recorded = recording, self.recorded + 1
        else:
            logger.warning("Passes over prompts of %s run without CUDA graphs: %s.", self._captured.name, self.reason)
        return expected
