"""The search of the recipe `auto`: measure every candidate of every layer, allocate, verify the whole, repair.

Divergences are those of the whole source model, its weights as they are, on calibration text that calibration's own
samples leave over and of which passages are repeated: what layers that look tokens up lose shows there, and hardly in
running text. Keys and values are measured one at a time. Every layer's measurements are committed to the working
directory, so that a killed search goes on where it stopped.

The divergence of small errors adds up to first order, so that the exact allocation of the sum is where the search
begins. Where errors of several layers, or of keys and values, work together, the sum misleads. Whole plans are
therefore measured: the allocation itself, the best plans with the same choice in every layer, allocations in which
keys, values, earlier or later layers weigh more, and then, beginning at the best of them, exchanges of bytes between
two layers, those first that cost least by the sum. What is measured decides.

Every combination of a key's and a value's candidate is another variant of the attention kernels, which a machine has to
compile. So plans are made of few of them: of those in the exact allocation, one after another is dropped whose absence
costs least, as long as the sum stays within `TOLERANCE` of the least.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvconvert.auto import NAME, Option, allocate
from kvconvert.auto.layers import (
    SearchedLayer,
    candidate_clip_ratios,
    candidate_treatments,
    measured_layer,
    searched_layers,
)
from kvconvert.auto.model import ExactText, SearchRun
from kvconvert.bundle.manifest import Allocation, LayerAllocation
from kvconvert.cache import lengths
from kvconvert.calibration.keys import TreatmentSearch
from kvconvert.calibration.protocol import LayerJob, significant
from kvconvert.calibration.scales import searched_sides
from kvconvert.errors import UnsupportedModelError, UsageError
from kvconvert.io.progress import progress_bar
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods.auto import KEY_CANDIDATES, VALUE_CANDIDATES, AutoSearch, Candidate, stated_context
from kvconvert.models.configuration import changing_rope, context_length
from kvconvert.models.positions import check_length
from kvconvert.recipes.recipe import LayerOverride, Recipe

UNIFORM = 3  # plans with the same choice in every layer that are measured
TOLERANCE = 0.02  # of the least sum, given for fewer combinations of candidates
TILT = 3.0  # how much more one kind of error counts in an allocation that is tried

Pair = tuple[Candidate, Candidate]
Plan = tuple[Pair, ...]
Losses = Sequence[Mapping[str, float]]


class MeasuredPlan(NamedTuple):
    """A plan for all layers, its divergence as the sum of its parts and as measured, and how many were measured."""

    plan: Plan
    predicted: float
    measured: float
    tried: int


@dataclass(frozen=True)
class PlanSearch:
    """The choice of a plan.

    Attributes:
        layers: the layers whose choices are searched.
        losses: by layer and candidate's name.
        budget: bytes, as costs are.
        measure: divergence of the whole model with a plan.
        repairs: how many plans may be measured after the first.
    """

    layers: Sequence[SearchedLayer]
    losses: Losses
    budget: int
    measure: Callable[[Plan], float]
    repairs: int

    def run(self) -> MeasuredPlan:
        """The best plan that was measured."""
        found: dict[Plan, float] = {}

        def measure(plan: Plan) -> float:
            if plan not in found:
                found[plan] = self.measure(plan)
            return found[plan]

        best = self._allocated(self.losses)
        measure(best)
        for plan in self._others():
            if len(found) > self.repairs:
                break
            measure(plan)
        best = min(found, key=lambda plan: (found[plan], self.predicted(plan)))
        improving = True
        while improving and len(found) <= self.repairs:
            improving = False
            for plan in self._exchanges(best):
                if len(found) > self.repairs:
                    break
                if plan not in found and measure(plan) < found[best]:
                    best, improving = plan, True
                    break
        return MeasuredPlan(best, self.predicted(best), found[best], len(found))

    def predicted(self, plan: Plan) -> float:
        """The sum of a plan's parts."""
        return sum(
            losses[key.name] + losses[value.name] for losses, (key, value) in zip(self.losses, plan, strict=True)
        )

    def cost(self, plan: Plan) -> int:
        """Bytes of a plan."""
        return sum(
            layer.costs[key.name] + layer.costs[value.name]
            for layer, (key, value) in zip(self.layers, plan, strict=True)
        )

    @cached_property
    def combinations(self) -> frozenset[Pair]:
        """Those that plans are made of, uniform ones aside."""
        best = self._best_of(self.losses, None)
        most, used = self.predicted(best) * (1 + TOLERANCE), frozenset(best)
        while len(used) > 1:
            fewer = [(self.predicted(plan), used - {pair}) for pair, plan in self._without(used)]
            if not fewer or (least := min(fewer, key=lambda entry: entry[0]))[0] > most:
                break
            used = least[1]
        return used

    def _without(self, used: frozenset[Pair]) -> Iterator[tuple[Pair, Plan]]:
        """Each combination, and the best plan that lacks it, if there is one; in an order of their own."""
        for pair in sorted(used, key=lambda pair: (pair[0].name, pair[1].name)):
            plan = self._best_of(self.losses, used - {pair})
            if plan is not None:
                yield pair, plan

    def _allocated(self, losses: Losses) -> Plan:
        return self._best_of(losses, self.combinations)

    def _best_of(self, losses: Losses, allowed: frozenset[Pair] | None) -> Plan | None:
        """The plan of smallest sum made of these combinations, or of any; None where none fits the budget."""
        pairs = [self._pairs(layer, allowed) for layer in self.layers]
        options = [
            [Option(sum(layer.costs[c.name] for c in pair), sum(own[c.name] for c in pair)) for pair in some]
            for layer, own, some in zip(self.layers, losses, pairs, strict=True)
        ]
        chosen = allocate(options, self.budget) if all(pairs) else None
        if chosen is None:
            return None
        return tuple(some[i] for some, i in zip(pairs, chosen.options, strict=True))

    @staticmethod
    def _pairs(layer: SearchedLayer, allowed: frozenset[Pair] | None) -> list[Pair]:
        return [pair for pair in layer.pairs() if allowed is None or pair in allowed]

    def _others(self) -> Iterator[Plan]:
        """Uniform plans, the best by the sum of their parts first, then tilted allocations."""
        common = [pair for pair in self.layers[0].pairs() if all(pair in layer.pairs() for layer in self.layers)]
        uniform = [(pair,) * len(self.layers) for pair in common]
        fitting = [plan for plan in uniform if self.cost(plan) <= self.budget]
        yield from sorted(fitting, key=self.predicted)[:UNIFORM]
        half = len(self.layers) // 2
        for tilted in (
            lambda number, name: name.startswith("K"),
            lambda number, name: name.startswith("V"),
            lambda number, name: number < half,
            lambda number, name: number >= half,
        ):
            yield self._allocated(
                [
                    {name: loss * (TILT if tilted(number, name) else 1) for name, loss in losses.items()}
                    for number, losses in enumerate(self.losses)
                ]
            )

    def _exchanges(self, plan: Plan) -> list[Plan]:
        """Plans in which one layer's choice differs, or two layers', the least loss by the sum first."""
        room = self.budget - self.cost(plan)
        moves = []  # (layer, pair, bytes more, loss more)
        for number, (layer, losses, now) in enumerate(zip(self.layers, self.losses, plan, strict=True)):
            for pair in self._pairs(layer, self.combinations):
                if (pair[0] == now[0]) != (pair[1] == now[1]):
                    more = sum(layer.costs[c.name] for c in pair) - sum(layer.costs[c.name] for c in now)
                    worse = sum(losses[c.name] for c in pair) - sum(losses[c.name] for c in now)
                    moves.append((number, pair, more, worse))
        ranked = [(worse, (move,)) for move in moves if move[2] <= room and (worse := move[3]) != 0]
        gains = [move for move in moves if move[3] < 0]
        savings = [move for move in moves if move[2] < 0]
        ranked += [
            (gain[3] + saving[3], (gain, saving))
            for gain in gains
            for saving in savings
            if gain[0] != saving[0] and gain[2] + saving[2] <= room
        ]
        ranked.sort(key=lambda entry: entry[0])
        plans = []
        for _, changes in ranked[: 4 * self.repairs]:
            changed = list(plan)
            for number, pair, *_ in changes:
                changed[number] = pair
            plans.append(tuple(changed))
        return plans


