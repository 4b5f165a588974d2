"""The tables of docs/weights.md, from the report of `benchmarks/weights.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kvconvert.fidelity.bootstrap import bootstrap_mean

SAME = ("bits", "group_size", "samples", "length", "texts")  # in cases whose methods are compared
BEGIN, END = "<!-- written by benchmarks/weights.py -->", "<!-- end -->"


def write_page(report: dict[str, Any], page: Path | None) -> str:
    """The tables; put between the markers of `page`, which is made if it is missing."""
    text = markdown(report)
    if page is not None:
        old = page.read_text(encoding="utf-8") if page.is_file() else f"# Quantized weights\n\n{BEGIN}\n{END}\n"
        head, _, rest = old.partition(BEGIN)
        page.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return text


def markdown(report: dict[str, Any]) -> str:
    """What was measured and how; per model its cases and their differences from AWQ at the same width and groups."""
    parts = ["KL is to the source in nats per token, with 95 % bootstrap intervals over segments; all in float32."]
    for name, model in report["models"].items():
        parts += [f"## {name}", _introduction(model["settings"]), _table(model), _differences(model)]
    return "\n\n".join(part for part in parts if part)


def _introduction(s: dict[str, Any]) -> str:
    device = "CPU" if s["device"] == "cpu" else "GPU"
    return (
        f"{s['segments']} segments of {s['scored_per_segment']:,} scored tokens of {s['text']}, calibrated on "
        f"{s['calibrated_on']}, on a {device}."
    )


def _table(model: dict[str, Any]) -> str:
    lines = [
        "| method | bits | group size | samples | KL | perplexity | same first token | seconds of calibration |",
        "|---|---|---|---|---|---|---|---|",
        f"| source | | | | 0 | {model['source_perplexity']:.2f} | 100% | |",
    ]
    for row in _sorted(model):
        case, kl = row["case"], row["kl"]
        data = f"{case['samples']} x {case['length']}{_texts(case)}"
        lines.append(
            f"| {_method(case)} | {case['bits']} | {case['group_size']} | {data} | {kl['mean']:.4f}{_interval(kl)} "
            f"| {row['perplexity']:.2f} | {row['top1_agreement']:.1%} | {row['seconds']:,} |"
        )
    return "\n".join(lines)


def _differences(model: dict[str, Any]) -> str:
    """Paired differences in KL: AWQ + GPTQ against each alone, and everything against AWQ."""
    rows = _sorted(model)
    lines = []
    for better in rows:
        for worse in rows:
            same = all((better["case"].get(f) or []) == (worse["case"].get(f) or []) for f in SAME)
            pair = (better["case"]["method"], worse["case"]["method"])
            if same and pair in (("awq+gptq", "awq"), ("awq+gptq", "gptq"), ("gptq", "awq"), ("awq", "rtn")):
                delta = torch.tensor(better["kl_by_segment"]) - torch.tensor(worse["kl_by_segment"])
                found = bootstrap_mean(delta, 0)
                interval = _interval({"low": found.low, "high": found.high})
                lines.append(
                    f"| {better['case']['bits']} | {better['case']['group_size']} | {_method(better['case'])} "
                    f"| {_method(worse['case'])} | {found.mean:+.4f}{interval} |"
                )
    if not lines:
        return ""
    head = ["Paired differences in KL; negative is better:", "", "| bits | group size | method | less | KL |"]
    return "\n".join([*head, "|---|---|---|---|---|", *lines])


def _sorted(model: dict[str, Any]) -> list[dict[str, Any]]:
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        case = row["case"]
        return -case["bits"], -case["group_size"], len(case.get("texts", ())), case["samples"], -row["kl"]["mean"]

    return sorted(model["cases"].values(), key=key)


def _method(case: dict[str, Any]) -> str:
    return {"rtn": "rounding", "awq": "AWQ", "gptq": "GPTQ", "awq+gptq": "AWQ + GPTQ"}[case["method"]]


def _texts(case: dict[str, Any]) -> str:
    return f" of {' and '.join(case['texts'])}" if case.get("texts") else ""


def _interval(values: dict[str, Any]) -> str:
    return "" if values["low"] is None else f" ({values['low']:.4f} to {values['high']:.4f})"
