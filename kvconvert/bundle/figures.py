"""A fidelity report as rows for a person: what `eval` prints, and what cards and report pages show of it.

A report is read as plain JSON values, as a manifest holds it: anyone may have written it, so that a figure which is
missing, or is not what `eval` writes, leaves its row out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvconvert.errors import counted

Row = tuple[str, ...]
HEADER: Row = ("", "source", "bundle", "")
MOST_PROBES, MOST_LENGTHS = 24, 12


def figure(report: Mapping[str, Any], name: str) -> Any:
    """A figure of a fidelity report by its dotted name, or None where it was not measured."""
    value: Any = report
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def number(report: Mapping[str, Any], name: str) -> float | None:
    """A figure by its dotted name; None where it was not measured, or is no finite number."""
    value = figure(report, name)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def text(report: Mapping[str, Any], name: str) -> str:
    """A text by its dotted name, or ""."""
    value = figure(report, name)
    return value if isinstance(value, str) else ""


def missed_limits(limits: Mapping[str, float], report: Mapping[str, Any]) -> list[str]:
    """One clause per limit that a fidelity report misses; a figure not measured, or NaN, misses its limit.

    Args:
        limits: those that are set, by the names of `kvconvert.recipes.recipe.Limits`.
        report: the figures.
    """
    missed = []

    def check(limit: str, words: str, found: float | None, at_most: bool = True) -> None:
        bound = limits.get(limit)
        if bound is None:
            return
        if found is None:
            missed.append(f"{words} could not be measured, {limit} is {bound:g}")
        elif not (found <= bound if at_most else found >= bound):
            missed.append(f"{words} is {found:.4g}, {limit} is {bound:g}")

    before, after = number(report, "perplexity.source"), number(report, "perplexity.bundle")
    check("max_kl", "the mean KL divergence", number(report, "kl.mean"))
    if figure(report, "images.kl") is not None:
        check("max_kl", "the mean KL divergence on text about images", number(report, "images.kl"))
    check("max_perplexity_increase", "the perplexity's increase", after / before - 1 if before and after else None)
    check("min_retrieval", "retrieval", number(report, "retrieval.bundle"), at_most=False)
    return missed


def fidelity_rows(report: Mapping[str, Any]) -> list[Row]:
    """About twenty rows under `HEADER`: what was measured, source beside bundle."""
    rows: list[Row] = []

    def pair(title: str, name: str, form: str, note: str = "") -> None:
        source, bundle = number(report, f"{name}.source"), number(report, f"{name}.bundle")
        if source is not None and bundle is not None:
            rows.append((title, format(source, form), format(bundle, form), note))

    def single(title: str, name: str, form: str, source: str = "", note: str = "") -> None:
        value = number(report, name)
        if value is not None:
            rows.append((title, source, format(value, form), note))

    rise = number(report, "perplexity.increase")
    spread = _interval(report, "perplexity.increase_interval", ".1%")
    pair("perplexity", "perplexity", ",.2f", "" if rise is None else f"{rise:+.1%} {spread}".rstrip())
    single("KL from the source, mean", "kl.mean", ".4g", "0", _interval(report, "kl.mean_interval", ".4g"))
    tails = [number(report, name) for name in ("kl.p99", "kl.p999")]
    if None not in tails:
        rows.append(("KL, 99% and 99.9% of tokens below", "0", ", ".join(f"{tail:.4g}" for tail in tails), ""))
    noise = number(report, "noise.kl")
    if noise is not None and number(report, "kl.mean") is not None:
        rows.append(("KL of rounding alone", f"{noise:.2g}", "", text(report, "noise.what")))
    single("same most likely token", "top1_agreement", ".1%", "", _interval(report, "top1_agreement_interval", ".1%"))
    rows += _retrieval(report)
    generated, texts = number(report, "free_running.generated"), number(report, "free_running.prompts")
    if generated and texts:
        told = f"of {generated:.0f}, {counted(round(texts), 'text')}"
        single("tokens until texts differ", "free_running.agreement_tokens", ".1f", "", told)
    for name, ability in _abilities(report).items():
        rows += _probe(report, f"probes.{name}", ability)
    images = number(report, "images.drawings")
    told = _interval(report, "images.kl_interval", ".4g") or ("" if images is None else counted(round(images), "image"))
    single("KL on text about images", "images.kl", ".4g", "0", told)
    return rows + _sizes(report)


def _retrieval(report: Mapping[str, Any]) -> list[Row]:
    lengths, prompts, form = (
        retrieval_by_length(report),
        number(report, "retrieval.prompts"),
        text(report, "retrieval_form"),
    )
    source, bundle = number(report, "retrieval.source"), number(report, "retrieval.bundle")
    if not prompts or source is None or bundle is None:
        return []
    if not lengths:
        return [("retrieval", f"{source:.0%}", f"{bundle:.0%}", counted(round(prompts), "prompt"))]
    told = f"{counted(round(prompts // len(lengths)), 'prompt')}, {form}"
    shown = lengths[-1:] if form == "chat template" else lengths
    return [(f"retrieval at {n:,} tokens", f"{source:.0%}", f"{bundle:.0%}", told) for n, source, bundle in shown]


def _probe(report: Mapping[str, Any], name: str, ability: str) -> list[Row]:
    source, bundle = number(report, f"{name}.source"), number(report, f"{name}.bundle")
    if source is None:
        return []
    if bundle is None:
        return [(ability, f"{source:.0%}", "", "the source cannot do it")]
    answers, bounds = number(report, f"{name}.answers"), _bounds(report, f"{name}.loss_interval")
    told = [] if bounds is None else [f"loses {100 * bounds[0]:.0f} to {100 * bounds[1]:.0f} points"]
    told += [] if answers is None else [counted(round(answers), "answer")]
    return [(ability, f"{source:.0%}", f"{bundle:.0%}", "; ".join(told))]


def _sizes(report: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    source, bundle = number(report, "kv.source_bytes_per_token"), number(report, "kv.bytes_per_token")
    bits, context, exact = (number(report, f"kv.{name}") for name in ("bits_per_value", "context", "residual_share"))
    if source and bundle:
        rows.append(("KV cache, bytes per token", f"{source:,.0f}", f"{bundle:,.0f}", f"{source / bundle:.1f}x"))
    if bits is not None:
        told = [] if context is None else [f"at {context:,.0f} tokens"]
        told += [] if exact is None else [f"{exact:.0%} of attended tokens exact"]
        plain = "32" if text(report, "kv.dtype") == "float32" else "16"
        rows.append(("KV cache, bits per value", plain, f"{bits:.2f}", ", ".join(told)))
    source, bundle = number(report, "weights.source_bytes"), number(report, "weights.bytes")
    if source and bundle:
        bits = number(report, "weights.bits_per_weight")
        rows.append(("weights, bytes", f"{source:,.0f}", f"{bundle:,.0f}", "" if bits is None else f"{bits:.2f} bits"))
    return rows


def _abilities(report: Mapping[str, Any]) -> dict[str, str]:
    """Abilities that the probes ask for, by name."""
    found = figure(report, "probes")
    names = list(found)[:MOST_PROBES] if isinstance(found, dict) else []
    return {name: ability for name in names if (ability := text(report, f"probes.{name}.ability"))}


def retrieval_by_length(report: Mapping[str, Any]) -> list[tuple[int, float, float]]:
    """Length of the text in tokens, and shares of numbers found by source and bundle."""
    found = figure(report, "retrieval.by_length")
    rows = []
    for length in found if isinstance(found, dict) else ():
        shares = _bounds(report, f"retrieval.by_length.{length}")
        if shares is not None and length.isdecimal() and len(length) < 10 and all(0 <= share <= 1 for share in shares):
            rows.append((int(length), *shares))
    return sorted(rows)[:MOST_LENGTHS]


def how_measured(report: Mapping[str, Any]) -> str:
    """Text, dtype and device in words; "" where the report does not say."""
    scored, source = number(report, "text.scored_tokens"), text(report, "text.samples.source")
    computed = [text(report, name) for name in ("compute_dtype", "device")]
    said = [f"{scored:,.0f} tokens of {source} scored"] if scored and source else []
    if all(computed):
        said.append("computed in {} on {}".format(*computed))
    if bits := number(report, "head_bits"):
        said.append(f"the bundle's embedding and head rounded to {bits:.0f} bits")
    return ", ".join(said)


def _interval(report: Mapping[str, Any], name: str, form: str) -> str:
    bounds = _bounds(report, name)
    return "" if bounds is None else f"({bounds[0]:{form}} to {bounds[1]:{form}})"


def _bounds(report: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    found = figure(report, name)
    numbers = isinstance(found, list) and len(found) == 2 and all(isinstance(x, int | float) for x in found)
    return (float(found[0]), float(found[1])) if numbers else None
