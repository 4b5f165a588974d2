"""The tables of docs/real-model.md, from the report of `benchmarks/real_model.py`."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from kvconvert.fidelity.bootstrap import Interval, bootstrap_mean

SAME_SIZE = 0.005  # bits per value
SEALED = ", sealed prompt"  # after the name of a cache that treats no whole prompts, measured as those that do
BASELINES = Path(__file__).resolve().parent / "baselines.txt"  # their rows are on docs/choosing.md
BEGIN, END = "<!-- written by benchmarks/real_model.py -->", "<!-- end -->"


def write_page(report: dict[str, Any], page: Path | None, elsewhere: Collection[str] = ()) -> str:
    """The tables, and the same between the markers of `page`, without rows that another page shows.

    A page that is missing is made.
    """
    if page is not None:
        caches = {name: row for name, row in report["caches"].items() if name not in elsewhere}
        text = markdown(report | {"caches": caches})
        old = page.read_text(encoding="utf-8") if page.is_file() else f"# A real model\n\n{BEGIN}\n{END}\n"
        head, _, rest = old.partition(BEGIN)
        page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return markdown(report)


def cases_of(file: Path) -> dict[str, str]:
    """The cases of a file, one a line, with the names that follow #; without one a case is its own name."""
    lines = [line.partition("#") for line in file.read_text(encoding="utf-8").splitlines()]
    return {case.strip(): label.strip() or case.strip() for case, _, label in lines if case.strip()}


def markdown(report: dict[str, Any]) -> str:
    """What was measured and how, the caches, `auto` beside the others, paired differences, the bundles."""
    parts = [_introduction(report), _table(report, "caches", "pages")]
    if any(row.get("protocol") == "sealed prompt" for row in report["caches"].values()):
        s = report["settings"]
        prompt = s.get("sealed_prompt", s["length"] // 2)
        parts += [
            (
                f"Caches that compress a prompt as a whole, scored on the {s['length'] - prompt:,} tokens after one of "
                f"{prompt:,}{_source_perplexity(report, 'sealed prompt')}, and page caches beside them that read it in "
                "the same way. Numbers are asked for after all of the prose was compressed as one prompt:"
            ),
            _table(report, "caches", "sealed prompt"),
        ]
    parts += [_auto(report), _differences(report)]
    if report["bundles"]:
        parts += ["Weights and cache, by recipes:", _table(report, "bundles", None)]
    failures = [
        f"- {name}: {row['failure']}"
        for table in ("caches", "bundles")
        for name, row in report[table].items()
        if "failure" in row
    ]
    if failures:
        parts.append("\n".join(["Not measured:", "", *failures]))
    return "\n\n".join(part for part in parts if part)


def _introduction(report: dict[str, Any]) -> str:
    s = report["settings"]
    perplexities = _source_perplexity(report, "pages")
    found = report["source"].get("found", {})
    recalled = (
        ""
        if not found
        else " Of numbers hidden in prose the source finds "
        + ", ".join(f"{_percent(hits)} at {int(length):,} tokens" for length, hits in found.items())
        + f" ({s['prompts']} prompts each; all prose is read through the cache first, page by page)."
    )
    where = s.get("device", "a CPU")
    calibrated = s["calibrated_on"]
    return (
        f"{s['model']} in {s['dtype']} on {where}; {s['segments']} segments of {s['length']:,} tokens of each text, "
        "read page by page, pages beginning after the sink tokens, and scored from token 160 on; calibrated on "
        f"{calibrated['samples']} x {calibrated['length']} tokens of {calibrated['text']}. KL is to the source in nats "
        f"per token{perplexities}.{recalled} Bits per stored value and the share of tokens in full precision are "
        f"measured at {s['length']:,} tokens, or after the prompt of caches that compress it as a whole: all that the "
        "cache holds in bf16, over all keys and values of the sequence, and as a mean over the last 128 lengths, for "
        f"how full the last page is differs.{_options(report)}"
    )


def _source_perplexity(report: dict[str, Any], protocol: str) -> str:
    first = next((row for row in _measured(report).values() if row["protocol"] == protocol), None)
    if first is None:
        return ""
    texts = " and ".join(f"{row['source_perplexity']:.2f} ({name})" for name, row in first["texts"].items())
    return f"; the source's perplexity is {texts}" if protocol == "pages" else f" (source perplexity {texts})"


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
    s = report["settings"]
    rows = {
        name: row
        for name, row in report[table].items()
        if "texts" in row and (protocol is None or row["protocol"] == protocol)
    }
    if not rows:
        return ""
    tokens = sorted({row["size"]["tokens"] for row in rows.values()})
    heads = ["", f"bits per value at {' and '.join(f'{n:,}' for n in tokens)}"]
    # After a whole prompt no page is being filled.
    heads += ["exact"] if protocol == "sealed prompt" else ["mean", "exact"]
    heads += [f"{name} {what}" for name in s["texts"] for what in ("KL", "perplexity")]
    heads += [f"found at {length:,}" for length in s["recall"]]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, row in sorted(rows.items(), key=lambda item: item[1]["size"]["bits_per_value"]):
        size = row["size"]
        cells = [_label(name, report), f"{size['bits_per_value']:.2f}"]
        cells += [] if protocol == "sealed prompt" else [f"{size['mean_bits_per_value']:.2f}"]
        cells += [f"{size['full_precision_tokens'] / size['tokens']:.1%}"]
        for text in s["texts"]:
            cells += [_kl(row["texts"][text]["kl"]), f"{row['texts'][text]['perplexity']:.2f}"]
        cells += [_percent(row.get("found", {}).get(str(length))) for length in s["recall"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _auto(report: dict[str, Any]) -> str:
    """Paired differences in KL of `auto` from every other cache, at most at its bytes, and what they say."""
    caches, texts = _measured(report), report["settings"]["texts"]
    lines, better, worse = [], 0, 0
    for name, beside in _same_size(caches):
        found = [difference(caches[name]["texts"][t], caches[beside]["texts"][t]) for t in texts]
        better += sum(interval.high is not None and interval.high < 0 for interval in found)
        worse += sum(interval.low is not None and interval.low > 0 for interval in found)
        bits = [f"{_mean_bits(caches[each]):.3f}" for each in (beside, name)]
        lines.append("| " + " | ".join([beside.removesuffix(SEALED), *bits, *map(_interval, found)]) + " |")
    if not lines:
        return ""
    count = len(lines) * len(texts)
    heads = ["cache", "its bits per value", "`auto`'s", *(f"{text} KL" for text in texts)]
    return "\n".join(
        [
            (
                "The largest `auto` of at most a cache's bits less that cache, with 95 % bootstrap intervals over "
                f"segments; negative: `auto` is better. Of {count} differences {better} are significantly better and "
                f"{worse} significantly worse:"
            ),
            "",
            "| " + " | ".join(heads) + " |",
            "|" + "---|" * len(heads),
            *lines,
        ]
    )


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
        lines.append("| " + " | ".join(cells) + " |")
    if not lines:
        return ""
    heads = ["cache", "less", *(f"{text} KL" for text in report["settings"]["texts"])]
    return "\n".join(
        [
            "Paired differences in KL with 95 % bootstrap intervals over segments; negative is better:",
            "",
            "| " + " | ".join(heads) + " |",
            "|" + "---|" * len(heads),
            *lines,
        ]
    )


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
    return "" if hits is None else f"{100 * sum(hits) / len(hits):.0f} %"
