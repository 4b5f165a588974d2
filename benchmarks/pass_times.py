"""Times of an Engine's passes by kind, and what else happened in the slowest ones.

On a GPU a step launches a pass and then waits for the tokens of the one before, so that the duration of a call tells of
both. A pass's own time is therefore taken from the GPU: from the moment when it has nothing else to do, or when the
step begins if that is later, until it has ended the pass. So it contains what the GPU waits for the host within it. On
a CPU it is the duration of the call.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from kvconvert.runtime import Engine

# Upper ends of the kinds of passes, in prompt tokens.
KINDS = (0, 600, 2048, 4096, 8192)
SLOWEST = 3


@dataclass
class Pass:
    """One `Engine.step`.

    Attributes:
        at: seconds after the first request came.
        seconds: the pass's own; `step_seconds` of the call, which waits for the tokens of the step before, too.
        prompt_tokens, rows: that it read.
        tokens_before: prompt tokens of the step before, for whose results it may have waited.
        recorded: CUDA graphs that were made, of steps or of passes.
        kernels: that Triton compiled or read from its cache.
        collected_seconds: the seconds spent collecting garbage.
    """

    at: float
    seconds: float = 0.0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    rows: int = 0
    tokens_before: int = 0
    recorded: int = 0
    kernels: list[str] = field(default_factory=list)
    collected_seconds: float = 0.0


class PassTimes:
    """The passes of one Engine; a context, within which `step` steps it."""

    def __init__(self, engine: Engine):
        self.passes: list[Pass] = []
        self._engine, self._begin = engine, time.perf_counter()
        self._captured = engine._steps.model.captured
        self._on_gpu = engine._steps.device.type == "cuda"
        # Of each pass, before its first kernel and after its last one.
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> PassTimes:
        gc.callbacks.append(self._collect)
        if self._on_gpu:
            from triton import knobs

            knobs.compilation.listener = self._compile
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._collect)
        if self._on_gpu:
            from triton import knobs

            knobs.compilation.listener = None
            torch.cuda.synchronize()
            for each, (begin, end) in zip(self.passes, self._events, strict=True):
                each.seconds = begin.elapsed_time(end) / 1e3

    def step(self) -> None:
        """`Engine.step`, timed."""
        begin, before = time.perf_counter(), self._engine.stats()
        self.passes.append(now := Pass(begin - self._begin, rows=before.running))
        if len(self.passes) > 1:
            now.tokens_before = self.passes[-2].prompt_tokens
        recorded, events, begin = self._recorded(), None, time.perf_counter()
        if self._on_gpu:
            events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._events.append(events)
            events[0].record()
        self._engine.step()
        if events is not None:
            events[1].record()
        now.seconds = now.step_seconds = time.perf_counter() - begin
        now.recorded = self._recorded() - recorded
        now.prompt_tokens = self._engine.stats().prompt_tokens - before.prompt_tokens

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """After the context: passes by how many prompt tokens they read, their times, and the slowest of each kind."""
        found: dict[str, list[Pass]] = {}
        for each in self.passes:
            most = next((end for end in KINDS if each.prompt_tokens <= end), math.inf)
            found.setdefault(f"up to {most:,} prompt tokens" if most else "decoding alone", []).append(each)
        report = {}
        for name, kind in found.items():
            times = sorted(each.seconds for each in kind)
            report[name] = {
                "passes": len(kind),
                "tokens": sum(each.prompt_tokens for each in kind),
                "seconds": sum(times),
                "step_seconds": sum(each.step_seconds for each in kind),
                "median_ms": statistics.median(times) * 1e3,
                "longest_ms": times[-1] * 1e3,
                "longest_step_ms": max(each.step_seconds for each in kind) * 1e3,
                "slowest": [asdict(each) for each in sorted(kind, key=lambda each: -each.seconds)[:SLOWEST]],
            }
        return dict(sorted(report.items(), key=lambda item: -item[1]["seconds"]))

    def _recorded(self) -> int:
        return self._captured.recorded + self._captured.passes.recorded

    def _compile(self, **what: Any) -> None:
        if self.passes:
            self.passes[-1].kernels.append(what["metadata"]["name"])

    def _collect(self, phase: str, _: dict[str, int]) -> None:
        if self.passes:
            # Between its start and its stop nothing else runs.
            self.passes[-1].collected_seconds += time.perf_counter() * (1 if phase == "stop" else -1)
