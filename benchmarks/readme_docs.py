"""README's picture and table: what the cache of a real model costs, and how fast an 8B shape decodes with one.

Each panel of the picture names the model that it was measured on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from real_model_docs import TEXTS, longest_length, mean_bits, model_name, percent

from kvconvert.tables import markdown_table as table

TEXT = "wikitext2-test"
# The first of these that was measured is the picture's cache; the table has all.
CACHES = ("default", "auto:kv_bits=2.62")
MODELS = 2  # in the table, the first that have a report
LIGHT = {"text": "#1f2328", "muted": "#59636e", "source": "#afb8c1", "ours": "#0969da"}
DARK = {"text": "#f0f6fc", "muted": "#9198a1", "source": "#656c76", "ours": "#4493f8"}
WIDTH, HEIGHT, PANEL, BAR = 900, 232, 270, 20
MARGIN, GAP = 10, 35  # of the picture, and between panels beside each other


@dataclass(frozen=True)
class Panel:
    """One of the picture's three bar charts.

    Attributes:
        kind: memory, speed, or fidelity.
        title: what the reader gains or pays.
        bars: (label, value, the value as text), the source's first.
        notes: the model, and what was measured on it, one a line.
    """

    kind: str
    title: str
    bars: Sequence[tuple[str, float, str]]
    notes: Sequence[str]


def costs(reports: Sequence[Mapping[str, Any]]) -> str:
    """The loss by recipe on the first models: the cache alone, and with 4-bit weights where that was measured."""
    rows = []
    for report in [report for report in reports if TEXT in report["settings"]["texts"]][:MODELS]:
        name, source = model_name(report), report["source"]
        first = next(row for row in report["caches"].values() if "texts" in row)
        found = [("source", "16", "0", first["texts"][TEXT]["source_perplexity"], source)]
        for part, what in (("caches", ""), ("bundles", ", 4-bit weights")):
            for asked in CACHES:
                if row := _row(report, part, asked):
                    recipe = f"`{asked.replace('auto:kv_bits=', 'auto --kv-bits ')}`{what}"
                    bits, divergence = f"{mean_bits(row):.2f}", f"{row['texts'][TEXT]['kl']:.3f}"
                    found.append((recipe, bits, divergence, row["texts"][TEXT]["perplexity"], row))
        for number, (recipe, bits, divergence, perplexity, row) in enumerate(found):
            hits = percent(row.get("found", {}).get(longest_length(report)))
            rows.append(("" if number else name, recipe, bits, divergence, f"{perplexity:.2f}", hits))
    head = ("model", "`--recipe`", "cache, bits per value", f"KL, {TEXTS[TEXT]}", "perplexity", "retrieval")
    return table(head, rows)


def picture(
    report: Mapping[str, Any], engine: Mapping[str, Any], colors: Mapping[str, str], stacked: bool = False
) -> str:
    """Memory, speed and fidelity as an SVG without a background, in the colors of a theme.

    Args:
        report: a real model's report.
        engine: results of the Engine's benchmark.
        colors: `LIGHT` or `DARK`.
        stacked: one panel below the other, for narrow screens.
    """
    length = longest_length(report)
    measured = ((asked, _row(report, "caches", asked)) for asked in CACHES)
    asked, row = next((asked, row) for asked, row in measured if row and length in row.get("found", {}))
    settings, text = report["settings"], row["texts"][TEXT]
    recipe = asked.replace("auto:kv_bits=", "auto --kv-bits ")
    bits, rise = mean_bits(row), text["perplexity"] / text["source_perplexity"] - 1
    kept, whole = (sum(r["found"][length]) / len(r["found"][length]) for r in (row, report["source"]))
    ours, bf16 = engine["rows"]["engine"]["2 bits"], engine["rows"]["engine"]["bf16"]
    panels = (
        Panel(
            "MEMORY",
            f"{16 / bits:.1f}x smaller KV cache",
            (("bf16", 16, "16 bits per value"), ("kvconvert", bits, f"{bits:.2f} bits")),
            (model_name(report), f"{recipe}, {settings['length']:,} tokens, all included"),
        ),
        Panel(
            "SPEED",
            f"{ours['ratio']:.1f}x tokens per second",
            tuple(
                (label, r["tokens_per_second"], f"{r['tokens_per_second']:,.0f}, {r['batch']} sequences")
                for label, r in (("bf16", bf16), ("kvconvert", ours))
            ),
            ("8B shape with random weights, 4-bit", f"oscar-g128, 30 GB of cache, {engine['machine']['gpu']}"),
        ),
        Panel(
            "FIDELITY",
            f"{kept:.0%} of numbers retrieved",
            (("bf16", whole, f"{whole:.0%} retrieved"), ("kvconvert", kept, f"{kept:.0%} retrieved")),
            (model_name(report), f"{recipe}, {int(length):,} tokens back; perplexity {rise:+.1%}"),
        ),
    )
    label = "; ".join(f"{panel.title}: {', '.join(f'{b[0]} {b[2]}' for b in panel.bars)}" for panel in panels)
    width, height = (PANEL + 2 * MARGIN, HEIGHT * len(panels)) if stacked else (WIDTH, HEIGHT)
    right, down = (0, HEIGHT) if stacked else (PANEL + GAP, 0)
    body = "\n".join(_panel(panel, MARGIN + n * right, n * down, colors) for n, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(label)}" font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, '
        f'sans-serif">\n{body}\n</svg>\n'
    )


def _panel(panel: Panel, left: int, above: int, colors: Mapping[str, str]) -> str:
    lines = [_text(left, above + 18, panel.kind, 11, colors["muted"], "600")]
    lines.append(_text(left, above + 42, panel.title, 18, colors["text"], "600"))
    most = max(value for _, value, _ in panel.bars)
    for number, (label, value, said) in enumerate(panel.bars):
        top, width = above + 64 + number * 54, max(3.0, PANEL * value / most)
        color = colors["ours" if number else "source"]
        lines.append(_text(left, top + 10, label, 13, colors["text"], "400"))
        lines.append(_text(left + PANEL, top + 10, said, 13, colors["text"], "400", "end"))
        lines.append(f'<rect x="{left}" y="{top + 18}" width="{width:.1f}" height="{BAR}" rx="3" fill="{color}"/>')
    lines += [_text(left, above + 190 + 18 * n, note, 12, colors["muted"], "400") for n, note in enumerate(panel.notes)]
    return "\n".join(lines)


def _text(x: int, y: int, text: str, size: int, color: str, weight: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


def _row(report: Mapping[str, Any], part: str, asked: str) -> Mapping[str, Any] | None:
    """A measured row; that of a search by its bits, whatever else its name says."""
    rows = {name: row for name, row in report[part].items() if "texts" in row and TEXT in row["texts"]}
    searched = {f"auto:kv_bits={mean_bits(row):.2f}": row for name, row in rows.items() if name.startswith("auto:")}
    return rows.get(asked) or searched.get(asked)
