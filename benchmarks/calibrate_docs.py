"""The tables of docs/weights.md beside llm-compressor, from the report of `benchmarks/calibrate.py`."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import torch

from kvconvert.fidelity.bootstrap import bootstrap_mean

BEGIN, END = "<!-- llm-compressor: written by benchmarks/calibrate.py -->", "<!-- end of llm-compressor -->"
_NAMES = {"awq": "AWQ", "gptq": "GPTQ", "awq+gptq": "AWQ + GPTQ", "rtn": "rounding"}


def write_page(report: dict[str, Any], page: Path | None) -> str:
    """The tables; put between the markers of `page`."""
    text = "\n\n".join(_section(label, found) for label, found in report.items())
    if page is not None:
        head, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        if not begin:
            raise SystemExit(f"{page} has no line {BEGIN}")
        page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return text


def _section(label: str, found: dict[str, Any]) -> str:
    s, cases = found["settings"], found["cases"]
    peer = next((case["rounds"][0]["versions"] for name, case in cases.items() if name.startswith("llm")), {})
    rounds = len(next(iter(cases.values()))["rounds"])
    quality = all("quality" in case for case in cases.values())
    lines = [
        f"**{label}**: {s['samples']} x {s['length']} tokens of {s['calibration']}, {s['bits']} bits in groups of "
        f"{s['group_size']}; llm-compressor {peer.get('llmcompressor', '')} with batches of {s['peer_batch']} and "
        f"dtype `{s['peer_dtype']}`"
        + (f"; medians of {rounds} rounds" if rounds > 1 else "")
        + (f"; KL on {s['segments']} segments of {s['scored_per_segment']:,} tokens of {s['text']}" if quality else "")
        + "."
        + _imports(found.get("import_s", {})),
        "",
        "| | wall time, s | processor time, s | peak memory, GB |" + (" KL | perplexity |" if quality else ""),
        "|---|---|---|---|" + ("---|---|" if quality else ""),
    ]
    if quality:
        lines.append(f"| source | | | | 0 | {found['source_perplexity']:.2f} |")
    for name, case in cases.items():
        program, _, method = name.partition(":")
        wall, processor = (median(r[field] for r in case["rounds"]) for field in ("wall_s", "processor_s"))
        peak = max(r["peak_anonymous_bytes"] for r in case["rounds"]) / 1e9
        row = f"| {program} {_NAMES[method]} | {wall:.1f} | {processor:.1f} | {peak:.2f} |"
        if quality:
            kl = case["quality"]["kl"]
            row += f" {kl['mean']:.4f} ({kl['low']:.4f} to {kl['high']:.4f}) | {case['quality']['perplexity']:.2f} |"
        lines.append(row)
    return "\n".join([*lines, "", _ratios(cases, quality)])


def _imports(seconds: dict[str, float]) -> str:
    """How long each program takes to begin, where that was measured."""
    listed = " and ".join(f"{value:.1f} s for {program}" for program, value in seconds.items())
    return f" Of the wall time imports take {listed}." if listed else ""


def _ratios(cases: dict[str, Any], quality: bool) -> str:
    """Every case of ours beside llm-compressor's, as sentences."""
    sentences = []
    for ours in (name for name in cases if name.startswith("kvconvert")):
        for theirs in (name for name in cases if not name.startswith("kvconvert")):
            pairs = list(zip(cases[theirs]["rounds"], cases[ours]["rounds"], strict=True))
            wall, processor, memory = (
                median(them[field] / us[field] for them, us in pairs)
                for field in ("wall_s", "processor_s", "peak_anonymous_bytes")
            )
            sentence = (
                f"{_NAMES[ours.partition(':')[2]]} beside llm-compressor's {_NAMES[theirs.partition(':')[2]]}: "
                f"{wall:.2f} times as fast, {processor:.2f} times by processor time, {1 / memory:.2f} times the memory"
            )
            if quality:
                delta = torch.tensor(cases[ours]["quality"]["kl_by_segment"])
                delta = bootstrap_mean(delta - torch.tensor(cases[theirs]["quality"]["kl_by_segment"]), 0)
                sentence += f", KL {delta.mean:+.4f} ({delta.low:+.4f} to {delta.high:+.4f})"
            sentences.append(f"- {sentence}.")
    return "\n".join(sentences)
