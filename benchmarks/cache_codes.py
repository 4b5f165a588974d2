"""Codes that the cache does not have beside those that it has, by simulation: KL with keys alone or values alone.

Run: python benchmarks/cache_codes.py MODEL --text DIR [--side key|value --bits 1,2 --length 1540 --samples 3]

DIR holds books-calib.txt, on which treatments, error feedback and clip ratios are fitted, layer by layer and for every
code (`--samples` of 512 tokens), and wikitext2-test.txt; code is the running Python's standard library. `--segments`
evenly spaced parts of each text, the same for all codes, are scored from token 128 on. Keys have the treatment that
`auto` takes for the layer at 2 bits in groups of 128 (at 1 bit in groups of 128), values a rotation. Prints bits per
number in complete pages, with everything that is stored, and mean KL in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from runner import option_parser
from simulated_treatments import SAMPLE, SCORED_FROM, Simulation, library_code
from torch import Tensor

from kvconvert.cache.format import CacheFormat
from kvconvert.calibration import clip_ratios, simulated_attention
from kvconvert.calibration.clip_ratios import key_clip_ratio_errors, pages_read, value_clip_ratio_errors
from kvconvert.kernels.pages import page_centers
from kvconvert.kernels.pages.reference import shown_tokens, token_norms
from kvconvert.methods import KVScheme
from kvconvert.methods.key_treatments import treatments

SEED = 0
RATIOS = {"range": (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4), "deviation": (1.0, 0.92, 0.84, 0.77, 0.7, 0.6, 0.5)}
WIDEST = 1.3  # standard deviations that a ratio of 1 stands for
# Levels of least squared error for a Gaussian (Max 1960), in standard deviations.
LLOYD_MAX = {
    1: (-0.7979, 0.7979),
    1.6: (-1.2240, 0.0, 1.2240),
    2: (-1.5104, -0.4528, 0.4528, 1.5104),
    3: (-2.1519, -1.3439, -0.7560, -0.2451, 0.2451, 0.7560, 1.3439, 2.1519),
}


def as_bytes(scale: Tensor) -> Tensor:
    """Float16 rounded to five bits of exponent and three of mantissa."""
    rounded = ((scale.half().view(torch.int16) + 64) >> 7) << 7
    return rounded.view(torch.float16).float()


def affine16(x: Tensor, levels: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Scale and zero point as pages have them: two float16 per group."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    return ((high - low) * ratio / (levels - 1)).half().float(), (low + (high - low) * (1 - ratio) / 2).half().float()


def affine8(x: Tensor, levels: int, ratio: float, parts: int = 8) -> tuple[Tensor, Tensor]:
    """A scale of 8 bits and a zero point of 8 bits, in eighths of the scale."""
    step, zero = affine16(x, levels, ratio)
    step = as_bytes(torch.maximum(step, zero.abs() * (parts / 126)))
    code = (zero / step.masked_fill(step == 0, torch.inf) * parts).round().clamp(-128, 127)
    return step, code * (step / parts)


def symmetric8(x: Tensor, levels: int, ratio: float) -> tuple[Tensor, Tensor]:
    """A scale of 8 bits alone."""
    step = as_bytes(x.abs().amax(-1, keepdim=True) * (2 * ratio / (levels - 1)))
    return step, step * (-(levels - 1) / 2)


def symmetric16(x: Tensor, levels: int, ratio: float) -> tuple[Tensor, Tensor]:
    """A scale of 16 bits alone."""
    step = (x.abs().amax(-1, keepdim=True) * (2 * ratio / (levels - 1))).half().float()
    return step, step * (-(levels - 1) / 2)


def deviation16(x: Tensor, levels: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Standard deviation and mean, two float16 per group."""
    return (x.std(-1, keepdim=True, unbiased=False) * (WIDEST * ratio)).half().float(), x.mean(
        -1, keepdim=True
    ).half().float()


