"""The page, one HTML file that loads nothing and runs nothing, and its cards in their order: what each shows, in words,
and why one is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from matplotlib.figure import Figure
from transformers import PretrainedConfig

from kvconvert.bundle.describe import Description
from kvconvert.bundle.figures import HEADER, fidelity_rows, how_measured, retrieval_by_length, text
from kvconvert.bundle.reader import Bundle
from kvconvert.errors import printable
from kvconvert.report import data, figures
from kvconvert.report.data import KeySample, NotDrawnError

Row = tuple[str, ...]
SENTENCE = 16  # letters beyond which a cell is one
ROWS_SHOWN = 16  # longer tables are closed at first


@dataclass(frozen=True)
class Section:
    """A card of the report.

    Attributes:
        name: the name of its PNG file and of its place in the page: lower-case letters and hyphens.
        title: the title of the card.
        caption: a sentence or two.
        svg: the figure to stand in the page, or None.
        header, rows: header and rows of a table; without rows there is none.
        wide: takes the whole width of a wide page.
    """

    name: str
    title: str
    caption: str
    svg: str | None = None
    header: Row = ()
    rows: Sequence[Row] = ()
    wide: bool = False


@dataclass(frozen=True)
class Heading:
    """The heading above the cards.

    Attributes:
        title: the title of the page.
        facts: the facts of the bundle, as (name, value).
        tiles: the figures that matter, as (value, what it is).
    """

    title: str
    facts: Sequence[tuple[str, str]]
    tiles: Sequence[tuple[str, str]]


def as_html(value: str) -> str:
    """A bundle's text as HTML: control characters as Python's escapes, markup as entities."""
    return escape(printable(value), quote=True)


def page(heading: Heading, sections: Sequence[Section], omitted: Sequence[tuple[str, str]]) -> str:
    """The HTML of a report.

    Args:
        heading: the heading of the page; nothing in it is markup.
        sections: in their order; of these `svg` alone is markup.
        omitted: figures that were left out and why.
    """
    tiles = "".join(f"<li><b>{as_html(value)}</b><span>{as_html(what)}</span></li>" for value, what in heading.tiles)
    facts = "".join(f"<div><dt>{as_html(name)}</dt><dd>{as_html(value)}</dd></div>" for name, value in heading.facts)
    cards = "\n".join(map(_card, _filled(sections)))
    left_out = "".join(f"<li><b>{as_html(title)}</b>: {as_html(reason)}</li>" for title, reason in omitted)
    left_out = f'<section class="card wide" id="not-shown"><h2>Not shown</h2><ul>{left_out}</ul></section>'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>{as_html(heading.title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<header>
<p class="kind">kvconvert report</p>
<h1>{as_html(heading.title)}</h1>
<dl>{facts}</dl>
<ul class="tiles">{tiles}</ul>
</header>
<main>
{cards}
{left_out if omitted else ""}
</main>
<footer>Written by <code>kvconvert report</code>. This file loads nothing from elsewhere.</footer>
</body>
</html>
"""


def _card(section: Section) -> str:
    figure = f'<div class="figure">{section.svg}</div>' if section.svg else ""
    kind = "card wide" if section.wide else "card"
    title = f'<h2 id="{section.name}">{as_html(section.title)}</h2>'
    return (
        f'<section class="{kind}" aria-labelledby="{section.name}">{title}<p>{as_html(section.caption)}</p>'
        f"{figure}{_table(section)}</section>"
    )


def _without_repeats(rows: Sequence[Row]) -> list[Row]:
    """The rows with "as above" for a sentence that the row before ends with, too."""
    shown: list[Row] = []
    for before, row in zip([(), *rows], rows, strict=False):
        repeats = bool(before) and before[-1] == row[-1] and len(str(row[-1])) > SENTENCE
        shown.append((*row[:-1], "as above") if repeats else row)
    return shown


