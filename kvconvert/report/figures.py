"""The figures of a report, drawn with matplotlib: one function each, from the numbers of `kvconvert.report.data`.

A figure is drawn once, in ink on a transparent ground. As SVG in the page its ink takes the page's own color of text,
light or dark; as PNG it lies on white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from torch import Tensor

from kvconvert.report.data import (
    Budgets,
    ChannelRanges,
    Frontier,
    MemoryCurve,
    ModuleSize,
    Sensitivity,
    TauSurface,
    Widths,
)

INK = "#1f2429"  # of everything that follows the page's color of text
BLUE, ORANGE, GREEN, GREY = "#3b82f6", "#ea7317", "#16a34a", "#8b949e"
SEQUENTIAL = "viridis"
WIDTH = 5.8  # inches
MOST_PANELS, MOST_MODULES = 6, 16
_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_STYLE = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False,
    "grid.color": INK,
    "grid.alpha": 0.14,
    "grid.linewidth": 0.6,
    "font.size": 10.5,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "text.parse_math": False,  # a bundle's names are no formulas
    "svg.fonttype": "none",
    "svg.hashsalt": "kvconvert",
}


@contextmanager
def drawing() -> Iterator[None]:
    """In which figures are drawn and saved; a user's own settings of matplotlib neither matter nor change."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        yield


def label(text: str, longest: int = 18) -> str:
    """A bundle's text within a figure: of characters that every font has, and short."""
    plain = text.encode("ascii", "backslashreplace").decode()
    return plain if len(plain) <= longest else plain[: longest - 3] + "..."


def png(figure: Figure) -> bytes:
    """A figure on white."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def svg(figure: Figure, name: str, title: str) -> str:
    """A figure as SVG to stand in a page: no metadata, ids that begin with `name`, ink in the page's color.

    Args:
        figure: drawn within `drawing`.
        name: unique in the page.
        title: what a screen reader says.
    """
    stream = io.StringIO()
    figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(stream.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    text = ElementTree.tostring(root, encoding="unicode")
    referred = set(re.findall(r"(?:url\(#|href=\"#)([^\")]+)", text))
    for element in root.iter():
        own = element.get("id")
        if own is not None and own in referred:
            element.set("id", f"{name}-{own}")
        elif own is not None:
            del element.attrib["id"]
        for key, value in element.attrib.items():
            if key.endswith("href") and value.startswith("#"):
                value = f"#{name}-{value[1:]}"
            elif key in ("clip-path", "style"):
                value = value.replace("url(#", f"url(#{name}-")
            if key == "style":
                value = value.replace(INK, "currentColor")
                value = re.sub(r"font: ([\d.]+px) [^;]*", r"font-size: \1", value)
            element.set(key, value)
    for name_of_size in ("width", "height"):
        root.attrib.pop(name_of_size, None)
    # 1 inch is 96 CSS pixels, or 6 rem; a little more lets text be as large as the page's.
    root.set("style", f"max-width:{6.4 * figure.get_figwidth():.1f}rem")
    root.set("role", "img")
    root.set("aria-label", title)
    return ElementTree.tostring(root, encoding="unicode")


def _figure(height: float, width: float = WIDTH) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _plot(height: float) -> tuple[Figure, Axes]:
    figure = _figure(height)
    axes = figure.add_subplot()
    axes.grid(True)
    return figure, axes


def _layers_on(axes: Axes, layers: Sequence[int]) -> None:
    axes.set_xlabel("layer")
    axes.set_xlim(layers[0] - 0.7, layers[-1] + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _legend(axes: Axes, columns: int = 3) -> None:
    # Of the figure, not of its axes, so that the layout makes room for all of it.
    axes.figure.legend(loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.4)


_PLAIN = FuncFormatter(lambda value, _: f"{value:g}")


def draw_sensitivity(found: Sensitivity) -> Figure:
    """A heat map, layers downwards and candidates across, those chosen with a dot."""
    rows, columns = found.kl.shape
    width = max(WIDTH, 1.8 + 0.27 * columns)
    figure = _figure(1.9 + 0.2 * min(max(rows, 8), 64), width)
    axes = figure.add_subplot()
    shown = 1000 * np.where(found.kl > 0, found.kl, np.nan)
    image = None
    if np.isfinite(shown).any():
        low, high = np.nanmin(shown), np.nanmax(shown)
        image = axes.imshow(
            shown,
            aspect="auto",
            cmap=SEQUENTIAL,
            norm=LogNorm(low, max(high, low * 1.01)),
            interpolation="none",
            extent=(-0.5, columns - 0.5, rows - 0.5, -0.5),
        )
        bar = figure.colorbar(image, ax=axes, fraction=0.04, pad=0.015, format=_PLAIN)
        bar.set_label("KL, 1/1000 nats per token")
        bar.outline.set_visible(False)
        bar.minorticks_off()
    axes.axvline(found.key_candidates - 0.5, color=INK, linewidth=1.2)
    at = np.argwhere(found.chosen)
    axes.scatter(at[:, 1], at[:, 0], s=26, color="white", edgecolors="black", linewidths=0.9, zorder=3)
    axes.set_xticks(range(columns), [label(name, 12) for name in found.candidates], rotation=90)
    step = -(-rows // 32)
    axes.set_yticks(range(0, rows, step), [str(layer) for layer in found.layers[::step]])
    axes.set_ylabel("layer")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def draw_frontier(found: Frontier) -> Figure:
    """Bits per value against divergence."""
    figure, axes = _plot(4.0)
    axes.set_yscale("log")
    if found.uniform_bits:
        axes.scatter(found.uniform_bits, found.uniform_kl, s=14, color=GREY, alpha=0.7, label="every layer alike, sum")
    axes.plot(found.bits, found.kl, color=BLUE, linewidth=1.8, marker="o", markersize=3, label="best allocation, sum")
    if found.predicted_kl > 0:
        axes.scatter([found.chosen_bits], [found.predicted_kl], s=70, facecolors="none", edgecolors=ORANGE,
                     linewidths=1.8, zorder=4, label="this bundle, sum")  # fmt: skip
    if found.measured_kl > 0:
        axes.scatter([found.chosen_bits], [found.measured_kl], s=70, color=ORANGE, zorder=4,
                     label="this bundle, measured")  # fmt: skip
    axes.set_xlabel("bits per value")
    axes.set_ylabel("KL, nats per token")
    axes.yaxis.set_major_formatter(_PLAIN)
    axes.minorticks_off()
    _legend(axes, 2)
    return figure


def draw_memory(found: MemoryCurve) -> Figure:
    """Context against bytes, both on logarithmic axes."""
    figure, axes = _plot(3.6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.plot(found.contexts, found.plain, color=GREY, linewidth=1.8, marker="o", markersize=4, label="bfloat16")
    axes.plot(found.contexts, found.bundle, color=BLUE, linewidth=1.8, marker="o", markersize=4, label="this bundle")
    axes.set_xticks(found.contexts, [f"{context // 1024}k" for context in found.contexts])
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("keys and values")
    _legend(axes)
    return figure


def bytes_text(size: float) -> str:
    """A size in the largest unit in which it is at least 1: 1 MB is 10^6 bytes."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"


