"""The numbers of a report, as plain values from a bundle's manifest and KV plan, and from the source's keys on a short
text; nothing here draws or writes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from kvconvert.auto import Option, allocate
from kvconvert.bundle.manifest import Allocation, LayerPlan, Manifest
from kvconvert.cache import LayerCache, ModelCache, lengths
from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.oscar import KeyStatistics
from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.errors import RecipeError, UsageError, counted
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.methods.auto import stores_keys
from kvconvert.methods.minikv import spread_ratios
from kvconvert.models.configuration import context_length, model_cache, sliding_windows
from kvconvert.models.processors import load_tokenizer
from kvconvert.models.source import float_dtype, open_source

TOKENS = 512


@dataclass(frozen=True)
class KeySample:
    """Keys of one text, after q/k norms and RoPE, before any rotation.

    Attributes:
        keys: by layer, [KV heads, T, head_dim].
        channel_range: by layer, OScaR's statistic float32 [3, KV heads], see `kvconvert.calibration.oscar`.
        model: the id of the model that computed them.
        is_recorded_source: whether its configuration is the one that the manifest names.
        text: that was read.
    """

    keys: dict[int, Tensor]
    channel_range: dict[int, Tensor]
    model: str
    is_recorded_source: bool
    text: str

    def norms(self) -> tuple[tuple[int, ...], Tensor]:
        """Layers, and the L2 norm of each token's key, the mean over KV heads: float32 [layers, T]."""
        return tuple(self.keys), torch.stack([keys.float().norm(dim=-1).mean(0) for keys in self.keys.values()])

    def most_uneven(self) -> tuple[int, int]:
        """Layer and KV head whose channels' ranges are largest, relative to the keys' size."""
        return max(
            ((layer, head) for layer, ranges in self.channel_range.items() for head in range(ranges.shape[1])),
            key=lambda at: float(self.channel_range[at[0]][0, at[1]]),
        )


@torch.no_grad()
def sample_keys(model: str, manifest: Manifest, tokens: int = TOKENS) -> KeySample:
    """Run the embedded evaluation text through a model on the CPU, in the dtype in which its weights are stored.

    Args:
        model: directory or Hub id of the bundle's source; it is read whole.
        manifest: the bundle's manifest, whose layers the model's have to be.
        tokens: the number of tokens of the text; fewer where the model has fewer positions.

    Raises:
        UsageError: the model has other layers than the bundle.
        KvconvertError: the model cannot be read.
    """
    source = open_source(model)
    config = source.config.get_text_config(decoder=True)
    tokens = min(tokens, context_length(config) or tokens)
    depth = config.num_hidden_layers
    if depth != len(manifest.layers):
        raise UsageError(
            f"`model` has {counted(depth, 'layer')} and the bundle {len(manifest.layers)}; give the model "
            "that it was made of."
        )
    text = load_token_samples(EVALUATION, load_tokenizer(source.directory), 1, tokens, 0)
    loaded = source.load(float_dtype(source), attn_implementation=RECORDING_ATTENTION).eval()
    keys: dict[int, Tensor] = {}
    statistics: dict[int, KeyStatistics] = {}

    def observer(layer: LayerIndex):
        def observe(query: Tensor, key: Tensor, value: Tensor) -> None:
            plan = manifest.layers[layer].scheme()
            norm = "per_head" if plan is not None and plan.token_norm == "per_head" else "joint"
            statistics[layer] = KeyStatistics(PAGE_SIZE, norm)
            statistics[layer].update(key)
            keys[layer] = key[0].clone()

        return observe

    with ExitStack() as stack:
        for module in loaded.modules():
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int) and 0 <= index < depth:
                stack.enter_context(attention_observed(module, observer(index)))
        loaded(text.ids, use_cache=False)
    if not keys:
        raise UsageError("`model` has no attention whose keys can be read; leave it out.")
    for layer in manifest.layers:
        own = keys.get(layer.index)
        if own is not None and layer.kv is not None and own.shape[::2] != (layer.num_key_value_heads, layer.head_dim):
            raise UsageError("`model` has other key heads than the bundle; give the model that it was made of.")
    digest = hashlib.sha256(source.file("config.json").read_bytes()).hexdigest()
    ranges = {layer: found.result()["key_channel_range"] for layer, found in sorted(statistics.items())}
    same = digest == manifest.source.config_sha256
    return KeySample(dict(sorted(keys.items())), ranges, source.id, same, text.info.source)


LayerIndex = int


CONTEXTS = tuple(1024 * 2**i for i in range(8))  # 1,024 to 131,072
BUDGETS = 16  # points of a frontier
# Beyond these a picture says nothing, and a manifest that claims so much is no reason to compute for hours.
MOST_LAYERS, MOST_CANDIDATES, WIDEST_LAYER = 512, 64, 2**20


