"""Baselines that the cache's formats do not hold, beside those they do, all by fake quantization of a whole prompt.

    python benchmarks/simulated_baselines.py MODEL --text FILE --calibration FILE [--prompts 2] [--length 2048]
        [--scored 256] [--device cuda] [--only NAME ...] [--json FILE]

A prompt is read in full precision, its keys and values are replaced by what a method would read back, or some of them
are dropped, and the next tokens are scored over them. Nothing is stored at low bits, so bits per value are nominal:
codes, scales and zero points in float16, norms and indices, and what stays exact. The first tokens and what does not
fill a page of 128 stay exact in every row, and uniform grids have one clip ratio per width that is not calibrated, but
for the rows of `simulated_feedback.py`: rows compare with each other, not with docs/real-model.md, which measures the
cache itself.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from simulated_feedback import Known, rounded_keys
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvconvert.calibration.attention_capture import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.error_feedback import QueryMoments
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.kernels.quantizer import dequantize, quantize
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.kernels.select import column_sums, select_tokens

PAGE, SINKS = 128, 4
# Of the widths that the quantizer has; about what calibration chooses for near-Gaussian groups of 128.
CLIP_RATIOS = {1: 0.5, 2: 0.85, 4: 1.0, 8: 1.0}
FLOAT_BITS = 16


@dataclass
class Layer:
    """One layer's prompt: queries [Hq, n, D] of its last tokens, keys and values [H, n, D]; what calibration found."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    known: Known | None = None


@dataclass
class Outcome:
    """What is read back: keys and values [H, kept, D]; bits that a prompt of `numbers` numbers takes."""

    keys: Tensor
    values: Tensor
    bits: float


Method = Callable[[Layer], Outcome]
Side = Callable[[Tensor], tuple[Tensor, float]]


# --- one side of a page: tokens [H, n, D], n a multiple of 128, and the bits of one of its numbers


def exact(x: Tensor) -> tuple[Tensor, float]:
    """As it is."""
    return x, FLOAT_BITS


def per_channel(x: Tensor, bits: int = 2, group: int = 128) -> tuple[Tensor, float]:
    """A scale and zero point for each channel and group of tokens."""
    return _uniform(x, bits, group, 1), bits + 2 * FLOAT_BITS / group


def per_token(x: Tensor, bits: int = 2, group: int = 128) -> tuple[Tensor, float]:
    """A scale and zero point for each token and group of channels."""
    group = min(group, x.shape[2])
    return _uniform(x, bits, group, 2), bits + 2 * FLOAT_BITS / group


def per_prompt(x: Tensor, bits: int = 2, tokens: int | None = None) -> tuple[Tensor, float]:
    """CalibQuant's: a scale and zero point for each channel of the whole prompt, or of every `tokens` tokens."""
    parts = x.split(tokens or x.shape[1], 1)
    size = parts[0].shape[1]
    return torch.cat([_uniform(part, bits, part.shape[1], 1) for part in parts], 1), bits + 2 * FLOAT_BITS / size


def _uniform(x: Tensor, bits: int, group: int, dim: int) -> Tensor:
    found = quantize(x, bits, group, dim, CLIP_RATIOS[bits])
    return dequantize(found.codes, found.scale, found.zero_point, group, dim)


def rotated(x: Tensor, side: Side) -> tuple[Tensor, float]:
    """`side` in the coordinates of a Hadamard matrix."""
    found, bits = side(hadamard_transform(x))
    return hadamard_transform(found, inverse=True), bits


def normalised(x: Tensor, side: Side) -> tuple[Tensor, float]:
    """`side` of tokens divided by their root mean square over all heads, which is stored."""
    norm = x.square().mean((0, 2), keepdim=True).sqrt().half().float().clamp(min=1e-8)
    found, bits = side(x / norm)
    return found * norm, bits + FLOAT_BITS / (x.shape[0] * x.shape[2])