def draw_tau(found: Sequence[TauSurface]) -> Figure:
    """The mean over layers and some of the layers, one panel each; the bundle's choice with a dot."""
    picked = np.unique(np.linspace(0, len(found) - 1, MOST_PANELS - 1).astype(int))
    same = all(each.grid == found[0].grid for each in found)
    panels = [(f"layer {each.layer}", each.grid, each.error, each.chosen) for each in (found[i] for i in picked)]
    if same and len(found) > 1:
        mean, taus = np.mean([each.error for each in found], axis=0), {each.chosen for each in found}
        panels.insert(0, ("mean of layers", found[0].grid, mean, found[0].chosen if len(taus) == 1 else None))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(0.5 + 2.0 * rows)
    low, high = min(p[2].min() for p in panels), max(p[2].max() for p in panels)
    positive = low > 0
    norm = LogNorm(low, max(high, 1.01 * low)) if positive else None
    image, grid_of_axes = None, figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (name, grid, error, chosen) in zip(grid_of_axes, panels, strict=False):
        image = axes.imshow(error, cmap=SEQUENTIAL, norm=norm, origin="lower", interpolation="none")
        if chosen is not None and chosen[0] in grid and chosen[1] in grid:
            axes.scatter(grid.index(chosen[1]), grid.index(chosen[0]), s=40, color="white", edgecolors="black")
        ticks = [f"{tau:g}" for tau in grid]
        axes.set_xticks(range(len(grid)), ticks)
        axes.set_yticks(range(len(grid)), ticks)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(name, fontsize=10.5)
        axes.set_xlabel("tau2")
        axes.set_ylabel("tau1")
        axes.label_outer()
    for axes in grid_of_axes[len(panels) :]:
        axes.set_visible(False)
    bar = figure.colorbar(image, ax=list(grid_of_axes), fraction=0.04, pad=0.02,
                          format=_PLAIN)  # fmt: skip
    bar.set_label("error, unshifted = 1")
    bar.outline.set_visible(False)
    bar.minorticks_off()
    return figure


def draw_budgets(found: Budgets) -> Figure:
    """Stacked bars by layer."""
    figure, axes = _plot(3.2)
    heavy, recent = 100 * np.array(found.heavy), 100 * np.array(found.recent)
    axes.bar(found.layers, recent, color=GREY, width=0.8, label="newest tokens")
    axes.bar(found.layers, heavy, bottom=recent, color=BLUE, width=0.8, label="heavy hitters")
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    axes.set_ylabel("kept of the prompt")
    _layers_on(axes, found.layers)
    _legend(axes)
    return figure


