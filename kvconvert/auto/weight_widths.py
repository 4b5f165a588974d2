"""How many bits the weights of each Linear get, for an average that the recipe states: measure, allocate, verify.

And which Linears are kept at 16 bits, for the bytes that `kept_share` allows: measure at 4 bits, allocate.

Linears that read one input get one width, so that the runtime can compute them as one product. Each such unit alone is
rounded to nearest at every width, and the divergence of the whole model from itself is measured on calibration text
that calibration's own samples leave over; the allocation of the sum is exact. Whole allocations are measured beside the
widest uniform one that fits, and what is measured decides. Scales, clips and compensation come later and change every
unit's error; the order in which units are sensitive is taken from rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from kvconvert.auto import KEPT_NAME, WEIGHTS_NAME, KeptLinears, Option, allocate
from kvconvert.auto.model import ExactText, SearchRun
from kvconvert.bundle.manifest import WeightAllocation, WeightUnit
from kvconvert.calibration.activations import point_of
from kvconvert.calibration.protocol import LayerJob, significant
from kvconvert.errors import UnsupportedModelError, UsageError
from kvconvert.io.progress import progress_bar
from kvconvert.kernels.linear.awq_format import fake_quantize_weight
from kvconvert.methods.awq import AWQ_BITS, BITS, KEPT_BITS, WeightsRecipe, WeightsRule
from kvconvert.models.configuration import context_length
from kvconvert.recipes.recipe import Recipe

TOKENS, GPU_TOKENS = 2048, 16384
LENGTH = 1024  # tokens of a sequence at most
SCALE_BITS = 16
# Number of rows, tokens per row, and stride of scored tokens in `find_kept`: small, as only the order of units counts.
KEPT_TEXT, GPU_KEPT_TEXT, KEPT_STRIDE = (2, 256), (4, 1024), 4
TILT = 3.0  # how much more the earlier, or the later, half counts in an allocation that is tried


@dataclass(frozen=True)
class Unit:
    """Linears that get the same width.

    Attributes:
        layer: number of the decoder layer.
        linears: names in the loaded model.
        numbers: weights in all of them.
        costs: stored bytes by width: codes, zero points and scales.
    """

    layer: int
    linears: tuple[str, ...]
    numbers: int
    costs: Mapping[int, int] = field(hash=False)


def weight_units(model: PreTrainedModel, jobs: Sequence[LayerJob]) -> list[Unit]:
    """The units of a model, on any device, in the order of its layers.

    Raises:
        UnsupportedModelError: a Linear is a part of a packed tensor of experts, which cannot be rounded by itself.
    """
    units = []
    for job in jobs:
        points: dict[str, list[str]] = {}
        for linear in job.structure.linears:
            points.setdefault(point_of(job.structure, linear), []).append(linear)
        for linears in points.values():
            names = tuple(f"{job.name}.{linear}" for linear in linears)
            try:
                modules = [model.get_submodule(name) for name in names]
            except AttributeError as error:
                raise UnsupportedModelError(
                    f"The experts of this {model.config.get_text_config().model_type} model are one tensor, so "
                    "`weight_bits` cannot be spent on them one by one; state widths in [[weights.modules]]."
                ) from error
            numbers = sum(module.in_features * module.out_features for module in modules)
            groups = numbers // job.weights.group_size
            costs = {bits: (bits * numbers + (SCALE_BITS + bits) * groups) // 8 for bits in BITS}
            units.append(Unit(job.index, names, numbers, costs))
    return units


def budget_of(units: Sequence[Unit], average_bits: float) -> int:
    """Bytes that an average of stored bits per weight allows (UsageError where no allocation has it)."""
    numbers = sum(unit.numbers for unit in units)
    low, high = (8 * sum(pick(unit.costs.values()) for unit in units) / numbers for pick in (min, max))
    if not low <= average_bits <= high:
        raise UsageError(
            f"`weight_bits` is {average_bits:.6g}, and with scales and zero points the weights of this model can take "
            f"{low:.4g} to {high:.4g} bits on average; choose one in between."
        )
    return math.floor(average_bits * numbers / 8)


def allocated_widths(recipe: Recipe, found: WeightAllocation) -> Recipe:
    """The recipe with the width of every Linear stated."""
    rules = [WeightsRule(match=name, bits=unit.bits) for unit in found.units for name in unit.linears]
    return recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"modules": rules})})


def text_size(config: PretrainedConfig, device: torch.device) -> tuple[int, int]:
    """Rows and tokens in each of the text on which widths are measured."""
    length = min(LENGTH, context_length(config) or LENGTH)
    return max(1, (GPU_TOKENS if device.type == "cuda" else TOKENS) // length), length


def find_widths(units: list[Unit], weights: WeightsRecipe, run: SearchRun) -> WeightAllocation:
    """Measure, allocate and commit what was found.

    Args:
        units: the units of the model.
        weights: the weights' recipe, with `average_bits`.
        run: what is measured with.
    """
    text = run.text
    search = _Search(run, units, weights.group_size, run.model.read(text.ids, 1))
    run.say(
        f"Measuring {len(units)} groups of Linears at {len(BITS)} widths on {text.info.samples} x {text.info.length:,} "
        f"tokens for {weights.average_bits:g} bits per weight."
    )
    tables = search.tables()
    best, measured, tried = search.best(tables, budget_of(units, weights.average_bits))
    allocation = WeightAllocation(
        budget_bits_per_weight=weights.average_bits,
        bits_per_weight=8 * search.cost(best) / sum(unit.numbers for unit in units),
        units=[
            WeightUnit(layer=unit.layer, linears=list(unit.linears), bits=bits, kl=table)
            for unit, bits, table in zip(units, best, tables, strict=True)
        ],
        predicted_kl=significant(sum(table[str(bits)] for table, bits in zip(tables, best, strict=True))),
        measured_kl=measured,
        allocations=tried,
        data=text.info,
        dtype=run.dtype,
    )
    run.store.commit_measurement(WEIGHTS_NAME, allocation.model_dump(mode="json"))
    return allocation


def kept_text(ids: Tensor, device: torch.device) -> Tensor:
    """The part of calibration samples [rows, length] on which `find_kept` measures."""
    rows, length = GPU_KEPT_TEXT if device.type == "cuda" else KEPT_TEXT
    return ids[:: max(1, len(ids) // rows)][:rows, :length]


def find_kept(units: list[Unit], weights: WeightsRecipe, others: int, run: SearchRun) -> KeptLinears:
    """The Linears to keep at 16 bits, half of the weights at most: those that take most off the sum of divergences.

    Args:
        units: the units of the model.
        weights: the weights' recipe, with `kept_share`.
        others: bytes of the bundle beside its Linears.
        run: what is measured with.
    """
    (bits,) = AWQ_BITS
    costs = [KEPT_BITS * unit.numbers // 8 - unit.costs[bits] for unit in units]
    budget = math.floor(weights.kept_share * (others + sum(unit.costs[bits] for unit in units)))
    budget = min(budget, sum(costs) // 2)  # where embeddings are nearly all, everything would have room
    run.say(
        f"Measuring {len(units)} groups of Linears at {bits} bits, to keep those that lose most at 16: "
        f"up to {budget / 1e6:,.1f} MB more ([weights] kept_share = {weights.kept_share:g})."
    )
    search = _Search(run, units, weights.group_size, run.model.read(run.text.ids, 1, KEPT_STRIDE))
    losses = [table[str(bits)] for table in search.tables(AWQ_BITS)]
    options = [[Option(0, loss), Option(cost, 0.0)] for cost, loss in zip(costs, losses, strict=True)]
    chosen = allocate(options, budget).options
    names = [name for unit, choice in zip(units, chosen, strict=True) if choice for name in unit.linears]
    kept = KeptLinears(linears=names)
    run.store.commit_measurement(KEPT_NAME, kept.model_dump(mode="json"))
    return kept


def kept_seconds(units: list[Unit], weights: WeightsRecipe, run: SearchRun) -> float:
    """How long `find_kept` will take with the same arguments, by timing a unit of the middle layer."""
    begun = time.perf_counter()
    search = _Search(run, units, weights.group_size, run.model.read(run.text.ids, 1, KEPT_STRIDE))
    read, unit = time.perf_counter() - begun, units[len(units) // 2]
    search._divergence({unit: AWQ_BITS[0]}, unit.layer)
    return read + len(units) * (time.perf_counter() - begun - read)


def kept_recipe(recipe: Recipe, kept: KeptLinears) -> Recipe:
    """The recipe with what `find_kept` found."""
    rules = [WeightsRule(match=name, bits=KEPT_BITS) for name in kept.linears]
    return recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"modules": rules})})


@dataclass
class _Search:
    run: SearchRun
    units: list[Unit]
    group_size: int
    text: ExactText

    def tables(self, widths: Sequence[int] = BITS) -> list[dict[str, float]]:
        """Divergence by width, of each unit alone; committed layer by layer."""
        layers = sorted({unit.layer for unit in self.units})
        tables = []
        for layer in progress_bar(layers, desc="widths", unit="layer", shown=self.run.progress):
            name = f"weights-{layer:05d}"
            committed = self.run.store.measurement(name)
            if committed is None:
                own = [unit for unit in self.units if unit.layer == layer]
                measured = [{str(bits): self._divergence({unit: bits}, layer) for bits in widths} for unit in own]
                committed = {"kl": measured}
                self.run.store.commit_measurement(name, committed)
            tables += committed["kl"]
        return tables

    def best(self, tables: Sequence[Mapping[str, float]], budget: int) -> tuple[list[int], float, int]:
        """Widths with the smallest measured divergence, that divergence, and the number of allocations tried."""
        middle = (self.units[-1].layer + 1) / 2
        weights = [
            [1.0] * len(self.units),
            [TILT if unit.layer < middle else 1.0 for unit in self.units],
            [TILT if unit.layer >= middle else 1.0 for unit in self.units],
        ]
        tried = {tuple(self._allocated(tables, tilt, budget)) for tilt in weights}
        uniform = [[bits] * len(self.units) for bits in BITS]
        tried |= {tuple(widths) for widths in uniform if self.cost(widths) <= budget and widths[0] >= 3}
        measured = {w: self._divergence(dict(zip(self.units, w, strict=True)), 0) for w in sorted(tried)}
        best = min(measured, key=lambda w: (measured[w], self.cost(w)))
        return list(best), measured[best], len(measured)

    def cost(self, widths: Sequence[int]) -> int:
        """Stored bytes."""
        return sum(unit.costs[bits] for unit, bits in zip(self.units, widths, strict=True))

    def _allocated(self, tables: Sequence[Mapping[str, float]], tilt: Sequence[float], budget: int) -> list[int]:
        options = [
            [Option(unit.costs[bits], factor * table[str(bits)]) for bits in BITS]
            for unit, table, factor in zip(self.units, tables, tilt, strict=True)
        ]
        return [BITS[i] for i in allocate(options, budget).options]

    def _divergence(self, chosen: Mapping[Unit, int], first: int) -> float:
        with self._rounded_weights(chosen):
            return significant(self.run.model.divergence(self.text, {}, first))

    @contextmanager
    def _rounded_weights(self, chosen: Mapping[Unit, int]) -> Iterator[None]:
        kept: list[tuple[nn.Module, Tensor]] = []
        try:
            for unit, bits in chosen.items():
                for name in unit.linears:
                    module = self.run.model.model.get_submodule(name)
                    kept.append((module, module.weight.data))
                    module.weight.data = fake_quantize_weight(module.weight.data, bits, self.group_size)
            yield
        finally:
            for module, weight in kept:
                module.weight.data = weight
