"""Memory that calibration takes, by arithmetic: one decoder layer, and the most that is beside it at any time.

Layers are calibrated one after another and share nothing but what is on disk, so that the peak is that of the largest
one. Beside its weights in float32, but for those of experts that are kept in files, there are, in turn,

    forward   activations of one batch, what the passes have gathered so far
    search    what they gathered, and candidates of the weights that are searched at once (AWQ), or factors of Hessians
              and working copies of some outputs of one Linear (GPTQ)
    sample    queries, keys and values of a few sequences, and all candidates of a clip ratio (KV passes)
    pack      the packed weights, and one Linear's codes on the way there

What the process itself takes (libraries, tokenizer, the model without weights) is measured, not computed. The sum holds
for `kvconvert calibrate`, which has freed blocks given back: see `convert.host_memory.return_large_blocks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from kvconvert.calibration.activations import EXPERT_TOKENS, LOSS_TOKENS, input_points, point_of
from kvconvert.calibration.attention_sample import SAMPLE_SEQUENCES, SAMPLE_TOKENS
from kvconvert.calibration.clip_ratios import CLIP_RATIO_GRID, QUERY_BLOCK
from kvconvert.calibration.gptq import outputs_at_once
from kvconvert.calibration.hessians import BLOCK_NUMBERS, FACTOR_BLOCK, block_rows
from kvconvert.calibration.layer_error import SAMPLE_TOKENS as LAYER_TOKENS
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorfile import nbytes
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.experts import expert_modules
from kvconvert.models.structure import LayerStructure


@dataclass(frozen=True)
class LayerSizes:
    """One decoder layer.

    Attributes:
        structure: names of its parts.
        hidden_size: channels between layers.
        parameters: numbers in it.
        linears: (outputs, inputs) of each Linear, by its name within the layer.
        stored_bytes: of the tensors that calibration makes of it.
        mapped_parameters, mapped_stored_bytes: what of them is experts' and kept in files, see
            `LayerRunner.maps_experts`.
    """

    structure: LayerStructure
    hidden_size: int
    parameters: int
    linears: Mapping[str, tuple[int, int]]
    stored_bytes: int
    mapped_parameters: int = 0
    mapped_stored_bytes: int = 0

    @classmethod
    def of(cls, runner: LayerRunner, index: int, weights: WeightsRecipe) -> LayerSizes:
        """Of a layer of a model on the meta device."""
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
                bits = weights.bits_of(f"{name}.{module}", index)
                size = packed_bytes(*linears[module], bits, weights.group_size)
                mapped_stored += size if key.startswith(mapped) else 0
            else:
                size = tensor.numel() * _itemsize(runner, f"{name}.{key}")
            stored += size
        numbers = {key: parameter.numel() for key, parameter in layer.named_parameters()}
        in_files = sum(number for key, number in numbers.items() if key.startswith(mapped))
        hidden = runner.config.hidden_size
        return cls(structure, hidden, sum(numbers.values()), linears, stored, in_files, mapped_stored)


def packed_bytes(outputs: int, inputs: int, bits: int, group_size: int) -> int:
    """Bytes of a Linear's codes, zeros and float16 scales; see `kvconvert.kernels.linear.awq_format`."""
    groups = inputs // group_size
    return (inputs + groups) * outputs * bits // 8 + 2 * groups * outputs


def kept_bytes(runner: LayerRunner, kept: list[str]) -> int:
    """Bytes of tensors that a bundle takes over from the source as they are."""
    return sum(nbytes(runner.source.tensors[name]) for name in kept)


def _itemsize(runner: LayerRunner, name: str) -> int:
    """Bytes per number of a tensor in the source."""
    source = runner.source
    stored = source.tensor_names.stored.get(name)
    info = source.tensors[stored] if stored is not None else next(iter(source.tensors.values()))
    return nbytes(TensorInfo(dtype=info.dtype, shape=[1]))


_SEARCH_TOKENS = 1024  # of one forward pass of AWQ's scale search
_CLIP_WEIGHTS = 2**22  # weights whose clips are searched at once
# What BLAS and the C library hold beside tensors, measured: benchmarks/memory.py --probe.
LIBRARY_BYTES = 40_000_000


@dataclass(frozen=True)
class LayerMemory:
    """Bytes at the worst moment of each step of one layer's calibration, the layer's weights included."""

    forward: int
    search: int
    sample: int
    pack: int

    @property
    def peak(self) -> int:
        """The largest of them."""
        return max(self.forward, self.search, self.sample, self.pack)

    def step(self) -> str:
        """In which step the peak is."""
        return max(vars(self), key=lambda name: vars(self)[name])


