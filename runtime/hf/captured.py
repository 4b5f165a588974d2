"""Decoding steps as CUDA graphs: a model's single-token passes are recorded once and replayed.

A step is planned on the host for whole groups of layers (`runtime/cache/steps.py`), which writes the few numbers that
change into tables of fixed addresses; then one graph launches everything that the model's forward pass would. Graphs
are recorded by batch size and by how much work they have room for, and serve every cache of the model.

A recording is used only after a test: at other positions than those it was made at, it has to give what the layers
give one by one. A model whose forward pass depends on numbers that the host counts fails it and runs eagerly.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from kvconvert.runtime.cache.registry import TableRegistry
from kvconvert.runtime.cache.steps import PlannedStep, can_plan_steps
from kvconvert.runtime.hf.cache import KVCache
from kvconvert.runtime.hf.layer import HybridLayer

logger = logging.getLogger(__name__)

# By how much positions are moved for the test of a recording (back, if there are as many), and how far logits may
# differ then: kernels are the same, but libraries may choose others within a graph.
SHIFT = 13
TOLERANCE = 0.02
# Arguments that change nothing about the last token's logits.
HARMLESS = frozenset({"return_dict", "use_cache", "logits_to_keep", "cache_position"})


@dataclass(frozen=True)
class Recording:
    """One recorded step.

    Attributes:
        graph: of its launches.
        ids, positions: what it reads: int64 [B, 1], and positions of the shape that the model was given.
        output: what it writes, the model's own output; tensors are overwritten by every replay.
    """

    graph: torch.cuda.CUDAGraph
    ids: torch.Tensor
    positions: torch.Tensor
    output: ModelOutput

    def replay(self, ids: torch.Tensor, positions: torch.Tensor) -> ModelOutput:
        """Run the step for other tokens ids [B, 1] and positions; the output is overwritten by the next replay."""
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.output


class CapturedSteps:
    """Records and replays the single-token passes of one model.

    Args:
        forward: the model's own forward pass, without our replacement.
        name: of the model's class, for messages.

    Attributes:
        registry: of the tables that all of the model's caches use.
        reason: why the model's steps run eagerly although its caches could be planned, or None.
        replayed: steps replayed so far; recorded: graphs made.
        prepared: batches whose steps were recorded beforehand, see `runtime/hf/prepare.py`.
    """

    def __init__(self, forward: Callable[..., ModelOutput], name: str):
        self.forward, self.name = forward, name
        self.registry = TableRegistry()
        self.reason: str | None = None
        self.replayed = self.recorded = 0
        self.prepared: set[Hashable] = set()
        self._recordings: dict[Hashable, Recording] = {}
        self._pool: Any = None
        self._trusts_masks = False
        self._told: set[str] = set()

    def __deepcopy__(self, memo: dict) -> CapturedSteps:
        # Recordings know the addresses of their own model's weights.
        return CapturedSteps(copy.deepcopy(self.forward, memo), self.name)

    @contextmanager
    def trusting_masks(self) -> Iterator[None]:
        """Within the context attention masks are not read: those of `generate` never mask a new token."""
        before, self._trusts_masks = self._trusts_masks, True
        try:
            yield
        finally:
            self._trusts_masks = before

    def serves(self, arguments: dict[str, Any]) -> bool:
        """Whether a forward pass with these arguments is a step that can be planned and recorded."""
        cache, ids = arguments.get("past_key_values"), arguments.get("input_ids")
        if self.reason is not None or not isinstance(cache, KVCache) or not isinstance(ids, torch.Tensor):
            return False
        if not ids.is_cuda or ids.dim() != 2 or ids.shape[1] != 1 or not cache.replays:
            return False
        if torch.is_grad_enabled() or torch.cuda.is_current_stream_capturing() or not cache.groups[0].rows:
            return False
        if cache.groups[0].reading_prompt:
            return False
        reason = self._unsupported(cache, arguments)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("Steps of %s run without CUDA graphs: %s.", self.name, reason)
            return False
        mask = arguments.get("attention_mask")
        if mask is None or self._trusts_masks:
            return True
        # In a user's own loop: masked new tokens, and masks that have to be refused, are left to the eager path.
        whole = isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.shape[1] == cache.get_seq_length() + 1
        return whole and bool((mask[:, -1] != 0).all())

    def _unsupported(self, cache: KVCache, arguments: dict[str, Any]) -> str | None:
        """Why a single-token pass cannot be planned; None if it can."""
        if cache.groups[0].registry is not self.registry:
            return "the cache was not made by the model's new_kv_cache()"
        if not _is_plain(cache):
            return "some layers keep transformers' own states"
        if not can_plan_steps(cache.groups):
            return "the kernels do not serve its layers, or these lie on several devices"
        known = {"past_key_values", "input_ids", "attention_mask", "position_ids"} | HARMLESS
        others = [n for n, value in arguments.items() if n not in known and value is not None and value is not False]
        if others:
            return f"the model was given {', '.join(sorted(others))}"
        if arguments.get("use_cache") is False or arguments.get("return_dict") is False:
            return "use_cache or return_dict is False"
        return None

    def step(self, arguments: dict[str, Any]) -> ModelOutput:
        """A forward pass that `serves` accepts; errors are those of `PlannedStep`."""
        cache, ids = arguments["past_key_values"], arguments["input_ids"]
        positions = arguments.get("position_ids")
        if positions is None:
            positions = torch.full_like(ids, cache.get_seq_length())
        planned = PlannedStep(cache.groups)
        try:
            with torch.cuda.device(ids.device):
                key = (ids.shape, positions.shape, ids.device, planned.key())
                recording = self._recordings.get(key)
                if recording is None:
                    output = self._record(planned, cache, ids, positions)
                else:
                    self.replayed += 1
                    output = recording.replay(ids, positions)
                result = _copied(output, cache)
        except BaseException:
            planned.abandon()
            raise
        planned.finish()
        return result

    def _record(self, planned: PlannedStep, cache: KVCache, ids: torch.Tensor, positions: torch.Tensor) -> ModelOutput:
        """Run a step layer by layer, and record it for the next time."""
        counts = [tables.clamped_rows.clone() for tables in planned.tables]
        # This also compiles kernels, and tells the tables how work is to be divided.
        self._launch(planned, cache, ids, positions)
        key = (ids.shape, positions.shape, ids.device, planned.key())
        try:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            static = ids.clone(), positions.clone()
            with torch.cuda.graph(graph, pool=self._pool):
                recorded = self._launch(planned, cache, *static)
            self._pool = self._pool or graph.pool()
            # A recording keeps no cache alive.
            recorded.past_key_values = None
            recording = Recording(graph, *static, recorded)
            if not self._holds_elsewhere(planned, cache, recording, ids, positions):
                self.reason = "its forward pass depends on positions that are counted on the host"
        except RuntimeError as error:
            self.reason = str(error).strip().split("\n")[0].rstrip(".")
            torch.cuda.synchronize()
        if self.reason is not None:
            logger.warning("Steps of %s run without CUDA graphs: %s.", self.name, self.reason)
        else:
            self._recordings[key], self.recorded = recording, self.recorded + 1
        for tables, count in zip(planned.tables, counts, strict=True):
            tables.clamped_rows.copy_(count)
        if self.reason is None:
            return recording.replay(ids, positions)
        return self._launch(planned, cache, ids, positions)

    def _launch(self, planned: PlannedStep, cache: KVCache, ids: torch.Tensor, positions: torch.Tensor) -> ModelOutput:
        """The model's forward pass over a planned step."""
        with planned.launches():
            return self.forward(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True)

    def _holds_elsewhere(
        self,
        planned: PlannedStep,
        cache: KVCache,
        recording: Recording,
        ids: torch.Tensor,
        positions: torch.Tensor,
    ) -> bool:
        """Whether a recording gives at other positions what the layers give there; both overwrite the new tokens' keys
        and values, which a step has to write again.
        """

        def move(by: int) -> None:
            for group, tables in zip(planned.groups, planned.tables, strict=True):
                group.logical += by
                tables.step[2] += by

        by = -min(SHIFT, int(positions.min())) or 1
        move(by)
        try:
            expected = _finite(self._launch(planned, cache, ids, positions + by).logits)
            got = _finite(recording.replay(ids, positions + by).logits)
            error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
        finally:
            move(-by)
        return error <= TOLERANCE


def _is_plain(cache: KVCache) -> bool:
    """Whether all layers keep keys and values and no other states."""
    layers = cache.paged_layers()
    return len(layers) == len(cache.layers) and not any(isinstance(layer, HybridLayer) for layer in layers)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """Logits as float32; tokens that a model rules out have -inf."""
    return logits.float().nan_to_num(neginf=-1e4)


def _copied(output: ModelOutput, cache: KVCache) -> ModelOutput:
    """An output with copies of its tensors, which later replays do not overwrite, and the cache that was used."""
    parts = {name: part.clone() if isinstance(part, torch.Tensor) else part for name, part in output.items()}
    return type(output)(**parts | {"past_key_values": cache})
