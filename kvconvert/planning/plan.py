"""`plan`: what converting and serving a model takes, from its headers and configuration, and a probe of one layer.

Sizes of layers and of what calibration makes of them are exact; memory and time are the probe's.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from torch import nn

from kvconvert.arguments import Count, ModelPlace, SampleLength, checked
from kvconvert.auto.search import search_task
from kvconvert.auto.weight_widths import budget_of, weight_units
from kvconvert.cache import LayerCache, ModelCache
from kvconvert.calibration.activations import input_points
from kvconvert.calibration.protocol import LayerJob
from kvconvert.convert.checks import check_packed, check_purpose, check_recipe
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.passes import layer_jobs
from kvconvert.convert.pipeline import kept_bytes, kept_tensors, make_runner, with_fitted_weights
from kvconvert.convert.scores import predicts, rows_read
from kvconvert.data.samples import check_amount, sample_shape
from kvconvert.data.sources import Data, check_sources
from kvconvert.errors import counted
from kvconvert.io.process import anonymous_bytes
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorheader import nbytes
from kvconvert.methods import KVScheme
from kvconvert.methods.auto import DEFAULT_CONTEXT, AutoSearch, stated_context
from kvconvert.methods.awq import KEPT_BITS, WeightsRecipe
from kvconvert.methods.keys import treatments
from kvconvert.methods.minikv import FORMULAS, spread_ratios
from kvconvert.models.configuration import context_length, model_cache
from kvconvert.models.devices import Device, choose_device
from kvconvert.models.experts import expert_modules
from kvconvert.models.positions import check_length
from kvconvert.models.processors import load_tokenizer
from kvconvert.models.source import SourceModel, open_source
from kvconvert.models.structure import LayerStructure
from kvconvert.planning.probe import LayerProbe, run_probe
from kvconvert.recipes.recipe import Recipe, RecipeNamed
from kvconvert.runtime.hf.states import bytes_of_states, state_bits
from kvconvert.tables import text_table


@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer.

    Attributes:
        structure: names of its parts.
        parameters: numbers in it.
        linears: (outputs, inputs) of each Linear, by its name within the layer.
        stored_bytes: the bytes of the tensors that calibration makes of it.
        mapped_parameters, mapped_stored_bytes: what of them is experts' and kept in files, see
            `LayerRunner.maps_experts`.
    """

    structure: LayerStructure
    parameters: int
    linears: Mapping[str, tuple[int, int]]
    stored_bytes: int
    mapped_parameters: int = 0
    mapped_stored_bytes: int = 0

    @property
    def layer_bytes(self) -> int:
        """Bytes of its weights in float32, as they are calibrated; those in files left out."""
        return 4 * (self.parameters - self.mapped_parameters)

    @classmethod
    def of(cls, runner: LayerRunner, index: int, weights: WeightsRecipe) -> LayerSizes:
        """Measure a layer of a model on the meta device."""
        structure = runner.structure(index)
        name = runner.layer_name(index)
        layer = runner.model.get_submodule(name)
        linears = {
            linear: tuple(layer.get_submodule(linear).weight.shape)
            for linear in structure.linears
            if isinstance(layer.get_submodule(linear), nn.Module)
        }
        copied = () if weights.quantizes else expert_modules(layer)
        stored = mapped_stored = 0
        mapped = expert_modules(layer) if runner.maps_experts(index) else ()
        for key, tensor in layer.state_dict().items():
            module, _, part = key.rpartition(".")
            if key.startswith(copied):
                continue
            if weights.quantizes and part == "weight" and module in linears:
                if weights.average_bits is None:
                    bits = weights.bits_of(f"{name}.{module}", index)
                    own = tensor.numel() * _itemsize(runner, f"{name}.{key}")
                    size = own if bits == KEPT_BITS else packed_bytes(*linears[module], bits, weights.group_size)
                else:  # which a search spends
                    size = int(weights.average_bits * tensor.numel() / 8)
                mapped_stored += size if key.startswith(mapped) else 0
            else:
                size = tensor.numel() * _itemsize(runner, f"{name}.{key}")
            stored += size
        numbers = {key: parameter.numel() for key, parameter in layer.named_parameters()}
        in_files = sum(number for key, number in numbers.items() if key.startswith(mapped))
        return cls(structure, sum(numbers.values()), linears, stored, in_files, mapped_stored)


