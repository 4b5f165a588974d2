"""The tables of docs/real-model.md, from the reports of `benchmarks/real_model.py`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvconvert.fidelity.bootstrap import Interval, bootstrap_mean

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "real-model.md"
MODELS = ("smollm2", "qwen25-coder-0.5b", "gemma3-270m", "neox-code-31m")  # in the page's order
SAME_SIZE = 0.005  # bits per value
SEALED = ", sealed prompt"  # after the name of a cache that treats no whole prompts, measured as those that do
BASELINES = Path(__file__).resolve().parent / "baselines.txt"  # their rows are on docs/choosing.md
BEGIN, END = "<!-- written by benchmarks/real_model.py -->", "<!-- end -->"
TEXTS = {"wikitext2-test": "WikiText-2", "python": "code", "books-val": "novels"}
COMPARED = ("wikitext2-test", "python")
PAIRS = "40"  # of the JSON object whose column is shown


def write_page(report: dict[str, Any], page: Path | None) -> str:
    """The tables of one model, and the same between the markers of `page`, which is made if it is missing."""
    text = markdown(report)
    if page is not None:
        _put(text, page)
    return text


def write_models_page(page: Path = PAGE, results: Path = RESULTS) -> None:
    """The page of all models that have a report among the results, between its markers."""
    files = {name: results / f"real_model_{name}.json" for name in MODELS}
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files.values() if file.is_file()]
    sections = [f"## {report['settings']['model']}\n\n{markdown(report)}" for report in reports]
    _put("\n\n".join([comparison(reports), *sections]), page)


def _put(text: str, page: Path) -> None:
    old = page.read_text(encoding="utf-8") if page.is_file() else f"# Caches on a model\n\n{BEGIN}\n{END}\n"
    head, _, rest = old.partition(BEGIN)
    page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def cases_of(file: Path) -> dict[str, str]:
    """The cases of a file, one a line, with the names that follow #; without one a case is its own name."""
    lines = [line.partition("#") for line in file.read_text(encoding="utf-8").splitlines()]
    return {case.strip(): label.strip() or case.strip() for case, _, label in lines if case.strip()}


def comparison(reports: list[dict[str, Any]]) -> str:
    """Every scheme on every model: KL on two texts, then what it still finds."""
    return "\n\n".join(
        [
            "KL from the source, on WikiText-2 / on code:",
            _compared(reports, _divergences),
            "Values found in a JSON object of 40 pairs / numbers found in prose at the longest length:",
            _compared(reports, _finds),
        ]
    )


def _compared(reports: list[dict[str, Any]], cell: Callable[[dict[str, Any], dict[str, Any]], str]) -> str:
    """A column for each model, of what `cell` says of a row and its report; the source first, then by bits."""
    columns = [
        {_label(name, report): row for name, row in _measured(report).items() if row["protocol"] == "pages"}
        for report in reports
    ]
    lines = [
        ["scheme", "bits", *(report["settings"]["model"] for report in reports)],
        ["source", "16", *(cell(report["source"], report) for report in reports)],
    ]
    bits = {
        label: [rows[label]["size"]["bits_per_value"] for rows in columns if label in rows]
        for label in {label: None for rows in columns for label in rows}
    }
    for label in sorted(bits, key=lambda label: min(bits[label])):
        cells = [cell(rows[label], of) if label in rows else "" for rows, of in zip(columns, reports, strict=True)]
        lines.append([label, _span(bits[label]), *cells])
    return _rows(lines)


def _span(bits: list[float]) -> str:
    low, high = f"{min(bits):.2f}", f"{max(bits):.2f}"
    return low if low == high else f"{low} to {high}"


def _divergences(row: dict[str, Any], report: dict[str, Any]) -> str:
    if "texts" not in row:
        return "0"  # the source
    return " / ".join(_kl(row["texts"][text]["kl"]) if text in row["texts"] else "-" for text in COMPARED)


def _finds(row: dict[str, Any], report: dict[str, Any]) -> str:
    cells = [_percent(row.get("json", {}).get(PAIRS)), _percent(row.get("found", {}).get(_longest(report)))]
    return " / ".join(cell or "-" for cell in cells)