TEXT_LENGTH = 4096  # tokens of a sequence at most
DEFAULT_TOKENS, GPU_DEFAULT_TOKENS = 1024, 16384
CLIP_ROWS = 4  # calibration sequences on which clip ratios are chosen
REPEATED, PASSAGE = 4, 64  # one token of REPEATED is part of a repeated passage, and the passages' tokens


@dataclass(frozen=True)
class SearchTask:
    """The scope of a search, settled before anything is measured.

    Attributes:
        context: tokens of the sequence that the budget is for.
        text_length, text_rows: size of the text on which candidates are measured.
        layers: with their choices.
        budget: bytes of the whole cache, summed over `lengths(context)`.
        repairs, windows: see `AutoSearch`; `layers` have the shortest window.
    """

    context: int
    text_length: int
    text_rows: int
    layers: list[SearchedLayer]
    budget: int
    repairs: int
    windows: tuple[int, ...]

    def windowed(self, tokens: int) -> SearchTask:
        """The task with another window."""
        return replace(self, layers=[layer.windowed(tokens) for layer in self.layers])

    def extremes(self) -> tuple[int, int]:
        """Bytes of the cheapest and of the dearest plan."""
        sides = [[layer.costs[c.name] for c in side] for layer in self.layers for side in (layer.keys, layer.values)]
        return sum(map(min, sides)), sum(side[-1] for side in sides)

    def check_budget(self, auto: AutoSearch) -> None:
        """Refuse a budget that no plan or every plan keeps (UsageError)."""
        least, most = self.extremes()
        if least <= self.budget < most:
            return
        name, unit, shown = "kv_bits", "bits per value", self.bits
        if auto.kv_bits is None:
            name, unit, shown = "kv_bytes_per_token", "bytes per token", self.per_token
        low, high, given = shown(least), shown(most), getattr(auto, name)
        raise UsageError(
            f"`{name}` is {given:.6g}, and at {self.context:,} tokens this model's cache can be allocated from "
            f"{low:.4g} to below {high:.4g} {unit}; choose one in between."
        )

    @property
    def window(self) -> int:
        """The newest tokens that all layers keep in full precision."""
        return self.layers[0].scheme.key_recent_tokens

    @property
    def plain_bytes(self) -> int:
        """Bytes of the searched layers in 16 bits, summed likewise."""
        caches = [layer.cache_of(None) for layer in self.layers]
        return sum(cache.plain_bytes(length) for cache in caches for length in lengths(self.context))

    def bits(self, size: float) -> float:
        """A cache's bytes, summed over `lengths(context)`, as bits per value."""
        return 16 * size / self.plain_bytes

    def per_token(self, size: float) -> float:
        """The same as bytes per token of a sequence of `context`."""
        held = sum(layer.cache_of(None).plain_bytes(self.context) for layer in self.layers)
        return self.bits(size) / 16 * held / self.context