def packed_bytes(outputs: int, inputs: int, bits: int, group_size: int) -> int:
    """Bytes of a Linear's codes, zeros and float16 scales; see `kvconvert.kernels.linear.awq_format`."""
    groups = inputs // group_size
    return (inputs + groups) * outputs * bits // 8 + 2 * groups * outputs


def _itemsize(runner: LayerRunner, name: str) -> int:
    """Bytes per number of a tensor in the source."""
    source = runner.source
    stored = source.tensor_names.stored.get(name)
    info = source.tensors[stored] if stored is not None else next(iter(source.tensors.values()))
    return nbytes(TensorInfo(dtype=info.dtype, shape=[1]))


CONTEXT_LIMIT = 2**30
CHUNK_TOKENS = 2048  # of a prompt that is read at once, for the allowance
RUNTIME_BYTES = 600_000_000  # CUDA context, libraries' workspaces and compiled kernels
_HASHED = 2**25  # bytes on which the speed of checksums is measured


@dataclass(frozen=True)
class MemoryEstimate:
    """Peaks in bytes.

    Attributes:
        calibrate, export: anonymous host memory.
        device: the GPU's memory while calibrating; None on a CPU.
        source: "probe" where the largest layer was calibrated and watched; "headers" where nothing was, and what
            calibration takes is at least its weights.
    """

    calibrate: int
    export: int
    device: int | None
    source: str


@dataclass(frozen=True)
class Disk:
    """Bytes of files.

    Attributes:
        bundle: the exact bytes of the bundle's weight tensors; its KV plan, tokenizer and manifest are small.
        work: the bytes of the complete working directory.
        work_peak: while layers are calibrated, with the inputs of two layers, and one layer's experts where they are
            kept in files.
    """

    bundle: int
    work: int
    work_peak: int