class NotDrawnError(Exception):
    """Why a figure is left out of the report, as a sentence that the report shows."""


@dataclass(frozen=True)
class Sensitivity:
    """Mean KL divergence in nats per token with one layer's keys or values alone stored so.

    Attributes:
        layers: indices of the layers, rows of `kl`.
        candidates: names, columns of `kl`.
        kl: float64 [layers, candidates], NaN where a layer has no such candidate.
        chosen: bool, the same shape.
        key_candidates: how many of the columns are of keys; those of values follow.
    """

    layers: tuple[int, ...]
    candidates: tuple[str, ...]
    kl: np.ndarray
    chosen: np.ndarray
    key_candidates: int

    def largest(self) -> tuple[int, float]:
        """The layer with the largest divergence, and that."""
        row, column = np.unravel_index(np.nanargmax(self.kl), self.kl.shape)
        return self.layers[int(row)], float(self.kl[row, column])


def sensitivity(found: Allocation) -> Sensitivity:
    """The table of an allocation, without candidates that nobody chose and that change nothing (full precision)."""
    names = [
        name
        for name in found.candidates
        if any(layer.kl.get(name) or name in (layer.keys, layer.values) for layer in found.layers)
    ]
    names.sort(key=lambda name: not stores_keys(found.candidates[name]))
    if not names or len(names) > MOST_CANDIDATES or len(found.layers) > MOST_LAYERS:
        raise NotDrawnError(f"{len(found.layers):,} layers with {len(names):,} candidates make no readable figure.")
    kl = np.array([[layer.kl.get(name, math.nan) for name in names] for layer in found.layers], np.float64)
    chosen = np.array([[name in (layer.keys, layer.values) for name in names] for layer in found.layers])
    of_keys = sum(stores_keys(found.candidates[name]) for name in names)
    return Sensitivity(tuple(layer.index for layer in found.layers), tuple(names), kl, chosen, of_keys)


@dataclass(frozen=True)
class Frontier:
    """Sizes of the cache against the divergence that single measurements add up to.

    Attributes:
        bits, kl: sizes and KL of optimal allocations, bits per value and nats per token; sizes ascend.
        uniform_bits, uniform_kl: the same for plans with the same choice in every layer.
        chosen_bits, predicted_kl, measured_kl: size, predicted KL and measured KL of the bundle's own plan.
    """

    bits: tuple[float, ...]
    kl: tuple[float, ...]
    uniform_bits: tuple[float, ...]
    uniform_kl: tuple[float, ...]
    chosen_bits: float
    predicted_kl: float
    measured_kl: float


def frontier(manifest: Manifest, config: PretrainedConfig) -> Frontier:
    """Optimal allocations over a range of budgets, from the divergences in the manifest and the layout of pages."""
    found = manifest.allocation
    table = sensitivity(found)
    windows = _windows(config, len(manifest.layers))
    layers, plain_bytes, size, predicted = [], 0, 0, 0.0
    for own in found.layers:
        if not 0 <= own.index < len(manifest.layers) or manifest.layers[own.index].kv is None:
            raise NotDrawnError(f"the allocation names layer {own.index}, which has no scheme.")
        shape = manifest.layers[own.index].shape()
        if shape.num_key_value_heads * shape.head_dim > WIDEST_LAYER:
            raise NotDrawnError(f"the manifest claims {shape.num_key_value_heads:,} KV heads in layer {own.index}.")
        options = _options(manifest, found, manifest.layers[own.index], own.kl, windows[own.index])
        if (own.keys, own.values) not in options:
            raise NotDrawnError(f"what was chosen for layer {own.index} is not among its candidates.")
        size += options[own.keys, own.values].cost
        predicted += options[own.keys, own.values].loss
        plain = LayerCache(*shape.sizes, None, windows[own.index])
        plain_bytes += sum(map(plain.plain_bytes, lengths(found.context)))
        layers.append(options)
    if not math.isclose(16 * size / plain_bytes, found.bits_per_value, rel_tol=1e-3):
        raise NotDrawnError("the sizes of the candidates do not add up to the size that the manifest states.")

    def bits(cost: float) -> float:
        return 16 * cost / plain_bytes

    choices = [list(options.values()) for options in layers]
    least = sum(min(option.cost for option in options) for options in choices)
    most = sum(max(option.cost for option in options) for options in choices)
    # More budgets where caches are small, for there the divergence changes most.
    picked = [allocate(choices, int(budget)) for budget in np.geomspace(least, most, BUDGETS)]
    points = sorted({(bits(p.cost), p.loss) for p in picked if p is not None and p.loss > 0})
    common = [pair for pair in layers[0] if all(pair in options for options in layers)]
    uniform = [(sum(o[pair].cost for o in layers), sum(o[pair].loss for o in layers)) for pair in common]
    uniform = [(bits(cost), loss) for cost, loss in uniform if loss > 0]
    if not points or table.kl.size == 0:
        raise NotDrawnError("the allocation has no divergence above zero.")
    return Frontier(
        *zip(*points, strict=True),
        *(zip(*uniform, strict=True) if uniform else ((), ())),
        bits(size),
        predicted,
        found.measured_kl,
    )