def search_task(config: PretrainedConfig, jobs: Sequence[LayerJob], recipe: Recipe, device: torch.device) -> SearchTask:
    """Settle what a recipe's search means for a model.

    Args:
        config: the configuration of the language model.
        jobs: the jobs of all layers.
        recipe: with `auto`.
        device: where measurements will be made.

    Raises:
        UsageError: the model has too few positions, or the budget cannot be met.
        UnsupportedModelError: layers read earlier layers' keys and values, or none can have a cache of ours.
    """
    auto: AutoSearch = recipe.auto
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"The recipe {recipe.name} cannot search for this {config.model_type} model, whose layers read earlier "
            "layers' keys and values; choose a preset."
        )
    positions = context_length(config)
    context = stated_context(positions) if auto.context is None else auto.context
    check_length("context", context, positions)
    default = GPU_DEFAULT_TOKENS if device.type == "cuda" else DEFAULT_TOKENS
    tokens = default if auto.tokens is None else auto.tokens
    length = min(context, TEXT_LENGTH, tokens)
    least = 2 * PAGE_SIZE
    if length < least:
        raise UsageError(
            f"`context` leaves sequences of {length:,} tokens to measure on, and {least} are needed to read a "
            "quantized page; give a longer one, or choose a preset."
        )
    layers = searched_layers(config, jobs, context)
    if not layers:
        raise UnsupportedModelError(
            f"The recipe {recipe.name} has nothing to search for: no layer of this {config.model_type} model can keep "
            "its keys and values in a kvconvert cache; choose the recipe weights-only."
        )
    windows = tuple(sorted(set(auto.windows)))
    task = SearchTask(context, length, tokens // length, layers, 0, auto.repairs, windows).windowed(windows[0])
    budget = task.plain_bytes / 16 * auto.kv_bits if auto.kv_bits else auto.kv_bytes_per_token / task.per_token(1)
    task = replace(task, budget=int(budget))
    task.check_budget(auto)
    return task


def allocated_recipe(recipe: Recipe, task: SearchTask, allocation: Allocation) -> Recipe:
    """The recipe with every searched layer's scheme stated."""
    found = {layer.index: layer for layer in allocation.layers}
    overrides = []
    for layer in task.layers:
        own = found[layer.index]
        layer = layer.windowed(allocation.candidates[own.keys]["key_recent_tokens"]).treated(own.treatments)
        chosen = [candidate for candidate in layer.candidates if candidate.name in (own.keys, own.values)]
        ratios = {f"{c.side}_clip_ratio": own.clip_ratios[c.name] for c in chosen if c.name in own.clip_ratios}
        fields = layer.scheme_of(*chosen).to_dict() | ratios | {"rotate_values": recipe.kv.rotate_values}
        scheme = type(recipe.kv).from_dict(fields)
        calibration = replace(recipe.calibration, calibrate_keys=False, window_bits=0)
        overrides.append(LayerOverride(index=[layer.index], kv=scheme, calibration=calibration))
    return recipe.model_copy(update={"layers": overrides})


def search_seconds(task: SearchTask, recipe: Recipe, run: SearchRun, samples: Tensor) -> float:
    """How long `find_allocation` will take with the same arguments, by timing what all layers repeat."""
    begun = time.perf_counter()
    measuring = _Measuring(task, recipe, run)
    measuring.read(samples)
    expected = measuring.seconds(task.layers)
    # The search begins as this does.
    return time.perf_counter() - begun + expected


def find_allocation(task: SearchTask, recipe: Recipe, run: SearchRun, samples: Tensor) -> Allocation:
    """Measure, allocate and commit what was found.

    Args:
        task: the task of the recipe.
        recipe: with `auto`.
        run: what is measured with.
        samples: int64 [rows, length], calibration sequences on which treatments and clip ratios are chosen.
    """
    measuring = _Measuring(task, recipe, run)
    table = measuring.table(samples)
    allocation = _record(*measuring.plan(table), table, run)
    run.store.commit_measurement(NAME, allocation.model_dump(mode="json"))
    return allocation


def with_repeats(ids: Tensor) -> Tensor:
    """Sequences, int64 [rows, length], whose last quarter repeats passages from all over what was before."""
    count = ids.shape[1] // (REPEATED * PASSAGE)
    plain = ids[:, : ids.shape[1] - count * PASSAGE]
    passages = plain[:, : plain.shape[1] // PASSAGE * PASSAGE].unflatten(1, (-1, PASSAGE))
    which = torch.linspace(0, passages.shape[1] - 1, count, device=ids.device).long()
    return torch.cat([plain, passages[:, which].flatten(1)], 1)


# Treatments of keys by candidate, the layer with them, and clip ratios by candidate.
_Fitted = tuple[dict[str, dict[str, Any]], SearchedLayer, dict[str, float]]


@dataclass
class _Measuring:
    """The measurements of one search."""

    task: SearchTask
    recipe: Recipe
    run: SearchRun
    text: ExactText | None = None
    clip_text: ExactText | None = None
    measured: dict[int, TreatmentSearch] = field(default_factory=dict)
    fitted: dict[int, _Fitted] = field(default_factory=dict)  # the layer that was timed

    def read(self, samples: Tensor) -> None:
        """Run the model as it is on the texts."""
        self.run.say(f"Running the source on {self.run.text.ids.numel():,} tokens.")
        self.clip_text = self.run.model.read(samples, samples.shape[1])
        self.text = self.run.model.read(with_repeats(self.run.text.ids), PAGE_SIZE)

    def table(self, samples: Tensor) -> list[LayerAllocation]:
        """Treatment, divergence and clip ratio of every candidate, layer by layer; `keys` and `values` are still empty.

        The task's layers are treated from then on.
        """
        layers = self.task.layers
        self.read(samples)
        self._announce()
        done = []
        known = len(layers) - len(self._left())
        # Layers, and not candidates: fitting a layer's clip ratios may take longer than all of its candidates.
        with progress_bar(
            total=len(layers), desc="layers", unit="layer", shown=self.run.progress, initial=known
        ) as bar:
            for number, layer in enumerate(layers):
                name = f"layer-{layer.index:05d}"
                committed = self.run.store.measurement(name)
                if committed is None:
                    treatments, layer, ratios = self.fitted.pop(layer.index, None) or self._fitted(layer)
                    kl = {}
                    for candidate in layer.candidates:
                        kl[candidate.name] = self._divergence({layer: (candidate,)}, {layer.index: ratios})
                    bar.update()
                    committed = {"index": layer.index, "keys": "", "values": "", "kl": kl, "clip_ratios": ratios}
                    committed["treatments"] = treatments
                    self.run.store.commit_measurement(name, committed)
                done.append(LayerAllocation.model_validate(committed))
                layers[number] = layer.treated(done[-1].treatments)
        return done

    def plan(self, table: list[LayerAllocation]) -> tuple[SearchTask, MeasuredPlan]:
        """The best plan of the whole model, and the task with its window.

        Raises:
            UsageError: treatments of keys take bytes, with which no plan keeps the budget.
        """
        self.task.check_budget(self.recipe.auto)
        ratios, losses = {layer.index: layer.clip_ratios for layer in table}, [layer.kl for layer in table]
        known = self.run.store.measurement("plans") or {}
        tasks = [self.task.windowed(tokens) for tokens in self.task.windows[: self.task.repairs + 1]]
        tasks = [task for task in tasks if task.extremes()[0] <= task.budget]
        with progress_bar(total=self.task.repairs + 1, desc="plans", unit="plan", shown=self.run.progress) as bar:

            def best(task: SearchTask, repairs: int) -> MeasuredPlan:
                def measure(plan: Plan) -> float:
                    names = [[key.name, value.name] for key, value in plan]
                    key = hashlib.sha256(json.dumps([task.window, names]).encode()).hexdigest()
                    if key not in known:
                        known[key] = self._divergence(dict(zip(task.layers, plan, strict=True)), ratios)
                        self.run.store.commit_measurement("plans", known)
                        bar.update()
                    return known[key]

                return PlanSearch(task.layers, losses, task.budget, measure, repairs).run()

            # The window by the best sum of its parts, then all else with that window.
            chosen = min(tasks, key=lambda task: best(task, 0).measured)
            found = best(chosen, self.task.repairs + 1 - len(tasks))
        return chosen, found._replace(tried=found.tried + len(tasks) - 1)

    def _divergence(
        self, chosen: dict[SearchedLayer, tuple[Candidate, ...]], ratios: dict[int, dict[str, float]]
    ) -> float:
        caches = {
            layer.index: layer.cache(*candidates, clip_ratios=ratios[layer.index], measured=self._fitting(layer))
            for layer, candidates in chosen.items()
            if not all(candidate.exact for candidate in candidates)
        }
        return significant(self.run.model.divergence(self.text, caches)) if caches else 0.0

    def _fitting(self, layer: SearchedLayer) -> TreatmentSearch:
        """Measurements that a layer's candidates are fitted with, without the sample they were made from."""
        if layer.index not in self.measured:
            self.measured[layer.index] = self._measured(layer)
            self.measured[layer.index].drop_sample()
        return self.measured[layer.index]

    def _measured(self, layer: SearchedLayer) -> TreatmentSearch:
        model, index = self.run.model, layer.index
        call = model.attention_call(self.clip_text, index)
        weight = embeddings = None
        if layer.output is not None:
            weight = model.layers[index].get_submodule(layer.output).weight
            embeddings = self.clip_text.embeddings[index]
        return measured_layer(layer, call, weight, embeddings, changing_rope(model.model.config))

    def _fitted(self, layer: SearchedLayer) -> _Fitted:
        """Treatments of keys, the layer with them, and clip ratios, by candidate's name."""
        sides = dict(zip(("key", "value"), searched_sides(self.recipe.kv, self.recipe.calibration), strict=True))
        measured = self._measured(layer)
        found = candidate_treatments(layer, measured)
        layer = layer.treated(found)
        ratios = candidate_clip_ratios(layer, measured, sides)
        measured.drop_sample()
        self.measured[layer.index] = measured
        return found, layer, ratios

    def _left(self) -> list[SearchedLayer]:
        """Layers that have not been measured."""
        return [each for each in self.task.layers if self.run.store.measurement(f"layer-{each.index:05d}") is None]

    def _announce(self) -> None:
        """Say how long all of it will take."""
        left = self._left()
        self.run.say("Timing the measurement of a layer.")
        rows, length = self.text.ids.shape
        plans = f"up to {self.task.repairs + 1} plans of the whole model"
        what = f"{sum(len(layer.candidates) for layer in left)} candidates in {len(left)} layers, then {plans}"
        time_left = _duration(self.seconds(left))
        self.run.say(f"Measuring {what if left else plans} on {rows} x {length:,} tokens: about {time_left}.")

    def seconds(self, left: Sequence[SearchedLayer]) -> float:
        """Estimate the seconds of measuring layers and plans: the first layer and one candidate of it are timed."""
        first = (left or self.task.layers)[0]
        taken = [0.0, 0.0]
        for _ in range(2):  # the first run is slower than all others
            start = time.perf_counter()
            self.fitted[first.index] = _, treated, ratios = self._fitted(first)
            middle = time.perf_counter()
            self._divergence({treated: (treated.keys[0],)}, {first.index: ratios})
            taken = [middle - start, time.perf_counter() - middle]
            if sum(taken) > 10:
                break
        # What a run costs that begins at the layer that it quantizes; embeddings and head are in all.
        count = self.run.model.model.config.get_text_config().num_hidden_layers
        begins = [(1 - 0.8 * layer.index / count) if self.run.model.starts_late else 1 for layer in left]
        candidates = sum(len(layer.candidates) * share for layer, share in zip(left, begins, strict=True))
        return len(left) * taken[0] + (candidates + (self.task.repairs + 1) * 2) * taken[1]


def _record(task: SearchTask, best: MeasuredPlan, table: list[LayerAllocation], run: SearchRun) -> Allocation:
    chosen = [
        own.model_copy(update={"keys": key.name, "values": value.name})
        for own, (key, value) in zip(table, best.plan, strict=True)
    ]
    size = sum(
        layer.costs[key.name] + layer.costs[value.name]
        for layer, (key, value) in zip(task.layers, best.plan, strict=True)
    )
    every = KEY_CANDIDATES + VALUE_CANDIDATES
    fields = {c.name: c.fields | {f"{c.side}_recent_tokens": task.window} for c in every}
    return Allocation(
        context=task.context,
        budget_bytes_per_token=task.per_token(task.budget),
        bytes_per_token=task.per_token(size),
        bits_per_value=task.bits(size),
        candidates={name: fields[name] for layer in task.layers for name in layer.costs},
        layers=chosen,
        predicted_kl=significant(best.predicted),
        measured_kl=best.measured,
        plans=best.tried,
        data=run.text.info,
        dtype=run.dtype,
    )


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.0f} minutes"