@dataclass(frozen=True)
class Cache:
    """The key-value cache of one sequence of `context` tokens.

    Attributes:
        context: tokens.
        bytes_per_token, bits_per_value: as `kvconvert.cache` defines them; None for a
            model without keys and values.
        plain_bytes_per_token: in 16 bits.
        states: bytes of recurrent states, whatever the length; 0 for a model without any, None where they were not
            measured.
        basis: what the figures rest on, for people.
        left: why layers have no pages of keys and values, and how many of them.
    """

    context: int
    bytes_per_token: float
    bits_per_value: float | None
    plain_bytes_per_token: float
    states: int | None
    basis: str
    left: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Resources for converting and serving a model; see the attributes' classes.

    Attributes:
        model, recipe: as named.
        samples, length: calibration sequences and tokens in each.
        device: the device of the calibration.
        batch: sequences that are served at once.
        gpu_memory: bytes of the GPU that serves, or None; `fit` says what fits in it.
        seconds: the seconds for calibrate and export together, from the probe; None without one.
        search_seconds: the part of them that the search for the cache's layout may take, or the fits of what predicts
            scores; None without either or a probe.
        searched: passes of the whole model in that search, at most; 0 where the recipe states the layout.
        search_tokens: tokens in each of them.
        searches_weights: whether the widths of weights are searched, too, which is not in `seconds`.
        read_twice: tokens that the whole model reads twice, for networks that predict scores (KVzip); 0 for others.
    """

    model: str
    recipe: str
    samples: int
    length: int
    device: str
    batch: int
    memory: MemoryEstimate
    disk: Disk
    cache: Cache
    gpu_memory: int | None
    fit: Fit | None
    seconds: float | None
    search_seconds: float | None
    searched: int
    search_tokens: int
    searches_weights: bool = False
    read_twice: int = 0


@checked
def plan(
    model: ModelPlace,
    *,
    recipe: RecipeNamed = "default",
    gpu_memory: Annotated[Count, "a number of bytes"] | None = None,
    context: Count | None = None,
    batch: Count = 1,
    samples: Count | None = None,
    seq_len: SampleLength | None = None,
    device: Device | None = None,
    data: Data | None = None,
    seed: int = 0,
    probe: bool = True,
    progress: bool = True,
) -> Plan:
    """Work out what `calibrate`, `export` and serving will take; nothing is written but a probe's temporary files.

    Args:
        model: directory or Hub id, which is fetched as `calibrate` fetches it.
        recipe: a `Recipe`, the name of a preset, or the path of a recipe file.
        gpu_memory: bytes of the GPU that will serve the bundle.
        context: tokens of a sequence; None takes 4,096, or the model's positions if fewer.
        batch: sequences served at once.
        samples, seq_len, device, data, seed: as for `calibrate`.
        probe: calibrate one layer on few sequences, for the time and the memory; without, a lower bound of memory.
        progress: show messages on stderr.

    Raises:
        KvconvertError: one of its children, as `calibrate` with the same arguments.
    """
    data = str(data) if isinstance(data, Path) else data
    check_sources(data)
    recipe = Recipe.of(recipe)
    recipe = recipe.with_budget()  # refuses a search without a budget
    target = choose_device(device)
    device = target.type
    source = open_source(str(model))
    check_purpose(source.config, recipe)
    load_tokenizer(source.directory)  # is part of the process's own memory
    plain = anonymous_bytes() or 0
    # Finding the layers' structure runs one, which `export` does not.
    runner = make_runner(source, recipe.weights, target)
    runner.check_headers()
    check_recipe(runner, recipe)
    check_packed(runner, recipe)
    if runner.architecture is not None:
        recipe = with_fitted_weights(runner, recipe, False)
    positions = context_length(runner.config)
    samples, length = sample_shape(source, data, samples, seq_len, seed)
    context = stated_context(positions) if context is None else context
    check_length("seq_len", length, positions)
    check_length("context", context, positions)
    own = anonymous_bytes() or 0
    check_amount(source, data, samples, length, seed)
    kept = kept_bytes(runner, kept_tensors(runner, recipe.weights))
    jobs = layer_jobs(runner, recipe)
    task = None if recipe.auto is None else search_task(runner.config, jobs, recipe, target)
    if recipe.weights.average_bits is not None:
        budget_of(weight_units(runner.model, jobs), recipe.weights.average_bits)  # refuses what cannot be spent
    layers = _layers(runner, recipe)
    largest = max(range(len(layers)), key=lambda index: layers[index].parameters, default=None)
    probed: LayerProbe | None = None
    if probe and largest is not None:
        request = {
            "model": str(model),
            "recipe": recipe.to_dict(),
            "data": data,
            "samples": samples,
            "length": length,
            "seed": seed,
            "device": device,
            "layer": largest,
        }
        probed = run_probe(request, progress)
    share = recipe.weights.kept_share or 0.0
    disk = _disk(layers, kept, runner.config.hidden_size, samples * length, recipe.weights.compensates, share)
    weights = disk.bundle
    planned = recipe_cache(runner, recipe, jobs)
    bits = state_bits(runner.model, [job.scheme for job in jobs])
    states = bytes_of_states(runner.model, bits, torch.bfloat16, target)
    return Plan(
        model=str(model),
        recipe=recipe.name,
        samples=samples,
        length=length,
        device=device,
        batch=batch,
        memory=_memory(runner, layers, probed, (own, plain), (samples, length), target.type),
        disk=disk,
        cache=_cache(planned, context, states, jobs),
        gpu_memory=gpu_memory,
        fit=None
        if gpu_memory is None
        else fit(
            gpu_memory,
            weights,
            planned,
            context,
            batch,
            positions,
            lambda rows: _allowance(runner, layers, rows),
            states or 0,
        ),
        seconds=None if not probe else _seconds(source, layers, probed, disk, samples * length),
        search_seconds=None if probed is None else probed.search_seconds,
        searched=0 if task is None else sum(len(layer.candidates) for layer in task.layers) + task.repairs + 1,
        search_tokens=0 if task is None else task.text_rows * task.text_length,
        searches_weights=recipe.weights.average_bits is not None,
        read_twice=rows_read(length, target) * length if predicts(jobs) else 0,
    )


def _layers(runner: LayerRunner, recipe: Recipe) -> list[LayerSizes]:
    """Sizes of the layers of a model whose structure is known; layers of others stay in the source, which is copied."""
    if runner.architecture is None:
        return []
    return [LayerSizes.of(runner, index, recipe.weights) for index in range(runner.num_layers)]


def _memory(
    runner: LayerRunner,
    layers: list[LayerSizes],
    probed: LayerProbe | None,
    own: tuple[int, int],  # anonymous bytes with the layers' structure, and without
    samples: tuple[int, int],
    device: str,
) -> MemoryEstimate:
    largest = max((sizes.layer_bytes for sizes in layers), default=0)
    host, on_device = (own[0], largest) if device == "cuda" else (own[0] + largest, None)
    measured = None
    if probed is not None:
        measured, on_device = probed.peak_anonymous_bytes, probed.peak_device_bytes
    shape = (*samples, runner.config.hidden_size)
    if on_device is not None and runner.has_room(shape):
        on_device += 2 * 4 * math.prod(shape)  # the inputs of two layers, of which the probe has a few sequences
    return MemoryEstimate(
        calibrate=host if measured is None else measured,
        export=own[1],
        device=on_device,
        source="headers" if measured is None else "probe",
    )


def _disk(
    layers: list[LayerSizes], kept: int, hidden_size: int, tokens: int, compensated: bool, kept_share: float
) -> Disk:
    packed = sum(sizes.stored_bytes for sizes in layers)
    packed += int(kept_share * (kept + packed))  # at most
    hidden = 4 * tokens * hidden_size * min(2, len(layers))
    if compensated and all(sizes.structure.writers for sizes in layers):  # see `RunnerInputs`
        widths = [sum(sizes.linears[point][1] for point in input_points(sizes.structure)) for sizes in layers]
        hidden = 2 * hidden + 4 * tokens * (max(widths, default=0) + 2 * hidden_size)
    mapped = max((4 * sizes.mapped_parameters + sizes.mapped_stored_bytes for sizes in layers), default=0)
    return Disk(bundle=kept + packed, work=packed, work_peak=packed + hidden + mapped)


def _cache(planned: ModelCache, context: int, states: int | None, jobs: Sequence[LayerJob]) -> Cache:
    return Cache(
        context=context,
        bytes_per_token=planned.bytes(context) / context,
        bits_per_value=planned.bits_per_value(context),
        plain_bytes_per_token=planned.plain_bytes(context) / context,
        states=states,
        basis=_basis(planned, jobs),
        left=dict(Counter(job.reason for job in jobs if job.scheme is None and job.reason)),
    )


def _basis(planned: ModelCache, jobs: Sequence[LayerJob]) -> str:
    if planned.budget_bits is not None:
        return "what the search may spend"
    if any(_treated(job) != job.scheme for job in jobs):
        return "at most, everything in it included: calibration chooses how keys are stored"
    only = {layer.scheme.only_tokens() for layer in planned.layers if layer.scheme is not None} - {None}
    return "everything in it included" + (f", of {' and '.join(sorted(only))} tokens alone" if only else "")


def _allowance(runner: LayerRunner, layers: list[LayerSizes], rows: int) -> int:
    """Bytes beside weights and cache: CUDA context, a prompt chunk's activations in 16 bits, logits in float32."""
    hidden = runner.config.hidden_size
    widest = max((inputs for sizes in layers for _, inputs in sizes.linears.values()), default=4 * hidden)
    return RUNTIME_BYTES + 2 * CHUNK_TOKENS * (6 * hidden + 3 * widest) + 8 * rows * runner.config.vocab_size