def markdown(report: dict[str, Any]) -> str:
    """What was measured and how, the caches, `auto` beside the others, paired differences, the bundles."""
    parts = [_introduction(report), _table(report, "caches", "pages")]
    if any(row.get("protocol") == "sealed prompt" for row in report["caches"].values()):
        s = report["settings"]
        prompt = s.get("sealed_prompt", s["length"] // 2)
        parts += [
            (
                f"Caches that compress a prompt as a whole, scored on the {s['length'] - prompt:,} tokens after one of "
                f"{prompt:,}, and page caches beside them that read it in the same way. Numbers are asked for after "
                "all of the prose was compressed as one prompt:"
            ),
            _table(report, "caches", "sealed prompt"),
        ]
    parts += [_auto(report), _differences(report)]
    if report["bundles"]:
        parts += ["Weights and cache, by recipes:", _table(report, "bundles", None)]
    failures = [
        f"- {_label(name, report)}: {row['failure']}"
        for table in ("caches", "bundles")
        for name, row in report[table].items()
        if "failure" in row
    ]
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
    code = f"; code is the standard library of Python {s['python']}" if "python" in s else ""
    asked = [f"{_percent(hits)} of the numbers at {int(n):,} tokens" for n, hits in source.get("found", {}).items()]
    asked += [f"{_percent(hits)} of the values in {n} pairs" for n, hits in source.get("json", {}).items()]
    recall = f" Of {s['prompts']} prompts each the source finds {', '.join(asked)}." if asked else ""
    calibrated = s["calibrated_on"]
    return (
        f"{about}. {s['segments']} segments of {s['length']:,} tokens of each text{code}; calibrated on "
        f"{calibrated['samples']} x {calibrated['length']} tokens of {calibrated['text']}.{recall}{_options(report)}"
    )


def _shared_options(report: dict[str, Any]) -> str:
    """What the names of all searched caches say after their bits, if it is the same in all."""
    found = {name.removesuffix(SEALED).partition(",")[2] for name in report["caches"] if name.startswith("auto:")}
    return found.pop() if len(found) == 1 else ""


def _options(report: dict[str, Any]) -> str:
    shared = _shared_options(report)
    return f" The names of `auto` leave out what is the same for all: {shared}." if shared else ""


def _label(name: str, report: dict[str, Any]) -> str:
    """A case's name as tables show it."""
    shared = _shared_options(report)
    return re.sub(f",{re.escape(shared)}(?={SEALED}|$)", "", name) if shared and name.startswith("auto:") else name


def _table(report: dict[str, Any], table: str, protocol: str | None) -> str:
    """At most seven columns: scheme, bits, KL of two texts, perplexity of the first, JSON, numbers; source first."""
    rows = {
        name: row
        for name, row in report[table].items()
        if "texts" in row and (protocol is None or row["protocol"] == protocol)
    }
    if not rows:
        return ""
    texts, longest = report["settings"]["texts"], _longest(report)
    shown = texts[:2]
    heads = ["scheme", "bits", *(f"KL {TEXTS.get(text, text)}" for text in shown)]
    heads.append(f"perplexity {TEXTS.get(texts[0], texts[0])}")
    asks_json = PAIRS in report["source"].get("json", {})
    heads += [f"JSON, {PAIRS} pairs"] if asks_json else []
    heads += [f"numbers at {int(longest):,}"] if longest is not None else []

    def recalled(row: dict[str, Any]) -> list[str]:
        cells = [_percent(row.get("json", {}).get(PAIRS))] if asks_json else []
        return cells + ([_percent(row.get("found", {}).get(longest))] if longest is not None else [])

    first = next(iter(rows.values()))
    perplexity = f"{first['texts'][texts[0]]['source_perplexity']:.2f}"
    lines = [["source", "16", *("0" for _ in shown), perplexity, *recalled(report["source"])]]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["size"]["bits_per_value"]):
        cells = [_label(name, report), f"{row['size']['bits_per_value']:.2f}"]
        cells += [_kl(row["texts"][text]["kl"]) for text in shown]
        lines.append([*cells, f"{row['texts'][texts[0]]['perplexity']:.2f}", *recalled(row)])
    return _rows([heads, *lines])


def _rows(lines: list[list[str]]) -> str:
    """Markdown, the first line the heads."""
    heads, *rest = ("| " + " | ".join(cells) + " |" for cells in lines)
    return "\n".join([heads, "|" + "---|" * len(lines[0]), *rest])


