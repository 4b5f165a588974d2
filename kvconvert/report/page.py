"""The page: one HTML file that loads nothing and runs nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

from kvconvert.errors import printable

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


def text(value: str) -> str:
    """A bundle's text as HTML: control characters as Python's escapes, markup as entities."""
    return escape(printable(value), quote=True)


def page(heading: Heading, sections: Sequence[Section], omitted: Sequence[tuple[str, str]]) -> str:
    """The HTML of a report.

    Args:
        heading: the heading of the page; nothing in it is markup.
        sections: in their order; of these `svg` alone is markup.
        omitted: figures that were left out and why.
    """
    tiles = "".join(f"<li><b>{text(value)}</b><span>{text(what)}</span></li>" for value, what in heading.tiles)
    facts = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in heading.facts)
    cards = "\n".join(map(_card, _filled(sections)))
    left_out = "".join(f"<li><b>{text(title)}</b>: {text(reason)}</li>" for title, reason in omitted)
    left_out = f'<section class="card wide" id="not-shown"><h2>Not shown</h2><ul>{left_out}</ul></section>'
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="color-scheme" content="light dark">
<title>{text(heading.title)}</title>
<link rel="icon" href="data:,">
<style>{_STYLE}</style>
</head>
<body>
<header>
<p class="kind">kvconvert report</p>
<h1>{text(heading.title)}</h1>
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
    title = f'<h2 id="{section.name}">{text(section.title)}</h2>'
    return (
        f'<section class="{kind}" aria-labelledby="{section.name}">{title}<p>{text(section.caption)}</p>'
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
        f'<th scope="col"{kind}>{text(cell)}</th>' for cell, kind in zip(section.header, ["", *kinds[1:]], strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{_name(row[0])}</th>'
        + "".join(f"<td{kind}>{text(cell)}</td>" for cell, kind in zip(row[1:], kinds[1:], strict=True))
        + "</tr>"
        for row in _without_repeats(section.rows)
    )
    # Its own scroll container, which the keyboard reaches.
    table = (
        f'<div class="table" tabindex="0" role="region" aria-label="{text(section.title)}, table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )
    if len(section.rows) <= ROWS_SHOWN:
        return table
    return f"<details><summary>Table of {len(section.rows)} rows</summary>{table}</details>"


def _name(cell: str) -> str:
    """A row's name; narrow screens break a module's between its words."""
    return re.sub(r"([._])(?=\w)", r"\1<wbr>", text(cell))


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
@media (max-width:34rem){tbody th,td:not(.n):not(:last-child){white-space:normal}
tbody th{overflow-wrap:anywhere;min-width:6.5rem}th,td{padding-right:.55rem}td:last-child:not(.n){min-width:7.5rem}}
@media print{body{background:none;padding:0}.card{break-inside:avoid}}
"""