def _options(
    manifest: Manifest, found: Allocation, layer: LayerPlan, kl: dict[str, float], window: int | None
) -> dict[tuple[str, str], Option]:
    """A layer's options by the names of its key and value candidates."""
    shape = layer.shape()
    sides: dict[bool, list[tuple[str, int, float]]] = {True: [], False: []}
    try:
        # The layer's own scheme has what was chosen for all candidates of the layer: its treatment of keys takes bytes.
        base = KVScheme.from_dict(manifest.recipe["kv"] | (layer.kv or {}))
        for name, loss in kl.items():
            fields = found.candidates[name]
            of_keys = stores_keys(fields)
            scheme = KVScheme.from_dict(base.to_dict() | fields)
            cache = LayerCache(*shape.sizes, scheme, window)
            size = cache.summed_sides(found.context)[0 if of_keys else 1]
            sides[of_keys].append((name, size, loss))
    except (RecipeError, KeyError, TypeError, ValueError) as error:
        raise NotDrawnError("the candidates in the manifest are not those of this version of kvconvert.") from error
    return {
        (key, value): Option(key_size + value_size, key_loss + value_loss)
        for key, key_size, key_loss in sides[True]
        for value, value_size, value_loss in sides[False]
    }


def _windows(config: PretrainedConfig, layers: int) -> list[int | None]:
    """The sliding window of each decoder layer."""
    windows = sliding_windows(config)
    if len(windows) != layers:
        raise NotDrawnError(f"config.json describes {len(windows)} layers, and the manifest {layers}.")
    return windows