def lloyd_max(x: Tensor, bits: int = 2) -> tuple[Tensor, float]:
    """TurboQuant's first stage: a random rotation, one norm per token and head, the best levels for a Gaussian."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(x.shape[2], x.shape[2], generator=generator))[0].to(x)
    y = x @ rotation
    norm = y.square().mean(-1, keepdim=True).sqrt().half().float().clamp(min=1e-8)
    levels = gaussian_levels(bits).to(x)
    codes = torch.bucketize((y / norm).contiguous(), (levels[1:] + levels[:-1]) / 2)
    return (levels[codes] * norm) @ rotation.T, bits + FLOAT_BITS / x.shape[2]


def gaussian_levels(bits: int) -> Tensor:
    """The 2^bits levels with the smallest mean squared error for a standard normal distribution (Lloyd, Max)."""
    normal = torch.distributions.Normal(0.0, 1.0)
    samples = normal.icdf((torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000)
    levels = normal.icdf((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    for _ in range(200):
        nearest = torch.bucketize(samples, (levels[1:] + levels[:-1]) / 2)
        sums = torch.zeros_like(levels).index_add_(0, nearest, samples)
        levels = sums / nearest.bincount(minlength=len(levels))
    return levels.float()


# --- methods


def pages(layer: Layer, keys: Side, values: Side) -> Outcome:
    """Complete pages after the sink tokens; what remains is exact."""
    return _stored(layer, keys, values, layer.keys.shape[1])


def _stored(layer: Layer, keys: Side, values: Side, prompt: int) -> Outcome:
    kept = layer.keys.shape[1]
    stop = SINKS + (kept - SINKS) // PAGE * PAGE
    found, bits = [], 0.0
    for x, side in ((layer.keys, keys), (layer.values, values)):
        read, width = side(x[:, SINKS:stop])
        found.append(torch.cat([x[:, :SINKS], read, x[:, stop:]], 1))
        bits += (width * (stop - SINKS) + FLOAT_BITS * (kept - stop + SINKS)) / prompt / 2
    return Outcome(*found, bits)


def boosted(layer: Layer, values: Side, fraction: float, block: str) -> Outcome:
    """Some key channels at 4 bits, the others at 2: chosen by `E|q| E[range]` on calibration text.

    Args:
        layer: with what calibration text says of it.
        values: how values are stored.
        fraction: of the channels.
        block: what is chosen together: "channel", "pair" (the two channels that RoPE turns into each other), or "band"
            (neighbouring pairs, four at a time).
    """
    sensitivity = layer.known.sensitivity
    size = sensitivity.shape[1]
    blocks = sensitivity.unflatten(1, {"channel": (1, size, 1), "pair": (2, size // 2, 1)}.get(block, (2, -1, 4)))
    score = blocks.sum((1, 3))
    count = round(fraction * score.shape[1])
    best = torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.topk(count, dim=1).indices, True)
    chosen = best[:, None, :, None].expand(blocks.shape).flatten(1)

    def keys(x: Tensor) -> tuple[Tensor, float]:
        low, high = per_channel(x, 2), per_channel(x, 4)
        return torch.where(chosen[:, None], high[0], low[0]), low[1] + 2 * fraction

    return pages(layer, keys, values)


def fed_back(layer: Layer, bits: int, calibrated: bool, feedback: bool) -> Outcome:
    """OScaR's pages with calibrated clip ratios; see `simulated_feedback.py`."""
    size = layer.keys.shape[0] * layer.keys.shape[2]
    width = bits + 2 * FLOAT_BITS / PAGE + FLOAT_BITS / size

    def keys(x: Tensor) -> tuple[Tensor, float]:
        return rounded_keys(x, layer.known, bits, calibrated, feedback), width

    return pages(layer, keys, TWO_BIT_VALUES)


def evicted(layer: Layer, share: float, queries: int | None, keys: Side = exact, values: Side = exact) -> Outcome:
    """Half of the kept tokens are the newest, half those that received most attention.

    Args:
        layer: its prompt.
        share: of the prompt that is kept.
        queries: whose attention counts: all (H2O), or the newest ones alone (SnapKV, without its pooling).
        keys, values: how the kept tokens are stored.
    """
    n = layer.keys.shape[1]
    counted = layer.queries if queries is None else layer.queries[:, -queries:]
    mass = column_sums(counted, layer.keys, None, counted.shape[2] ** -0.5)
    index = select_tokens(mass, round(share * n / 2), round(share * n / 2), SINKS)
    index = index.unsqueeze(2).expand(-1, -1, layer.keys.shape[2])
    return _stored(Layer(counted, layer.keys.gather(1, index), layer.values.gather(1, index)), keys, values, n)


def _of(side: Callable[..., tuple[Tensor, float]], **options: int) -> Side:
    return partial(side, **options)