def _seconds(
    source: SourceModel, layers: list[LayerSizes], probed: LayerProbe | None, disk: Disk, tokens: int
) -> float:
    """Seconds of calibrate and export: layers as the probe's, the rest at the speed of a checksum in memory."""
    block = bytes(_HASHED)
    begun = time.perf_counter()
    hashlib.sha256(block)
    per_byte = (time.perf_counter() - begun) / _HASHED
    stored = sum(source.file(file).stat().st_size for file in set(source.weight_map.values()))
    # The source is hashed by both, the bundle while it is written; reading and writing take about as long again.
    seconds = 2 * per_byte * (2 * stored + 2 * disk.bundle + disk.work)
    if probed is None:
        return seconds
    seconds += probed.startup_seconds * 2 + probed.begin_seconds * tokens + (probed.search_seconds or 0)
    share = sum(sizes.parameters for sizes in layers) / layers[probed.layer].parameters
    return seconds + share * probed.layer_seconds()


def recipe_cache(runner: LayerRunner, recipe: Recipe, jobs: Sequence[LayerJob]) -> ModelCache:
    """The cache that a recipe gives a model; the largest one, where calibration chooses how keys are stored."""
    schemes = [_treated(job) for job in jobs]
    # Budgets that are spread by measurement have the same mean as those that are not.
    if all(scheme is None or not scheme.evicts or scheme.allocation in FORMULAS for scheme in schemes):
        schemes = list(spread_ratios(schemes))
    cache = model_cache(runner.config, schemes, shapes=[(job.heads, job.key_dim, job.value_dim) for job in jobs])
    return cache if recipe.auto is None else replace(cache, budget_bits=_budget_bits(recipe.auto, cache))