def _longest(report: dict[str, Any]) -> str | None:
    """The longest length at which the source finds any numbers, else the longest."""
    found = report["source"].get("found", {})
    lengths = sorted(found, key=int)
    return next((length for length in reversed(lengths) if any(found[length])), lengths[-1] if lengths else None)


def _auto(report: dict[str, Any]) -> str:
    """Paired differences in KL of `auto` from every other cache, at most at its bytes, and what they say."""
    caches, texts = _measured(report), report["settings"]["texts"]
    lines, better, worse = [], 0, 0
    for name, beside in _same_size(caches):
        found = [difference(caches[name]["texts"][t], caches[beside]["texts"][t]) for t in texts]
        better += sum(interval.high is not None and interval.high < 0 for interval in found)
        worse += sum(interval.low is not None and interval.low > 0 for interval in found)
        bits = [f"{_mean_bits(caches[each]):.3f}" for each in (beside, name)]
        lines.append([beside.removesuffix(SEALED), *bits, *map(_interval, found)])
    if not lines:
        return ""
    count = len(lines) * len(texts)
    heads = ["cache", "its bits per value", "`auto`'s", *(f"KL {TEXTS.get(text, text)}" for text in texts)]
    about = (
        "The largest `auto` of at most a cache's mean bits less that cache, with 95% bootstrap intervals over "
        f"segments; negative: `auto` is better. Of {count} differences {better} are significantly better and {worse} "
        "significantly worse:"
    )
    return f"{about}\n\n{_rows([heads, *lines])}"


def _differences(report: dict[str, Any]) -> str:
    """Paired differences in KL from the baseline, of caches that are not searched."""
    caches, baseline = _measured(report), report["baseline"]
    lines = []
    for name, row in sorted(caches.items(), key=lambda item: _mean_bits(item[1])):
        beside = baseline + SEALED if row["protocol"] == "sealed prompt" else baseline
        if beside not in caches or name == beside or name.startswith("auto:"):
            continue
        cells = [name, beside]
        for text in report["settings"]["texts"]:
            cells.append(_interval(difference(row["texts"][text], caches[beside]["texts"][text])))
        lines.append(cells)
    if not lines:
        return ""
    heads = ["cache", "less", *(f"KL {TEXTS.get(text, text)}" for text in report["settings"]["texts"])]
    about = "Paired differences in KL with 95% bootstrap intervals over segments; negative is better:"
    return f"{about}\n\n{_rows([heads, *lines])}"


def _measured(report: dict[str, Any]) -> dict[str, Any]:
    return {name: row for name, row in report["caches"].items() if "texts" in row}


def _mean_bits(row: dict[str, Any]) -> float:
    """Bits per value: over the last page of lengths, or, after a sealed prompt, where no page is being filled."""
    return row["size"]["bits_per_value" if row["protocol"] == "sealed prompt" else "mean_bits_per_value"]


def _same_size(caches: dict[str, Any]) -> list[tuple[str, str]]:
    """(`auto`, other cache) for every cache of at least its bytes, the largest `auto` that fits, by bytes."""
    pairs = []
    for protocol in ("pages", "sealed prompt"):
        bits = {name: _mean_bits(row) for name, row in caches.items() if row["protocol"] == protocol}
        found = [name for name in bits if name.startswith("auto:")]
        for other in sorted(bits.keys() - set(found), key=bits.__getitem__):
            # The baseline after a sealed prompt is compared with `auto` page by page.
            fitting = [name for name in found if bits[name] < bits[other] + SAME_SIZE]
            if fitting and not other.endswith(SEALED):
                pairs.append((max(fitting, key=bits.__getitem__), other))
    return pairs


def difference(row: dict[str, Any], other: dict[str, Any], seed: int = 0) -> Interval:
    """Mean KL of one row less that of another, of the same segments of one text."""
    one, two = (torch.tensor(r["kl_by_segment"], dtype=torch.float64) for r in (row, other))
    return bootstrap_mean(one - two, seed)


def _interval(found: Interval) -> str:
    if found.low is None:
        return f"{found.mean:+.4f}"
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


def _kl(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def _percent(hits: list[bool] | None) -> str:
    return "" if hits is None else f"{100 * sum(hits) / len(hits):.0f}%"