def layer_memory(
    sizes: LayerSizes,
    weights: WeightsRecipe,
    samples: int,
    length: int,
    batch: int,
    observes: bool,
    samples_attention: bool,
    device: str = "cpu",
) -> LayerMemory:
    """Memory of one layer's calibration in bytes, by arithmetic.

    Args:
        sizes: of the layer.
        weights: how they are quantized.
        samples, length: calibration sequences and tokens in each.
        batch: sequences that run through the layer at once.
        observes: whether some pass watches data run through the layer; without one nothing runs.
        samples_attention: whether some pass evaluates a sample of the layer's attention.
        device: "cpu" or "cuda", where the layer is.
    """
    layer = 4 * (sizes.parameters - sizes.mapped_parameters)
    gathered = _gathered(sizes, weights, samples * length)
    tokens = min(samples, batch) * length
    sequences = min(samples, SAMPLE_SEQUENCES, max(1, SAMPLE_TOKENS // length))
    sampled = _attention_sample(sizes, sequences, length) if samples_attention else (0, 0)
    search = 0
    if weights.scales or weights.compensates:
        search = max(gathered.summed, gathered.kept + _search(sizes, weights, samples * length))
    if weights.compensates:
        search = max(search, _compensation(sizes, weights.group_size, device, gathered.observed))
    running = max(_activations(sizes, tokens), gathered.adding + _hidden_activations(sizes, tokens))
    if weights.compensates and sizes.structure.writers:
        search = max(search, _correction(sizes, running))
    return LayerMemory(
        forward=layer + (gathered.observed + running if observes else 0),
        search=layer + search,
        sample=layer + sampled[0] + sampled[1],
        pack=layer + sizes.stored_bytes - sizes.mapped_stored_bytes + (_packing(sizes) if weights.quantizes else 0),
    )


@dataclass(frozen=True)
class _Gathered:
    """Bytes of statistics: while data runs, beside them to add one input, while they are summed up, and afterwards."""

    observed: int
    adding: int
    summed: int
    kept: int


def _points(sizes: LayerSizes) -> list[tuple[int, bool]]:
    """Inputs of each distinct input of the layer's Linears, and whether it is an expert's."""
    experts = sizes.structure.experts
    return [
        (sizes.linears[point][1], experts is not None and experts.owner(point) is not None)
        for point in input_points(sizes.structure)
        if point in sizes.linears  # a router is none
    ]


def _gathered(sizes: LayerSizes, weights: WeightsRecipe, tokens: int) -> _Gathered:
    observed = adding = summed = kept = 0
    points = _points(sizes)
    if weights.scales:
        moments = sum(inputs * weights.group_size for inputs, _ in points)
        wanted = sum(inputs * min(tokens, EXPERT_TOKENS if routed else LOSS_TOKENS) for inputs, routed in points)
        sequences = min(tokens, LOSS_TOKENS) * sizes.hidden_size
        if not weights.compensates:
            sequences += 2 * min(tokens, LAYER_TOKENS) * sizes.hidden_size
        observed = 8 * moments + 4 * (wanted + sequences)
        kept = 4 * (moments + wanted + sequences)
        summed = observed + kept
    if weights.compensates:
        sums = sum(_hessian_sum(inputs) for inputs, _ in points)
        adding = 4 * min(max(inputs for inputs, _ in points) ** 2, BLOCK_NUMBERS)  # a block's product
        observed, summed, kept = observed + sums, summed + sums, kept + sums
    return _Gathered(observed, adding, summed, kept)


def _hessian_sum(inputs: int) -> int:
    """Bytes of an input's sum of x x^T: float64, the upper triangle in blocks of rows."""
    return 8 * sum(rows * (inputs - start) for start, rows in block_rows(inputs))


def _compensation(sizes: LayerSizes, group_size: int, device: str, observed: int) -> int:
    """Bytes of GPTQ's search: sums become factors, beside all that was observed; then factors are used and given up."""
    readers: dict[str, list[tuple[int, int]]] = {}
    for name, shape in sizes.linears.items():
        readers.setdefault(point_of(sizes.structure, name), []).append(shape)
    waiting = most = observed
    for shapes in readers.values():
        inputs = shapes[0][1]
        most = max(most, waiting + inputs**2)  # rows of the Hessian are there before most sums are gone
        waiting += 4 * inputs**2 - _hessian_sum(inputs)
        # Blocks of rows on the way to the factor.
        most = max(most, waiting + 3 * 4 * min(FACTOR_BLOCK, inputs) * inputs)
    waiting = 4 * sum(shapes[0][1] ** 2 for shapes in readers.values())
    waiting += 8 * sum(outputs * inputs for outputs, inputs in sizes.linears.values()) // group_size  # grids
    for shapes in readers.values():
        inputs = shapes[0][1]
        block = 4 * min(FACTOR_BLOCK, inputs) * inputs
        # Some outputs' weights as they are rounded and as columns move; blocks of the Hessian for the error.
        weight = 4 * outputs_at_once(max(outputs for outputs, _ in shapes), inputs, device) * inputs
        most = max(most, waiting + max(2 * weight, weight + 2 * block))
        waiting -= 4 * inputs**2
    return most


def _correction(sizes: LayerSizes, running: int) -> int:
    """Bytes of correcting the weights that read an input, `running` those of a forward pass: see `Mismatch`."""
    most = 0
    for name, (outputs, inputs) in sizes.linears.items():
        rows = outputs if name in sizes.structure.writers else inputs
        cross = 8 * rows * inputs
        # The sums while data runs; the factor, the target and what it becomes afterwards.
        most = max(most, _hessian_sum(inputs) + cross + running, 4 * inputs**2 + cross + 4 * 4 * outputs * inputs)
    return most


def _activations(sizes: LayerSizes, tokens: int) -> int:
    """Bytes of a forward pass of the layer: the gate, the up projection and their product, or the attention's."""
    structure, hidden = sizes.structure, sizes.hidden_size
    dense = [shape for name, shape in sizes.linears.items() if not _routed(sizes, name)]
    widest = max((inputs for _, inputs in dense), default=hidden)
    heads = structure.num_attention_heads * structure.head_dim
    mlp = 3 * widest + 4 * hidden
    attention = 5 * heads + 4 * hidden
    return 4 * tokens * max(mlp, attention)


def _hidden_activations(sizes: LayerSizes, tokens: int) -> int:
    """Bytes of activations where the layer's widest input is at its Linear: that input, and what the layer carries."""
    dense = [inputs for name, (_, inputs) in sizes.linears.items() if not _routed(sizes, name)]
    return 4 * tokens * (max(dense, default=sizes.hidden_size) + 4 * sizes.hidden_size)


def _routed(sizes: LayerSizes, name: str) -> bool:
    experts = sizes.structure.experts
    return experts is not None and experts.owner(name) is not None


def _search(sizes: LayerSizes, weights: WeightsRecipe, tokens: int) -> int:
    """Bytes of the working copies of a search for weights."""
    numbers = {name: outputs * inputs for name, (outputs, inputs) in sizes.linears.items()}
    largest, most = max(numbers.values()), 0
    if weights.scales and not weights.compensates:
        for group in sizes.structure.norm_groups:
            readers = [numbers[name] for name in group.readers if name in numbers and not _routed(sizes, name)]
            # An expert's weights are rounded while it computes, its first two projections at different times.
            routed = max((numbers[name] for name in group.readers if name in numbers), default=0)
            if group.unsupported_reason is None and routed:
                forward = _activations(sizes, min(tokens, _SEARCH_TOKENS)) // 4
                expected = min(tokens, LOSS_TOKENS) * sizes.hidden_size
                most = max(most, sum(readers) + max(routed, forward) + expected)
        for pair in sizes.structure.pairs:
            outputs, inputs = sizes.linears[pair.down]
            work = inputs**2 if inputs < LOSS_TOKENS else min(tokens, LOSS_TOKENS) * outputs
            most = max(most, 2 * outputs * inputs + work)
        # One Linear scaled, and rounded, while the whole layer runs.
        most = max(most, 2 * largest + _activations(sizes, min(tokens, LAYER_TOKENS)) // 4)
    return 4 * max(most, 5 * min(largest, _CLIP_WEIGHTS))


def _attention_sample(sizes: LayerSizes, sequences: int, length: int) -> tuple[int, int]:
    """Bytes of a sample of the attention, with the copies that taking it makes, and of searching clip ratios on it."""
    structure = sizes.structure
    query, cache = (n * structure.head_dim for n in (structure.num_attention_heads, structure.num_key_value_heads))
    tokens = sequences * length
    taken = 4 * tokens * (query + 2 * cache)
    running = _activations(sizes, length) + 4 * tokens * sizes.hidden_size
    candidates = 4 * length * cache * (len(CLIP_RATIO_GRID) + 1)
    blocks = 4 * 5 * structure.num_attention_heads * QUERY_BLOCK * length
    return taken + length**2, max(taken + running, candidates + blocks)


def _packing(sizes: LayerSizes) -> int:
    """Bytes of one Linear's codes on the way to packed words: 12 for each weight, in float32, int32 and shifted."""
    return 12 * max(outputs * inputs for outputs, inputs in sizes.linears.values())