def _treated(job: LayerJob) -> KVScheme | None:
    """A layer's scheme, with the largest of the treatments among which calibration chooses."""
    scheme = job.scheme
    if scheme is None or job.is_latent or not job.search.chooses_treatment(scheme):
        return scheme

    def size(treated: KVScheme) -> int:
        return sum(LayerCache(job.heads, job.key_dim, job.value_dim, treated).sides(DEFAULT_CONTEXT))

    return max((each.over(scheme) for each in treatments(scheme, job.key_dim)), key=size)


def _budget_bits(auto: AutoSearch, cache: ModelCache) -> float:
    if auto.kv_bits is not None:
        return auto.kv_bits
    searched = ModelCache(tuple(layer for layer in cache.layers if layer.is_quantized))
    context = auto.context or DEFAULT_CONTEXT
    return 16 * auto.kv_bytes_per_token * context / searched.plain_bytes(context)


@dataclass(frozen=True)
class Fit:
    """Sequences that fit in a GPU's memory.

    Attributes:
        allowance: bytes set aside for the CUDA context, one prompt chunk's activations and logits of `batch` sequences.
        longest_context: tokens of each of `batch` sequences; 0 where nothing fits.
        limited_by: "memory", or "the model's positions".
        largest_batch: sequences of `context` tokens.
    """

    allowance: int
    longest_context: int
    limited_by: str
    largest_batch: int