def deviation8(x: Tensor, levels: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Root mean square of 8 bits."""
    size = as_bytes(x.square().mean(-1, keepdim=True).sqrt() * (WIDEST * ratio))
    return size, torch.zeros_like(size)


def table(levels: tuple[float, ...] | int) -> Callable[[Tensor], Tensor]:
    """Nearest levels: equally spaced ones from 0 on, or given ones."""
    if isinstance(levels, int):
        return lambda u: u.round().clamp_(0, levels - 1)
    points = torch.tensor(levels)
    cuts = (points[1:] + points[:-1]) / 2
    return lambda u: points[torch.bucketize(u.contiguous(), cuts)]


def vectors(book: Tensor) -> Callable[[Tensor], Tensor]:
    """Nearest entries of a codebook [entries, d] for consecutive numbers of a group."""
    sizes = book.square().sum(1) / 2

    def nearest(u: Tensor) -> Tensor:
        rows = u.reshape(-1, book.shape[1])
        found = torch.cat([(part @ book.T - sizes).argmax(1) for part in rows.split(8192)])
        return book[found].view(u.shape)

    return nearest


def codebook(entries: int, dim: int) -> Tensor:
    """k-means of Gaussian vectors."""
    random = torch.Generator().manual_seed(SEED)
    points = torch.randn(200 * entries, dim, generator=random)
    book = points[:entries].clone()
    for _ in range(40):
        nearest = torch.cat([(p @ book.T - book.square().sum(1) / 2).argmax(1) for p in points.split(65536)])
        count = torch.bincount(nearest, minlength=entries).clamp(min=1)
        book = torch.zeros_like(book).index_add_(0, nearest, points) / count.unsqueeze(1)
    return book


def e8(radius: float, size: float) -> Callable[[Tensor], Tensor]:
    """Nearest points of E8 with a squared norm of at most `radius`, 56,881 at 10 (16 bits), scaled by `size`."""

    def d8(x: Tensor) -> Tensor:
        near = x.round()
        off = x - near
        worst = off.abs().argmax(1, keepdim=True)
        turned = near.scatter_add(1, worst, torch.where(off.gather(1, worst) >= 0, 1.0, -1.0))
        return torch.where((near.sum(1, keepdim=True) % 2 == 0), near, turned)

    def point(x: Tensor) -> Tensor:
        whole, half = d8(x), d8(x - 0.5) + 0.5
        closer = (x - whole).square().sum(1, keepdim=True) <= (x - half).square().sum(1, keepdim=True)
        return torch.where(closer, whole, half)

    def nearest(u: Tensor) -> Tensor:
        x = u.reshape(-1, 8) / size
        found, shrunk = point(x), x
        for _ in range(40):
            outside = found.square().sum(1, keepdim=True) > radius + 1e-3
            if not outside.any():
                break
            shrunk = torch.where(outside, shrunk * 0.96, shrunk)
            found = torch.where(outside, point(shrunk), found)
        return (found * size).view(u.shape)

    return nearest


@dataclass(frozen=True, eq=False)
class Code:
    """One way to store numbers.

    Attributes:
        name: for the table.
        bits: of a number; side_bits: of a group's scale and zero point; group: numbers in it, 0 for the head.
        levels: how many there are, for scales that depend on it.
        grid: scale and zero point of groups [..., numbers].
        nearest: numbers in units of the scale to what is stored.
        ratios: which are tried.
    """

    name: str
    bits: float
    side_bits: int
    group: int
    levels: int
    grid: Callable[..., tuple[Tensor, Tensor]]
    nearest: Callable[[Tensor], Tensor]
    ratios: str = "range"
    joint: bool = False

    def stored(self, head_dim: int, heads: int, side: str) -> float:
        """Bits of a number with its part of scales."""
        own = self.group if side == "key" else (heads * head_dim if self.joint else self.group or head_dim)
        return self.bits + self.side_bits / own


def codes_of(side: str, bits: int) -> list[Code]:
    """What is compared, the cache's own code first."""
    group = 128 if side == "key" else 0
    n = 2**bits

    def of(name: str, grid, nearest, side_bits: int, ratios="range", width: float = bits, size=group, **more) -> Code:
        return Code(name, width, side_bits, size, more.pop("levels", n), grid, nearest, ratios, **more)

    found = [
        of("affine, 2 x fp16 (the cache's)", affine16, table(n), 32),
        of("the same in groups of 32", affine16, table(n), 32, size=32),
        of("affine, scale and zero point of 8 bits", affine8, table(n), 16),
        of("the same, zero point in quarters", lambda x, n, r: affine8(x, n, r, 4), table(n), 16),
        of("the same in groups of 32", affine8, table(n), 16, size=32),
        of("symmetric, scale of 16 bits", symmetric16, table(n), 16),
        of("symmetric, scale of 8 bits", symmetric8, table(n), 8),
        of("Lloyd-Max levels, mean and deviation fp16", deviation16, table(LLOYD_MAX[bits]), 32, "deviation"),
        of("Lloyd-Max levels, deviation of 8 bits", deviation8, table(LLOYD_MAX[bits]), 8, "deviation"),
    ]
    if side == "value":
        found.append(of("affine, 2 x fp16 for all heads of a token", affine16, table(n), 32, joint=True))
    if bits == 1:
        book = codebook(256, 8)
        found += [
            of("ternary, 1.6 bits, mean and deviation fp16", deviation16, table(LLOYD_MAX[1.6]), 32, "deviation", 1.6),
            of("ternary, 1.6 bits, deviation of 8 bits", deviation8, table(LLOYD_MAX[1.6]), 8, "deviation", 1.6),
            of("vectors of 8, 256 entries, fp16", deviation16, vectors(book), 32, "deviation"),
            of("vectors of 8, 256 entries, 8 bits", deviation8, vectors(book), 8, "deviation"),
        ]
        book = codebook(64, 4)
        found.append(of("vectors of 4, 64 entries, 1.5 bits, 8 bits", deviation8, vectors(book), 8, "deviation", 1.5))
    if bits == 2:
        book = codebook(256, 4)
        found += [
            of("vectors of 2, 16 entries, fp16", deviation16, vectors(codebook(16, 2)), 32, "deviation"),
            of("vectors of 4, 256 entries, fp16", deviation16, vectors(book), 32, "deviation"),
            of("vectors of 4, 256 entries, 8 bits", deviation8, vectors(book), 8, "deviation"),
            of("E8 to norm 10, fp16", deviation16, e8(10, 0.96), 32, "deviation"),
            of("E8 to norm 10, 8 bits", deviation8, e8(10, 0.96), 8, "deviation"),
        ]
    return found


CODES: dict[int, tuple[CacheFormat, str, Code]] = {}  # by the identity of a format, what is stored otherwise
_own_stored_tokens = clip_ratios.stored_tokens


def stored_tokens(tokens: Tensor, cache: CacheFormat, side: str, clip_ratios: Sequence[float]) -> Tensor:
    """`clip_ratios.stored_tokens` with the codes of `CODES`."""
    entry = CODES.get(id(cache))
    if entry is None or entry[1] != side:
        return _own_stored_tokens(tokens, cache, side, clip_ratios)
    return torch.stack([torch.stack([coded(row, cache, side, ratio) for row in tokens]) for ratio in clip_ratios])


def coded(tokens: Tensor, cache: CacheFormat, side: str, clip_ratio: float) -> Tensor:
    """One sequence's keys or values [H, T, channels] as read back."""
    code, (f, own) = CODES[id(cache)][2], cache.side(side)
    count, sinks = pages_read(tokens.shape[1], own.recent_tokens, f.page_size), cache.sink_tokens
    if not count:
        return tokens
    part = slice(0, count * f.page_size)
    pages = tokens[:, part].unflatten(1, (count, f.page_size)).transpose(0, 1)
    if side == "value":
        read = through_groups(shown_tokens(pages, sinks), code, clip_ratio)
    else:
        constant: Tensor | float = 0.0
        if cache.pages.key_center is not None:
            starts = f.page_size * torch.arange(count)
            constant = page_centers(starts, f.page_size, cache.pages.key_center)
        shown = shown_tokens(pages - constant, sinks)
        norm: Tensor | float = 1.0
        if f.token_norm != "none":
            norm = token_norms(shown, f.token_norm, f.token_norm_measure).half().float().unsqueeze(3)
        read = through_channels((shown / norm).transpose(2, 3), code, clip_ratio, cache.pages.key_feedback)
        read = read.transpose(2, 3) * norm + constant
    result = tokens.clone()
    result[:, part] = read.transpose(0, 1).flatten(1, 2)
    result[:, :sinks] = tokens[:, :sinks]
    return result


def through_groups(values: Tensor, code: Code, ratio: float) -> Tensor:
    """Values [N, H, P, E], a scale for each token and group of channels."""
    joint = values.transpose(1, 2).flatten(2)[:, None] if code.joint else values
    groups = joint.unflatten(3, (-1, code.group or joint.shape[3]))
    step, zero = code.grid(groups, code.levels, ratio)
    read = code.nearest((groups - zero) / step.masked_fill(step == 0, torch.inf)) * step + zero
    read = read.flatten(3)
    return read[:, 0].unflatten(2, values.shape[1::2]).transpose(1, 2) if code.joint else read


def through_channels(keys: Tensor, code: Code, ratio: float, feedback: Tensor | None) -> Tensor:
    """Keys [N, H, D, P], channel after channel with error feedback, a scale for each channel and group of tokens."""
    groups = keys.float().unflatten(3, (-1, code.group))
    step, zero = code.grid(groups, code.levels, ratio)
    w, read = groups.clone(), torch.empty_like(groups)
    divisor = step.masked_fill(step == 0, torch.inf)
    factors = None if feedback is None else feedback.float()
    for i in range(keys.shape[2]):
        unit = ((w[:, :, i] - zero[:, :, i]) / divisor[:, :, i]).contiguous()
        read[:, :, i] = code.nearest(unit) * step[:, :, i] + zero[:, :, i]
        if factors is not None:
            error = (w[:, :, i] - read[:, :, i]).unsqueeze(2)
            w[:, :, i + 1 :] -= factors[:, i, i + 1 :, None, None] * error
    return read.flatten(3)


clip_ratios.stored_tokens = simulated_attention.stored_tokens = stored_tokens


@torch.no_grad()
def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--side", choices=("key", "value"), default="key")
    parser.add_argument("--bits", type=int, default=2)
    parser.add_argument("--length", type=int, default=1540)
    parser.add_argument("--segments", type=int, default=2)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--only", default="", help="parts of names, separated by commas")
    args = parser.parse_args()
    simulated = Simulation(args.model)

    def rows(text: str, count: int, length: int) -> Tensor:
        ids = simulated.tokenizer(text[: 40 * count * length])["input_ids"]
        stride = max(length, len(ids) // count)
        return torch.tensor([ids[i * stride : i * stride + length] for i in range(count)])

    novels = rows((args.text / "books-calib.txt").read_text(), args.samples, SAMPLE)
    texts = {"WikiText-2": (args.text / "wikitext2-test.txt").read_text(), "code": library_code()}
    fitted_on = simulated.read(novels, SAMPLE)
    scored = [simulated.read(rows(text, args.segments, args.length), SCORED_FROM) for text in texts.values()]
    choices = [c for c in codes_of(args.side, args.bits) if any(part in c.name for part in args.only.split(","))]
    is_key = args.side == "key"
    widths = {"key_bits": args.bits, "value_bits": 16} if is_key else {"key_bits": 16, "value_bits": args.bits}
    scheme = replace(
        KVScheme.preset("default"), **widths, rotate_values="online", rotate_keys="none", token_norm="none",
        key_center="none", key_rounding="nearest",
    )  # fmt: skip
    caches: dict[str, dict[int, CacheFormat]] = {choice.name: {} for choice in choices}
    taken: dict[str, int] = {}
    for layer, fit in simulated.measured_layers(fitted_on, scheme, "default"):
        treated = scheme
        if is_key:
            best, _ = fit.best(scheme, [t for t in treatments(scheme, layer.head_dim) if "key_bits" not in t.fields])
            treated = best.over(scheme)
            taken[best.name] = taken.get(best.name, 0) + 1
        errors_of = key_clip_ratio_errors if is_key else value_clip_ratio_errors
        for choice in choices:
            cache = fit.format_of(treated)
            CODES[id(cache)] = (cache, args.side, choice)
            grid = RATIOS[choice.ratios]
            ratio = grid[int(errors_of(fit.sample(cache.rotations.keys), cache, grid).argmin())]
            chosen = fit.format_of(replace(treated, **{f"{args.side}_clip_ratio": ratio}))
            CODES[id(chosen)] = (chosen, args.side, choice)
            caches[choice.name][layer.index] = chosen
    print(f"treatments: {taken}" if is_key else "values rotated")
    print(f"| {args.side}s | bits | {' | '.join(f'KL {name}' for name in texts)} |\n|---|---|---|---|")
    for choice in choices:
        stored = choice.stored(layer.head_dim, layer.heads, args.side)
        losses = [f"{simulated.divergence(text, caches[choice.name]):.4f}" for text in scored]
        print(f"| {choice.name} | {stored:.3f} | {' | '.join(losses)} |", flush=True)


if __name__ == "__main__":
    main()