def _cache(manifest: Manifest, config: PretrainedConfig, schemes: Sequence[KVScheme | None]) -> ModelCache:
    _windows(config, len(manifest.layers))  # refuses a configuration of another number of layers
    try:
        shapes = [None if layer.kv is None else layer.shape().sizes for layer in manifest.layers]
        return model_cache(config, schemes, shapes=shapes)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise NotDrawnError("config.json does not give the sizes of keys and values.") from error


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of one sequence's keys and values after a prompt.

    Attributes:
        contexts: tokens of the prompt.
        plain: bytes in bfloat16, as the model alone would store them.
        bundle: bytes by the bundle's plan.
        positions: that the model has, or None where its configuration does not say.
        stateful: layers without keys and values, which neither counts.
    """

    contexts: tuple[int, ...]
    plain: tuple[int, ...]
    bundle: tuple[int, ...]
    positions: int | None
    stateful: int


def memory(manifest: Manifest, config: PretrainedConfig, contexts: Sequence[int] = CONTEXTS) -> MemoryCurve:
    """Sizes by the layout of pages and spans: sink tokens, full-precision windows and sliding windows included."""
    schemes = spread_ratios(manifest.schemes())
    cache = _cache(manifest, config, schemes)
    for layer, scheme in zip(cache.layers, schemes, strict=True):
        if scheme is not None and scheme.only_tokens():
            raise NotDrawnError(f"only {scheme.only_tokens()} tokens are compressed, and prompts differ in these.")
        if layer.values_per_token > 2 * WIDEST_LAYER:
            raise NotDrawnError(f"config.json claims {layer.heads:,} KV heads of {layer.key_dim:,} channels.")
    plain = tuple(cache.plain_bytes(context) for context in contexts)
    if not any(plain):
        raise NotDrawnError("no layer of this model has keys and values.")
    positions = context_length(config)
    stateful = sum(not layer.values_per_token for layer in cache.layers)
    bundle = tuple(round(cache.bytes(context)) for context in contexts)
    return MemoryCurve(tuple(contexts), plain, bundle, positions, stateful)


@dataclass(frozen=True)
class TauSurface:
    """The search for CalibQuant's tau1 and tau2 in one layer.

    Attributes:
        layer: its index.
        grid: values of both.
        error: error of the attention weights, relative to that without a shift where the grid has one, [tau1, tau2].
        chosen: (tau1, tau2) of the bundle.
    """

    layer: int
    grid: tuple[float, ...]
    error: np.ndarray
    chosen: tuple[float, float]


def tau_surfaces(manifest: Manifest, plan: dict[str, Tensor]) -> list[TauSurface]:
    """One for each layer whose taus were searched."""
    found = []
    for layer in manifest.layers:
        grid, error = (plan.get(f"layers.{layer.index}.{name}") for name in ("tau_grid", "tau_error"))
        scheme = layer.scheme()
        if grid is None or error is None or scheme is None or error.shape != (len(grid), len(grid)):
            continue
        values = error.double().numpy()
        unshifted = [i for i, tau in enumerate(grid.tolist()) if tau == 0]
        if unshifted and values[unshifted[0], unshifted[0]] > 0:
            values = values / values[unshifted[0], unshifted[0]]
        found.append(TauSurface(layer.index, tuple(grid.tolist()), values, (scheme.tau1, scheme.tau2)))
    return found[:MOST_LAYERS]


@dataclass(frozen=True)
class Budgets:
    """Shares of a prompt that each KV head keeps, by layer (MiniKV): heavy hitters and newest tokens."""

    layers: tuple[int, ...]
    heavy: tuple[float, ...]
    recent: tuple[float, ...]


def budgets(manifest: Manifest) -> Budgets | None:
    """None where nothing is evicted, or by one budget of all layers."""
    schemes = spread_ratios(manifest.schemes())
    evicting = [(index, s) for index, s in enumerate(schemes) if s is not None and s.evicts and not s.heads_apart]
    rows = [(index, s.heavy_ratio, s.recent_ratio) for index, s in evicting]
    return Budgets(*zip(*rows[:MOST_LAYERS], strict=True)) if rows else None


@dataclass(frozen=True)
class Widths:
    """Widths of codes of keys and of values, of the layers that have any; 16 is full precision."""

    layers: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]


def layer_widths(manifest: Manifest, config: PretrainedConfig) -> Widths | None:
    """None where all layers with keys and values are alike, which a sentence says better."""
    schemes = spread_ratios(manifest.schemes())
    widths = {
        index: (16, 16) if scheme is None else (scheme.keys.bits, scheme.values.bits)
        for index, (scheme, layer) in enumerate(zip(schemes, _cache(manifest, config, schemes).layers, strict=True))
        if layer.values_per_token
    }
    if len(set(widths.values())) < 2 or len(schemes) > MOST_LAYERS:
        return None
    return Widths(tuple(widths), *zip(*widths.values(), strict=True))


@dataclass(frozen=True)
class ModuleSize:
    """Parameters of all modules of one name, by the width in which they are stored (0 for those that were kept)."""

    name: str
    parameters: dict[int, int]


def module_sizes(manifest: Manifest) -> list[ModuleSize]:
    """Modules gathered by the last part of their name, the largest first."""
    kept: dict[str, int] = {}
    for name, info in manifest.tensors.items():
        module = name.rpartition(".")[0]
        kept[module] = kept.get(module, 0) + math.prod(info.shape)
    sizes: dict[str, dict[int, int]] = {}
    for module in manifest.modules:
        quantized = module.method != "kept" and module.in_features and module.out_features
        count = module.in_features * module.out_features if quantized else kept.get(module.prefix, 0)
        if count:
            own = sizes.setdefault(module.name.rpartition(".")[2], {})
            width = (module.bits or 0) if quantized else 0
            own[width] = own.get(width, 0) + count
    found = [ModuleSize(name, widths) for name, widths in sizes.items()]
    return sorted(found, key=lambda each: -sum(each.parameters.values()))


@dataclass(frozen=True)
class ChannelRanges:
    """OScaR's `key_channel_range` by layer, the mean over KV heads: as computed, rotated, rotated and scaled."""

    layers: tuple[int, ...]
    original: tuple[float, ...]
    rotated: tuple[float, ...]
    scaled: tuple[float, ...]


def channel_ranges(measured: dict[int, Tensor]) -> ChannelRanges | None:
    """From `key_channel_range` [3, KV heads] of each layer; None without any."""
    rows = [(i, *(float(x) for x in t.double().mean(1))) for i, t in sorted(measured.items()) if t.shape[:1] == (3,)]
    return ChannelRanges(*zip(*rows[:MOST_LAYERS], strict=True)) if rows else None


def planned_channel_ranges(manifest: Manifest, plan: dict[str, Tensor]) -> ChannelRanges | None:
    """Ranges that calibration left in the KV plan."""
    names = {layer.index: f"layers.{layer.index}.key_channel_range" for layer in manifest.layers}
    return channel_ranges(
        {index: plan[name] for index, name in names.items() if name in plan and plan[name].dim() == 2}
    )


def shown_channels(keys: Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys [T, head_dim] and the same rotated by the Hadamard matrix, float32."""
    from kvconvert.kernels.rotate import hadamard_transform

    return keys.float(), hadamard_transform(keys.float())