def _table(section: Section) -> str:
    if not section.rows:
        return ""
    kinds = [' class="n"' if all(map(_is_number, column)) else "" for column in zip(*section.rows, strict=True)]
    head = "".join(
        f'<th scope="col"{kind}>{as_html(cell)}</th>'
        for cell, kind in zip(section.header, ["", *kinds[1:]], strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{_name(row[0])}</th>'
        + "".join(f"<td{kind}>{as_html(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        + "</tr>"
        for row in _without_repeats(section.rows)
    )
    # Its own scroll container, which the keyboard reaches.
    table = (
        f'<div class="table" tabindex="0" role="region" aria-label="{as_html(section.title)}, table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    if len(section.rows) <= ROWS_SHOWN:
        return table
    return f"<details><summary>Table of {len(section.rows)} rows</summary>{table}</details>"


def _name(cell: str) -> str:
    """A row's name; narrow screens break a module's between its words."""
    return re.sub(r"([._])(?=\w)", r"\1<wbr>", as_html(cell))


def _is_number(cell: str) -> bool:
    """Numbers stand to the right."""
    return (cell[:1].isdigit() and len(cell) < 24) or not cell


def _filled(sections: Sequence[Section]) -> list[Section]:
    """The cards, none of them beside a gap: the last of an odd number of narrow ones in a row is wide."""
    filled: list[Section] = []
    beside = False  # whether a narrow card waits for another
    for section in sections:
        if section.wide and beside:
            filled[-1] = replace(filled[-1], wide=True)
        beside = not section.wide and not beside
        filled.append(section)
    if beside:
        filled[-1] = replace(filled[-1], wide=True)
    return filled


_STYLE = """
:root{color-scheme:light dark;--page:#f5f6f8;--card:#fff;--ink:#1f2429;--soft:#59636e;--line:#d8dde3;--accent:#1d5fd0}
@media (prefers-color-scheme:dark){:root{--page:#0e1116;--card:#171b22;--ink:#e6eaf0;--soft:#9aa5b1;--line:#2c333d;
--accent:#7db0ff}}
*{box-sizing:border-box}
body{margin:0;padding:2rem 1rem 3rem;background:var(--page);color:var(--ink);overflow-wrap:anywhere;
font:1rem/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
header,main,footer{max-width:60rem;margin:0 auto}
.kind{margin:0;color:var(--accent);font-size:.8rem;font-weight:600;letter-spacing:.06em;text-transform:uppercase}
h1{margin:.1rem 0 .9rem;font-size:clamp(1.5rem,4vw,2.1rem);line-height:1.2;letter-spacing:-.01em}
h2{margin:0 0 .35rem;font-size:1.08rem;line-height:1.3}
dl{display:flex;flex-wrap:wrap;gap:.35rem 1.6rem;margin:0 0 1.3rem;font-size:.88rem}
dl div{display:flex;gap:.45rem;max-width:100%}
dt{color:var(--soft);flex:none}
dd{margin:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.2rem,1fr));gap:.75rem;margin:0 0 1rem;padding:0;
list-style:none}
.tiles li{padding:.8rem .95rem;border:1px solid var(--line);border-radius:.75rem;background:var(--card)}
.tiles b{display:block;font-size:1.45rem;line-height:1.25;font-variant-numeric:tabular-nums}
.tiles span{color:var(--soft);font-size:.82rem;line-height:1.35;display:block}
main{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem;align-items:start}
.card{min-width:0;padding:1.1rem 1.2rem 1.2rem;border:1px solid var(--line);border-radius:.85rem;background:var(--card)}
.wide{grid-column:1/-1}
.card p{margin:0 0 .8rem;color:var(--soft);font-size:.9rem;max-width:44rem}
.card ul{margin:.3rem 0 0;padding-left:1.2rem;font-size:.9rem}
.figure svg{display:block;width:100%;height:auto;margin:0 auto}
.figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.table{overflow-x:auto;margin-top:.6rem;font-size:.86rem;overflow-wrap:normal}
table{border-collapse:collapse;width:100%}
th,td{padding:.38rem .8rem .38rem 0;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
thead th{color:var(--soft);font-weight:500;white-space:nowrap}
tbody th{font-weight:500}
tbody th,td:not(:last-child){white-space:nowrap}
td:last-child:not(.n){min-width:13rem}
summary{cursor:pointer;color:var(--accent);font-size:.88rem}
td{font-variant-numeric:tabular-nums}
.n{text-align:right;white-space:nowrap}
tbody tr:last-child>*{border-bottom:0}
footer{margin-top:1.4rem;color:var(--soft);font-size:.82rem}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
@media (max-width:52rem){main{grid-template-columns:minmax(0,1fr)}body{padding:1.2rem .75rem 2rem}
.card{padding:.9rem .9rem 1rem}}
@media (max-width:34rem){tbody th,td:not(:last-child){white-space:normal}
tbody th{overflow-wrap:anywhere;min-width:5rem}th,td{padding-right:.55rem}td:last-child:not(.n){min-width:6.5rem}}
@media print{body{background:none;padding:0}.card{break-inside:avoid}}
"""


NO_SEARCH = "the bundle's recipe searched for no allocation, as the recipe auto does."
NO_MODEL = "it needs the source's activations; give its directory or Hub id with --model."


@dataclass
class Contents:
    """Inputs of a report, and the cards that it collects.

    Attributes:
        bundle: verified; its manifest is fit to be printed.
        description: the description of the bundle.
        config: transformers' configuration of the bundle.
        fidelity: as `kvconvert eval --json` prints it, or None.
        missed: the recipe's limits that the bundle misses.
        sample: keys of the source, or None.
        sections, images, omitted: cards, PNG files by name, and (title, reason) of figures that are left out.
    """

    bundle: Bundle
    description: Description
    config: PretrainedConfig
    fidelity: dict[str, Any] | None
    missed: list[str]
    sample: KeySample | None
    sections: list[Section] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)
    omitted: list[tuple[str, str]] = field(default_factory=list)

    def add(self, name: str, title: str, caption: str, alt: str, figure: Figure | None = None, **others: Any) -> None:
        """A card; `alt` says what its figure shows to those who do not see it."""
        svg = None
        if figure is not None:
            svg = figures.svg(figure, name, alt)
            figure.set_layout_engine("none")  # what the first drawing found fits the second
            self.images[f"{name}.png"] = figures.png(figure)
        self.sections.append(Section(name, title, caption, svg, **others))

    def build(self) -> None:
        """Make every card, in the page's order."""
        for title, make in _CARDS:
            try:
                with figures.drawing():
                    make(self)
            except NotDrawnError as reason:
                self.omitted.append((title, str(reason)))


def _fidelity(c: Contents) -> None:
    if c.fidelity is None:
        raise NotDrawnError(
            "it was not measured at export; kvconvert eval measures it, and kvconvert report takes its JSON."
        )
    rows = fidelity_rows(c.fidelity)
    if not rows:
        raise NotDrawnError("the report holds none of the figures that are shown here.")
    missed = " ".join(f"{sentence.rstrip('.')}." for sentence in c.missed)
    caption = "How far the bundle departs from its source, decoding through its own cache."
    caption = " ".join(filter(None, (caption, text(c.fidelity, "verdict"), missed)))
    found = retrieval_by_length(c.fidelity)
    figure, alt = None, ""
    if len(found) > 1:
        figure = figures.draw_retrieval(*zip(*found, strict=True))
        alt = "Bars of the share of hidden numbers that source and bundle retrieve, by length: " + ", ".join(
            f"{length:,} tokens {source:.0%} and {bundle:.0%}" for length, source, bundle in found
        )
        caption += " The bars show retrieval: how many hidden numbers each finds."
    how = how_measured(c.fidelity)
    c.add("fidelity", "Fidelity", f"{caption} {how + '.' if how else ''}".strip(), alt, figure, header=HEADER,
          rows=rows, wide=True)  # fmt: skip


def _memory(c: Contents) -> None:
    found = data.memory(c.bundle.manifest, c.config)
    caption = "Bytes of one sequence's keys and values after a prompt, by the layout of the cache, full-precision "
    caption += "tokens included; computed, not measured."
    if found.positions and found.positions < found.contexts[-1]:
        caption += f" The model itself has {found.positions:,} positions."
    if found.stateful:
        caption += f" {found.stateful} layers keep no keys and values and are not counted."
    rows = [
        (f"{context:,}", figures.bytes_text(plain), figures.bytes_text(own), f"{plain / own:.1f}x")
        for context, plain, own in zip(found.contexts, found.plain, found.bundle, strict=True)
    ]
    first, last = rows[0], rows[-1]
    alt = f"Memory against tokens of the prompt: at {first[0]} tokens {first[1]} in bfloat16 and {first[2]} in this "
    alt += f"bundle, at {last[0]} tokens {last[1]} and {last[2]}."
    header = ("tokens", "bfloat16", "this bundle", "smaller")
    c.add("memory", "Memory against context", caption, alt, figures.draw_memory(found), header=header, rows=rows)


def _frontier(c: Contents) -> None:
    if c.bundle.manifest.allocation is None:
        raise NotDrawnError(NO_SEARCH)
    found = data.frontier(c.bundle.manifest, c.config)
    caption = "Each point of the line is the best allocation of its size by the sum of single measurements; the filled "
    caption += "dot is what the whole plan of this bundle measured."
    rows = [
        ("size, bits per value", f"{found.chosen_bits:.3f}"),
        ("KL, sum of single measurements", f"{found.predicted_kl:.4g}"),
        ("KL, measured for the whole plan", f"{found.measured_kl:.4g}"),
    ]
    alt = f"Divergence against size: the line of best allocations falls from {found.kl[0]:.3g} nats at "
    alt += f"{found.bits[0]:.2f} bits per value to {found.kl[-1]:.3g} at {found.bits[-1]:.2f}; this bundle has "
    alt += f"{found.chosen_bits:.2f} bits and measured {found.measured_kl:.3g} nats."
    header = ("this bundle", "")
    c.add("frontier", "Size against divergence", caption, alt, figures.draw_frontier(found), header=header, rows=rows)


def _sensitivity(c: Contents) -> None:
    allocation = c.bundle.manifest.allocation
    if allocation is None:
        raise NotDrawnError(NO_SEARCH)
    found = data.sensitivity(allocation)
    caption = "Divergence of the whole model with one layer's keys (K) or values (V) alone stored so: bits, group (g), "
    caption += "share of boosted channels (+) or full-precision window (w). Dots mark what was chosen. "
    if (found.kl <= 0).any():
        caption += "White fields have no divergence: storing that layer so cost nothing. "
    caption += f"{c.description.allocation[0]}."
    layer, kl = found.largest()
    alt = f"Heat map of divergences, {len(found.layers)} layers by {len(found.candidates)} candidates: the largest is "
    alt += f"{1000 * kl:.3g} thousandths of a nat, in layer {layer}."
    c.add("sensitivity", "Sensitivity of the layers", caption, alt, figures.draw_sensitivity(found), wide=True)


def _plan(c: Contents) -> None:
    manifest = c.bundle.manifest
    found = data.layer_widths(manifest, c.config)
    rows = [(layers, ", ".join(clauses)) for layers, clauses in c.description.layers]
    alt = "" if found is None else f"Bits of keys and of values in each of {len(found.layers)} layers."
    figure = None if found is None else figures.draw_widths(found)
    caption = f"What every layer's keys and values become. {c.description.cache}."
    c.add("plan", "Plan of the cache", caption, alt, figure, header=("layers", "plan"), rows=rows, wide=True)


def _budgets(c: Contents) -> None:
    found = data.budgets(c.bundle.manifest)
    if found is None:
        raise NotDrawnError("no layer of this bundle throws tokens away by a budget of its own.")
    caption = "Of a long prompt each KV head keeps its heavy hitters, the tokens that received the most attention, and "
    caption += "its newest tokens."
    shares = [heavy + recent for heavy, recent in zip(found.heavy, found.recent, strict=True)]
    alt = f"Share of the prompt kept by layer: {shares[0]:.0%} in layer {found.layers[0]}, {shares[-1]:.0%} in layer "
    alt += f"{found.layers[-1]}, between {min(shares):.0%} and {max(shares):.0%} in all."
    c.add("budgets", "Budgets of the layers", caption, alt, figures.draw_budgets(found))


def _tau(c: Contents) -> None:
    found = data.tau_surfaces(c.bundle.manifest, c.bundle.plan)
    if not found:
        raise NotDrawnError("CalibQuant's tau was not searched for this bundle.")
    caption = "Error of the attention weights for each pair (tau1, tau2), by which CalibQuant shifts the smallest and "
    caption += "the largest score, relative to no shift; dots mark the choice."
    taus = {each.chosen for each in found}
    chosen = ", ".join(f"({tau1:g}, {tau2:g})" for tau1, tau2 in sorted(taus)[:8])
    alt = f"Heat maps of the error over tau1 and tau2 in {len(found)} layers; chosen: {chosen}."
    c.add("tau", "Tau surface", caption, alt, figures.draw_tau(found))


def _keys(c: Contents) -> None:
    if c.sample is None:
        raise NotDrawnError(NO_MODEL)
    layer, head = c.sample.most_uneven()
    before, after = data.shown_channels(c.sample.keys[layer][head])
    scheme = c.bundle.manifest.layers[layer].scheme()
    rotates = scheme is not None and scheme.rotate_keys != "none"
    caption = f"Keys of KV head {head} in layer {layer}, where channels are most uneven, on {before.shape[0]:,} tokens "
    caption += f"of {c.sample.text}. Rotation spreads what lies in single channels over all; this bundle "
    caption += f"{'rotates' if rotates else 'does not rotate'} the keys of this layer."
    if not c.sample.is_recorded_source:
        caption += f" {c.sample.model} has another config.json than the source that the manifest names."
    alt = f"Two heat maps of keys, tokens by channels: the largest number is {before.abs().max():.3g} as computed and "
    alt += f"{after.abs().max():.3g} after rotation."
    c.add("keys", "Key channels before and after rotation", caption, alt, figures.draw_keys(before, after))


def _ranges(c: Contents) -> None:
    manifest, plan = c.bundle.manifest, c.bundle.plan
    found = data.channel_ranges(c.sample.channel_range) if c.sample else data.planned_channel_ranges(manifest, plan)
    if found is None:
        raise NotDrawnError(NO_MODEL)
    caption = "Squared ranges of the channels within pages over the keys' squared size, to which the error of a "
    caption += (
        "quantizer is proportional: as computed, rotated, and with each token scaled by its norm. One rotates even "
    )
    caption += (
        "where that alone raises them, because it gives every channel its share of a token's size, which only then "
    )
    caption += "one norm per token can even out."
    alt = f"Three lines over layers; their means are {_mean(found.original):.3g} as computed, "
    alt += f"{_mean(found.rotated):.3g} rotated and {_mean(found.scaled):.3g} rotated and scaled."
    c.add("ranges", "Ranges of key channels", caption, alt, figures.draw_ranges(found))


def _norms(c: Contents) -> None:
    if c.sample is None:
        raise NotDrawnError(NO_MODEL)
    layers, norms = c.sample.norms()
    ratio = norms / norms.median(1, keepdim=True).values.clamp(min=1e-30)
    at = int((ratio.amax(1) / ratio.amin(1).clamp(min=1e-30)).argmax())
    caption = "Norm of each token's key over the median of its layer. Tokens that differ from their neighbors, mostly "
    caption += "the first ones, stretch the scale of every channel that they share; sink tokens and token norms are "
    caption += f"for them. Below, layer {layers[at]}, where norms differ most."
    alt = f"Heat map of key norms, {norms.shape[0]} layers by {norms.shape[1]:,} tokens; norms reach from "
    alt += f"{float(ratio.min()):.2g} to {float(ratio.max()):.2g} times their layer's median."
    c.add("norms", "Token norms", caption, alt, figures.draw_norms(layers, norms, layers[at]))


def _weights(c: Contents) -> None:
    manifest = c.bundle.manifest
    found = data.module_sizes(manifest)
    widths = sorted({width for each in found for width in each.parameters})
    total = {width: sum(each.parameters.get(width, 0) for each in found) for width in widths}
    words = ", ".join(f"{n:,} {f'at {width} bits' if width else 'kept'}" for width, n in total.items())
    figure = figures.draw_modules(found) if found else None
    modules = c.description.modules
    c.add("weights", "Coverage of the weights", f"{c.description.weights}.", f"Parameters by width: {words}.", figure,
          header=modules.header, rows=modules.rows, wide=True)  # fmt: skip


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


_CARDS: tuple[tuple[str, Callable[[Contents], None]], ...] = (
    ("Fidelity", _fidelity),
    ("Memory against context", _memory),
    ("Size against divergence", _frontier),
    ("Sensitivity of the layers", _sensitivity),
    ("Plan of the cache", _plan),
    ("Budgets of the layers", _budgets),
    ("Tau surface", _tau),
    ("Key channels before and after rotation", _keys),
    ("Ranges of key channels", _ranges),
    ("Token norms", _norms),
    ("Coverage of the weights", _weights),
)
# PNG files that a report may have.
FILES = frozenset(f"{make.__name__.removeprefix('_')}.png" for _, make in _CARDS)
