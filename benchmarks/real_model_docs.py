"""Caches on real models as tables, from the reports of `benchmarks/real_model.py`: one comparison, one section a model.

`make docs` puts the comparison into docs/choosing.md and the sections into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner import RESULTS, read
from tables import difference, signed

from kvconvert.fidelity.scoring import Interval
from kvconvert.tables import markdown_table as table

# In the order of the columns, as files and as people call them.
MODELS = {
    "smollm2": "SmolLM2-135M-Instruct",
    "qwen25-coder-0.5b": "Qwen2.5-Coder-0.5B-Instruct",
    "gemma3-270m": "Gemma 3 270M",
    "neox-code-31m": "GPT-NeoX 31M, code",
}
SAME_SIZE = 0.005  # bits per value
TEXTS = {"wikitext2-test": "WikiText-2", "python": "code", "books-val": "novels"}
COMPARED = ("wikitext2-test", "python")
PAIRS = "40"  # of the JSON object whose column is shown


def reports(results: Path = RESULTS) -> list[dict[str, Any]]:
    """The reports of all models that were measured."""
    found = {title: read(results / f"real_model_{name}.json") for name, title in MODELS.items()}
    return [report | {"title": title} for title, report in found.items() if report]


def sections(found: list[dict[str, Any]]) -> str:
    """Perplexities of all models, then how each was measured and how its `auto` fares beside other caches."""
    parts = ["Perplexity on WikiText-2:", _compared(found, _perplexity)]
    for report in found:
        parts += [f"### {model_name(report)}", _introduction(report), _auto(report)]
    return "\n\n".join(part for part in parts if part)


def model_name(report: dict[str, Any]) -> str:
    """The title of a report's model."""
    return report.get("title", report["settings"]["model"])


def comparison(found: list[dict[str, Any]]) -> str:
    """Every scheme on every model: KL on two texts, then what it still finds."""
    return "\n\n".join(
        [
            "KL from the source on WikiText-2 / on code, by bits per value at 4,100 tokens:",
            _compared(found, _divergences),
            "Values retrieved from a JSON object of 40 pairs / numbers retrieved from prose of the longest length:",
            _compared([report for report in found if any(report["source"].values())], _finds),
        ]
    )


def _compared(found: list[dict[str, Any]], cell: Callable[[dict[str, Any], dict[str, Any]], str]) -> str:
    """A column for each model, of what `cell` says of a row and its report; the source first, then by bits."""
    columns = [{_label(name, report): row for name, row in _measured(report).items()} for report in found]
    head = ["scheme", "bits", *map(model_name, found)]
    lines = [["source", "16", *(cell(report["source"], report) for report in found)]]
    bits = {
        label: [mean_bits(rows[label]) for rows in columns if label in rows]
        for label in {label: None for rows in columns for label in rows}
    }
    for label in sorted(bits, key=lambda label: min(bits[label])):
        cells = [cell(rows[label], of) if label in rows else "" for rows, of in zip(columns, found, strict=True)]
        lines.append([_asked(label), _span(bits[label]), *cells])
    return table(head, lines)


def _asked(label: str) -> str:
    """How a user asks for a case that is searched; presets by their names."""
    return re.sub(r"^auto:kv_bits=([\d.]+)(.*)", r"`auto --kv-bits \1`\2", label)


def _span(bits: list[float]) -> str:
    low, high = f"{min(bits):.2f}", f"{max(bits):.2f}"
    return low if low == high else f"{low} to {high}"


def _divergences(row: dict[str, Any], report: dict[str, Any]) -> str:
    if "texts" not in row:
        return "0"  # the source
    return " / ".join(_kl(row["texts"][text]["kl"]) if text in row["texts"] else "-" for text in COMPARED)


def _perplexity(row: dict[str, Any], report: dict[str, Any]) -> str:
    if "texts" not in row:  # the source
        return f"{next(iter(_measured(report).values()))['texts'][COMPARED[0]]['source_perplexity']:.2f}"
    return f"{row['texts'][COMPARED[0]]['perplexity']:.2f}"


def _finds(row: dict[str, Any], report: dict[str, Any]) -> str:
    cells = [percent(row.get("json", {}).get(PAIRS)), percent(row.get("found", {}).get(longest_length(report)))]
    return " / ".join(cell or "-" for cell in cells)


def markdown(report: dict[str, Any]) -> str:
    """A report: settings, the caches, and `auto` beside the others."""
    parts = [_introduction(report), _table(report), _auto(report)]
    failures = [f"- {name}: {row['failure']}" for name, row in report["caches"].items() if "failure" in row]
    if failures:
        parts.append("\n".join(["Not measured:", "", *failures]))
    return "\n\n".join(part for part in parts if part)


def _introduction(report: dict[str, Any]) -> str:
    s, source = report["settings"], report["source"]
    shape = s.get("shape")
    about = f"{s['model']} in {s['dtype']} on {s.get('device', 'a CPU')}"
    if shape is not None:
        about += (
            f": `{shape['model_type']}`, {shape['layers']} layers of {shape['heads']} query and {shape['kv_heads']} KV "
            f"heads of {shape['head_dim']}, {shape['positions']:,} positions"
        )
    code = f", code of Python {s['python']}" if "python" in s else ""
    asked = [f"{percent(hits)} of the numbers at {int(n):,} tokens" for n, hits in source.get("found", {}).items()]
    asked += [f"{percent(hits)} of the values in {n} pairs" for n, hits in source.get("json", {}).items()]
    retrieval = f" Of {s['prompts']} prompts each the source finds {', '.join(asked)}." if asked else ""
    calibrated = s["calibrated_on"]
    return (
        f"{about}. {s['segments']} x {s['length']:,} tokens of each text{code}; calibrated on "
        f"{calibrated['samples']} x {calibrated['length']} tokens of {calibrated['text']}.{retrieval}{_options(report)}"
    )