TWO_BIT_VALUES = partial(rotated, side=per_token)
OSCAR = partial(rotated, side=partial(normalised, side=per_channel))
ROTATIONS = {False: "Hadamard", True: "calibrated"}
METHODS: dict[str, Method] = {
    "keys per channel (KIVI)": partial(pages, keys=per_channel, values=per_token),
    "keys per token": partial(pages, keys=per_token, values=per_token),
    "rotation, keys per token (QuaRot-like)": partial(pages, keys=TWO_BIT_VALUES, values=TWO_BIT_VALUES),
    "rotation, keys per channel": partial(pages, keys=partial(rotated, side=per_channel), values=TWO_BIT_VALUES),
    "rotation and norm (OScaR)": partial(pages, keys=OSCAR, values=TWO_BIT_VALUES),
    "random rotation, Lloyd-Max levels (TurboQuant-like)": partial(pages, keys=lloyd_max, values=lloyd_max),
    **{
        f"{name} rotation, keys of {bits} bits, {'error feedback' if feedback else 'to nearest'}": partial(
            fed_back, bits=bits, calibrated=calibrated, feedback=feedback
        )
        for bits in (2, 1)
        for feedback in (False, True)
        for calibrated, name in ROTATIONS.items()
    },
    **{
        f"{block}s boosted, {fraction:.1%}": partial(boosted, values=TWO_BIT_VALUES, fraction=fraction, block=block)
        for fraction in (0.125, 0.25)
        for block in ("channel", "pair", "band")
    },
    **{
        f"spans of {length}, {bits} bit (CalibQuant)": partial(
            pages, keys=_of(per_prompt, bits=bits, tokens=tokens), values=_of(per_prompt, bits=bits, tokens=tokens)
        )
        for bits in (1, 2)
        for length, tokens in (("the prompt", None), ("512", 512), ("256", 256))
    },
    "keys as the prompt's span, 2 bit": partial(pages, keys=per_prompt, values=exact),
    "values as the prompt's span, 2 bit": partial(pages, keys=exact, values=per_prompt),
    **{
        f"{share:.0%} kept by {name}": partial(evicted, share=share, queries=queries)
        for share in (0.5, 0.25)
        for name, queries in (("all queries (H2O-like)", None), ("the last 32 queries (SnapKV-like)", 32))
    },
    **{
        f"50% kept by {name}, OScaR": partial(evicted, share=0.5, queries=queries, keys=OSCAR, values=TWO_BIT_VALUES)
        for name, queries in (("all queries", None), ("the last 32 queries", 32))
    },
}


# --- measuring


@dataclass
class Captured:
    """Queries of each layer, [Hq, n, D], of the latest forward pass."""

    queries: list[Tensor] = field(default_factory=list)

    def of(self, model: torch.nn.Module) -> ExitStack:
        """Capture within the context."""
        stack = ExitStack()
        for layer in model.model.layers:
            stack.enter_context(attention_observed(layer.self_attn, lambda q, k, v: self.queries.append(q[0].float())))
        return stack


def read(model: torch.nn.Module, ids: Tensor) -> list[Layer]:
    """The layers after a prompt, ids [1, n]."""
    captured, cache = Captured(), DynamicCache()
    with captured.of(model):
        model(ids, past_key_values=cache, logits_to_keep=1)
    sides = [(layer.keys[0].float(), layer.values[0].float()) for layer in cache.layers]
    return [Layer(queries, *side) for queries, side in zip(captured.queries, sides, strict=True)]