def draw_widths(found: Widths) -> Figure:
    """Bars by layer, keys beside values."""
    figure, axes = _plot(3.0)
    layers = np.array(found.layers)
    axes.bar(layers - 0.2, found.keys, width=0.4, color=BLUE, label="keys")
    axes.bar(layers + 0.2, found.values, width=0.4, color=ORANGE, label="values")
    axes.set_ylabel("bits of a code")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _layers_on(axes, found.layers)
    _legend(axes)
    return figure


def draw_modules(found: Sequence[ModuleSize]) -> Figure:
    """Horizontal stacked bars: parameters of each kind of module by the width in which they are stored."""
    most = sum(found[0].parameters.values())
    found = [each for each in found[:MOST_MODULES] if sum(each.parameters.values()) > most / 200][::-1]
    figure, axes = _plot(1.3 + 0.27 * len(found))
    widths = sorted({width for each in found for width in each.parameters if width})
    colors = dict(zip(widths, (BLUE, ORANGE, GREEN, "#a855f7"), strict=False))
    left = np.zeros(len(found))
    for width in (*widths, 0):
        size = np.array([each.parameters.get(width, 0) for each in found], np.float64) / 1e6
        if size.any():
            name = f"{width} bits" if width else "kept as it was"
            axes.barh(range(len(found)), size, left=left, color=colors.get(width, GREY), height=0.7, label=name)
            left += size
    axes.set_xlim(0, 1.04 * left.max())
    axes.set_yticks(range(len(found)), [label(each.name, 22) for each in found])
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.set_xlabel("parameters, millions")
    _legend(axes)
    return figure


def draw_keys(before: Tensor, after: Tensor) -> Figure:
    """Sizes of keys [T, head_dim] as computed and rotated, on one scale of colors."""
    figure = _figure(3.4)
    left, right = figure.subplots(1, 2, sharey=True)
    high = float(max(before.abs().max(), after.abs().max()))
    for axes, keys, title in ((left, before, "as computed"), (right, after, "rotated")):
        image = axes.imshow(keys.abs().numpy(), aspect="auto", cmap=SEQUENTIAL, vmin=0, vmax=high, interpolation="none")
        axes.set_title(title, fontsize=10.5)
        axes.set_xlabel("channel")
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    left.set_ylabel("token")
    bar = figure.colorbar(image, ax=[left, right], fraction=0.04, pad=0.02)
    bar.set_label("size of a key's number")
    bar.outline.set_visible(False)
    return figure


def draw_ranges(found: ChannelRanges) -> Figure:
    """A line each for the three stages."""
    figure, axes = _plot(3.2)
    for values, color, name in (
        (found.original, GREY, "as computed"),
        (found.rotated, BLUE, "rotated"),
        (found.scaled, ORANGE, "rotated and scaled"),
    ):
        axes.plot(found.layers, values, color=color, linewidth=1.8, marker="o", markersize=3.5, label=name)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("channels' squared range")
    _layers_on(axes, found.layers)
    _legend(axes)
    return figure


def draw_norms(layers: Sequence[int], norms: Tensor, shown: int) -> Figure:
    """Norms [layers, T] over their layer's median as a heat map, and below it those of the layer `shown`."""
    figure = _figure(5.0)
    top, bottom = figure.subplots(2, 1, height_ratios=(2, 1.3), sharex=True)
    relative = (norms / norms.median(1, keepdim=True).values.clamp(min=1e-30)).numpy()
    spread = float(np.clip(np.abs(np.log2(np.maximum(relative, 1e-6))).max(), 0.2, 3))
    image = top.imshow(
        np.log2(np.maximum(relative, 1e-6)),
        aspect="auto",
        cmap="RdBu_r",
        vmin=-spread,
        vmax=spread,
        interpolation="none",
    )
    step = -(-len(layers) // 8)
    top.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    top.set_ylabel("layer")
    top.tick_params(length=0)
    top.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=top, fraction=0.05, pad=0.02, format=FuncFormatter(lambda x, _: f"{2**x:.2g}"))
    bar.set_label("norm / median")
    bar.outline.set_visible(False)
    bottom.grid(True)
    bottom.plot(norms[list(layers).index(shown)].numpy(), color=BLUE, linewidth=1.0)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel(f"norm, layer {shown}")
    bottom.set_xlabel("token")
    return figure


def draw_retrieval(lengths: Sequence[int], source: Sequence[float], bundle: Sequence[float]) -> Figure:
    """Shares of numbers found, by the length of the text that hides them."""
    figure, axes = _plot(3.0)
    at = np.arange(len(lengths))
    axes.bar(at - 0.2, 100 * np.array(source), width=0.4, color=GREY, label="source")
    axes.bar(at + 0.2, 100 * np.array(bundle), width=0.4, color=BLUE, label="this bundle")
    axes.set_xticks(at, [f"{length:,}" for length in lengths])
    axes.set_ylim(0, 100)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}%"))
    axes.set_xlabel("tokens of the text")
    axes.set_ylabel("retrieval")
    _legend(axes)
    return figure