def fit(
    memory: int,
    weights: int,
    cache: ModelCache,
    context: int,
    batch: int,
    positions: int | None,
    allowance: Callable[[int], int],
    states: int = 0,
) -> Fit:
    """Longest context of `batch` sequences, and largest batch of `context` tokens, that fit.

    Args:
        memory: the GPU's memory in bytes.
        weights: the bytes of the bundle's weights.
        cache: see `recipe_cache`.
        context, batch: tokens of a sequence, sequences.
        positions: that the model has, or None.
        allowance: bytes beside weights and cache, by number of sequences.
        states: bytes of a sequence's recurrent states.
    """
    room = memory - weights - allowance(batch) - batch * states
    most = positions or CONTEXT_LIMIT
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if batch * cache.bytes(middle) <= room:
            low = middle
        else:
            high = middle - 1
    longest = low if room >= 0 else 0
    each = cache.bytes(context) + states + allowance(2) - allowance(1)
    rows = max(0, int((memory - weights - allowance(0)) // each)) if each else 0
    return Fit(allowance(batch), longest, "the model's positions" if longest == most else "memory", rows)


def plan_text(plan: Plan) -> str:
    """Tables of what converting and serving take, with what each figure rests on."""
    memory, disk, cache = plan.memory, plan.disk, plan.cache
    least, basis = {
        "probe": ("", "measured on one layer"),
        "headers": ("at least ", "the largest layer's weights; a probe measures the rest"),
    }[memory.source]
    rows = [("host memory, calibrate", f"{least}{size(memory.calibrate)}", f"anonymous, {basis}")]
    if memory.device is not None:
        rows.append(("GPU memory, calibrate", f"{least}{size(memory.device)}", basis))
    rows += [
        ("host memory, export", size(memory.export), "anonymous; does not grow with the model"),
        ("disk, working directory", size(disk.work), f"{size(disk.work_peak)} while it runs"),
        ("disk, bundle", size(disk.bundle), f"{disk.bundle:,} bytes of tensors"),
    ]
    if plan.seconds is not None:
        rows.append(
            ("time", duration(plan.seconds), "calibrate and export, while as much else runs as during the probe")
        )
        if plan.searches_weights:
            rows.append(("search of weights' widths", "not measured", "comes on top of that time"))
    if plan.read_twice:
        dtype = "its own dtype" if plan.device == "cuda" else "float32"
        read = f"the whole model in {dtype} reads {plan.read_twice:,} tokens twice"
        if plan.search_seconds is None:
            rows.append(("prediction of scores", "", read))
        else:
            rows.append(("prediction of scores", duration(plan.search_seconds), f"of that time; {read}"))
    if plan.searched:
        passes = f"up to {plan.searched:,} passes of the model over {plan.search_tokens:,} tokens each"
        if plan.search_seconds is None:
            rows.append(("search", "", passes))
        else:
            rows.append(("search", duration(plan.search_seconds), f"of that time; {passes}"))
    sequences = counted(plan.samples, "sequence")
    lines = [
        f"{plan.model}, recipe {plan.recipe}: {sequences} of {plan.length:,} tokens on {plan.device}",
        "",
        text_table(("converting", "", ""), rows),
        "",
    ]
    bits = "no keys and values" if cache.bits_per_value is None else f"{cache.bits_per_value:.2f} bits per value"
    rows = [
        (
            f"cache at {cache.context:,} tokens",
            f"{cache.bytes_per_token:,.0f} bytes per token",
            f"{bits}, {cache.basis}; {cache.plain_bytes_per_token:,.0f} bytes in 16 bits",
        )
    ]
    if cache.states is None:
        rows.append(("states", "not measured", "of modules that attend as well"))
    elif cache.states:
        rows.append(("states", f"{size(cache.states)} per sequence", "measured on one token; the same at any length"))
    for reason, count in cache.left.items():
        rows.append(("1 layer" if count == 1 else f"{count} layers", "no low-bit keys and values", reason))
    if plan.fit is not None:
        fit = plan.fit
        rows += [
            ("allowance", size(fit.allowance), "CUDA context, activations of a prompt chunk, logits; not measured"),
            (
                "longest context",
                f"{fit.longest_context:,} tokens" if fit.longest_context else "none",
                f"{_sequences(plan.batch)}, limited by {fit.limited_by}"
                if fit.longest_context
                else f"{_sequences(plan.batch)}: weights and allowance leave no room",
            ),
            ("largest batch", f"{fit.largest_batch:,}", f"sequences of {cache.context:,} tokens"),
        ]
    head = "serving" if plan.gpu_memory is None else f"serving in {size(plan.gpu_memory)}"
    return "\n".join([*lines, text_table((head, "", ""), rows)])


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"each of {count:,} sequences"


def size(count: int) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}" if unit == "GB" else f"{count / factor:.0f} {unit}"
    return f"{count:,} bytes"


def duration(seconds: float) -> str:
    """A time that is an estimate."""
    if seconds < 120:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 120 else f"about {minutes / 60:.1f} h"