def calibrated(layers: list[Layer]) -> list[Known]:
    """What the layers after a calibration prompt say; sensitivity is E|q_d| E[range of channel d in a page] (Kitty,
    equations 4 and 5)."""
    found = []
    for layer in layers:
        heads, n, _ = layer.keys.shape
        groups = layer.keys[:, : n // PAGE * PAGE].unflatten(1, (-1, PAGE))
        extent = (groups.amax(2) - groups.amin(2)).mean(1)
        sensitivity = layer.queries.abs().unflatten(0, (heads, -1)).mean((1, 2)) * extent
        moments = QueryMoments()
        moments.update(layer.queries[None], heads)
        found.append(Known(sensitivity, moments.result(), layer.keys[:, SINKS : SINKS + (n - SINKS) // PAGE * PAGE]))
    return found


def scores(model: torch.nn.Module, sides: list[tuple[Tensor, Tensor]], ids: Tensor, position: int) -> Tensor:
    """Log-probabilities [n, vocabulary] of ids [1, n] from `position` on, over keys and values [H, kept, D]."""
    cache = DynamicCache()
    for index, side in enumerate(sides):
        cache.update(*(x[None].to(model.dtype) for x in side), index)
    positions = torch.arange(position, position + ids.shape[1], device=ids.device)[None]
    return model(ids, past_key_values=cache, position_ids=positions).logits[0].float().log_softmax(-1)


@torch.no_grad()
def measure(model: torch.nn.Module, text: Tensor, calibration: Tensor, options: argparse.Namespace) -> dict:
    """KL and perplexity of every method, averaged over evenly spaced prompts of a text, KL also of each prompt."""
    length, scored = options.length, options.scored
    known = calibrated(read(model, calibration[None, :length].to(model.device)))
    names = [name for name in METHODS if not options.only or any(part in name for part in options.only)]
    result: dict[str, dict] = {name: {"kl": [], "nll": 0.0, "bits_per_value": 0.0} for name in names}
    source = 0.0
    for prompt in range(options.prompts):
        start = prompt * (len(text) - length - scored - 1) // max(options.prompts - 1, 1)
        part = text[start : start + length + scored + 1].to(model.device)
        ids, targets = part[None, length : length + scored], part[length + 1 :, None]
        layers = read(model, part[None, :length])
        reference = scores(model, [(layer.keys, layer.values) for layer in layers], ids, length)
        source += float(-reference.gather(1, targets).mean()) / options.prompts
        for name in names:
            outcomes = []
            for layer, layer.known in zip(layers, known, strict=True):
                outcomes.append(METHODS[name](layer))
            got = scores(model, [(outcome.keys, outcome.values) for outcome in outcomes], ids, length)
            row = result[name]
            row["kl"].append(float((reference.exp() * (reference - got)).sum(-1).mean()))
            row["nll"] += float(-got.gather(1, targets).mean()) / options.prompts
            row["bits_per_value"] += sum(o.bits for o in outcomes) / len(outcomes) / options.prompts
            print(f"prompt {prompt + 1}: {name}: KL so far {sum(row['kl']) / (prompt + 1):.4f}", flush=True)
    rows = {
        name: {
            "kl": sum(row["kl"]) / options.prompts,
            "perplexity": float(torch.tensor(row["nll"]).exp()),
            "bits": row["bits_per_value"],
            "kl_by_prompt": row["kl"],
        }
        for name, row in result.items()
    }
    return {"source_perplexity": float(torch.tensor(source).exp()), "rows": rows}


def pairs(rows: dict[str, dict]) -> list[tuple[tuple[str, dict], tuple[str, dict]]]:
    """Rows with the calibrated rotation, each with the same in the Hadamard rotation."""
    one, two = ROTATIONS[True], ROTATIONS[False]
    return [
        ((name, row), (other, rows[other]))
        for name, row in rows.items()
        if name.startswith(one) and (other := name.replace(one, two, 1)) in rows and len(row["kl_by_prompt"]) > 1
    ]


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True, help="another text, on which channels are chosen")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--scored", type=int, default=256)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation=RECORDING_ATTENTION
    )
    model = model.eval().to(options.device)
    texts = [
        tokenizer(path.read_text(encoding="utf8"), return_tensors="pt").input_ids[0]
        for path in (options.text, options.calibration)
    ]
    found = measure(model, *texts, options)
    found |= {key: getattr(options, key) for key in ("prompts", "length", "scored")} | {"text": options.text.name}
    print(f"\nsource perplexity {found['source_perplexity']:.2f}\n\n| baseline | bits per value | KL | perplexity |")
    print("|---|---|---|---|")
    for name, row in found["rows"].items():
        print(f"| {name} | {row['bits']:.2f} | {row['kl']:.4f} | {row['perplexity']:.2f} |")
    for (name, one), (other, two) in pairs(found["rows"]):
        by_prompt = torch.tensor([one["kl_by_prompt"], two["kl_by_prompt"]], dtype=torch.float64)
        gain = bootstrap_mean(by_prompt[0] - by_prompt[1], 0)
        print(f"{name} less {other}: {gain.mean:+.4f} ({gain.low:+.4f} to {gain.high:+.4f})")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