def _shared_options(report: dict[str, Any]) -> str:
    """The options after the bits in the names of searched caches, if all have the same."""
    found = {name.partition(",")[2] for name in report["caches"] if name.startswith("auto:")}
    return found.pop() if len(found) == 1 else ""


def _options(report: dict[str, Any]) -> str:
    shared = _shared_options(report)
    return f" `auto`: {shared}." if shared else ""


def _label(name: str, report: dict[str, Any]) -> str:
    """A case's name as tables show it: a search's without what all searches share.

    A search's bits are those that were measured: budgets meant a full last page before they meant the mean.
    """
    shared = _shared_options(report)
    if name.startswith("auto:kv_bits=") and "size" in report["caches"][name]:
        name = re.sub(r"[\d.]+", f"{mean_bits(report['caches'][name]):.2f}", name, count=1)
    return name.removesuffix(f",{shared}") if shared and name.startswith("auto:") else name


def _table(report: dict[str, Any]) -> str:
    """At most seven columns: scheme, bits, KL of two texts, perplexity of the first, JSON, numbers; source first."""
    rows = _measured(report)
    if not rows:
        return ""
    texts, longest = report["settings"]["texts"], longest_length(report)
    shown = texts[:2]
    heads = ["scheme", "bits", *(f"KL {TEXTS.get(text, text)}" for text in shown)]
    heads.append(f"perplexity {TEXTS.get(texts[0], texts[0])}")
    asks_json = PAIRS in report["source"].get("json", {})
    heads += [f"JSON, {PAIRS} pairs"] if asks_json else []
    heads += [f"numbers at {int(longest):,}"] if longest is not None else []

    def retrieved(row: dict[str, Any]) -> list[str]:
        cells = [percent(row.get("json", {}).get(PAIRS))] if asks_json else []
        return cells + ([percent(row.get("found", {}).get(longest))] if longest is not None else [])

    first = next(iter(rows.values()))
    perplexity = f"{first['texts'][texts[0]]['source_perplexity']:.2f}"
    lines = [["source", "16", *("0" for _ in shown), perplexity, *retrieved(report["source"])]]
    for name, row in sorted(rows.items(), key=lambda item: mean_bits(item[1])):
        cells = [_label(name, report), f"{mean_bits(row):.2f}"]
        cells += [_kl(row["texts"][text]["kl"]) for text in shown]
        lines.append([*cells, f"{row['texts'][texts[0]]['perplexity']:.2f}", *retrieved(row)])
    return table(heads, lines)


def longest_length(report: dict[str, Any]) -> str | None:
    """The longest length at which the source finds any numbers, else the longest."""
    found = report["source"].get("found", {})
    lengths = sorted(found, key=int)
    return next((length for length in reversed(lengths) if any(found[length])), lengths[-1] if lengths else None)


def _auto(report: dict[str, Any]) -> str:
    """Paired differences in KL of `auto` from every other cache, at most at its bytes, and what they say."""
    caches, texts = _measured(report), report["settings"]["texts"]
    lines, better, worse = [], 0, 0
    for name, beside in _same_size(caches):
        found = [_less(caches[name], caches[beside], text) for text in texts]
        better += sum(interval.below_zero for interval in found)
        worse += sum(interval.above_zero for interval in found)
        bits = [f"{mean_bits(caches[each]):.3f}" for each in (beside, name)]
        lines.append([_label(beside, report), *bits, *map(signed, found)])
    if not lines:
        return ""
    count = len(lines) * len(texts)
    heads = ["cache", "its bits per value", "`auto`'s", *(f"KL {TEXTS.get(text, text)}" for text in texts)]
    about = f"`auto` less the cache; of {count} differences {better} are significantly better, {worse} worse:"
    return f"{about}\n\n{table(heads, lines)}"


def _less(row: dict[str, Any], other: dict[str, Any], text: str) -> Interval:
    return difference(row["texts"][text]["kl_by_segment"], other["texts"][text]["kl_by_segment"])


def _measured(report: dict[str, Any]) -> dict[str, Any]:
    return {name: row for name, row in report["caches"].items() if "texts" in row}


def mean_bits(row: dict[str, Any]) -> float:
    """Bits per value over the last page of lengths."""
    return row["size"]["mean_bits_per_value"]


def _same_size(caches: dict[str, Any]) -> list[tuple[str, str]]:
    """(`auto`, other cache) for every cache of at least its bytes, the largest `auto` that fits, by bytes."""
    pairs = []
    bits = {name: mean_bits(row) for name, row in caches.items()}
    found = [name for name in bits if name.startswith("auto:")]
    for other in sorted(bits.keys() - set(found), key=lambda name: (bits[name], name)):
        fitting = [name for name in found if bits[name] < bits[other] + SAME_SIZE]
        if fitting:
            pairs.append((max(fitting, key=bits.__getitem__), other))
    return pairs


def _kl(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def percent(hits: list[bool] | None) -> str:
    return "" if hits is None else f"{100 * sum(hits) / len(hits):.0f}%"
