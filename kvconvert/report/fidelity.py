"""A fidelity report, as `kvconvert eval --json` prints it, as rows of a table; what is no number is left out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from kvconvert.bundle.files import read_object
from kvconvert.bundle.manifest import Manifest, figure
from kvconvert.errors import BundleError, UsageError

Row = tuple[str, ...]
HEADER: Row = ("", "source", "bundle", "")


def read_fidelity(path: Path, manifest: Manifest) -> dict[str, Any]:
    """A file that `kvconvert eval --json` wrote of exactly this bundle.

    Raises:
        UsageError: it cannot be read, or is of another bundle.
    """
    try:
        report = read_object(path)
    except OSError as error:
        raise UsageError(f"`fidelity` {path} cannot be read ({error.strerror}); check its path.") from error
    except BundleError as error:
        raise UsageError(f"`fidelity` {path} is no JSON report of kvconvert eval; measure the bundle again.") from error
    if report.get("files_digest") != manifest.files_digest():
        raise UsageError(f"`fidelity` {path} was not measured on this bundle; measure this one with kvconvert eval.")
    return report


def number(report: dict[str, Any], name: str) -> float | None:
    """A figure by its dotted name; None where it was not measured, or is no finite number."""
    value = figure(report, name)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if plain and math.isfinite(value) else None


def fidelity_rows(report: dict[str, Any]) -> list[Row]:
    """What was measured, source beside bundle."""
    rows: list[Row] = []

    def pair(title: str, name: str, form: str, note: str = "") -> None:
        source, bundle = number(report, f"{name}.source"), number(report, f"{name}.bundle")
        if source is not None and bundle is not None:
            rows.append((title, format(source, form), format(bundle, form), note))

    def single(title: str, name: str, form: str, source: str = "", note: str = "") -> None:
        value = number(report, name)
        if value is not None:
            rows.append((title, source, format(value, form), note))

    increase = number(report, "perplexity.increase")
    pair("perplexity", "perplexity", ".2f", "" if increase is None else f"{increase:+.1%}")
    single("KL divergence, mean", "kl.mean", ".4g", "0", _interval(report, "kl.mean_interval", ".4g"))
    single("KL divergence, 99th percentile", "kl.p99", ".4g", "0")
    single("KL divergence, 99.9th percentile", "kl.p999", ".4g", "0")
    single("KL of rounding alone", "noise.kl", ".2g")
    single("same most likely token", "top1_agreement", ".1%", "", _interval(report, "top1_agreement_interval", ".1%"))
    pair("numbers found in the context", "passkey", ".0%")
    for name, title in probes(report).items():
        pair(title, f"probes.{name}", ".0%", _points(report, f"probes.{name}.loss_interval"))
    single("tokens until continuations differ", "free_running.agreement_tokens", ".1f")
    single("KL divergence, text about images", "images.kl", ".4g", "0")
    source, bundle = number(report, "kv.source_bytes_per_token"), number(report, "kv.bytes_per_token")
    if source and bundle:
        tokens = number(report, "kv.context")
        note = f"{source / bundle:.1f}x smaller" + ("" if tokens is None else f" at {tokens:,.0f} tokens")
        rows.append(("cache, bytes per token", f"{source:,.0f}", f"{bundle:,.0f}", note))
    single("cache, bits per value", "kv.bits_per_value", ".2f")
    source, bundle = number(report, "weights.source_bytes"), number(report, "weights.bytes")
    if source and bundle:
        rows.append(("weights, bytes", f"{source:,.0f}", f"{bundle:,.0f}", f"{source / bundle:.1f}x smaller"))
    return rows


def fit_for(report: dict[str, Any]) -> str:
    """The sentence that says what a bundle is fit for; empty where nothing was judged."""
    found = figure(report, "verdict")
    return found if isinstance(found, str) else ""


def probes(report: dict[str, Any]) -> dict[str, str]:
    """What each probe asks for, by its name."""
    found = figure(report, "probes")
    titles = {name: figure(report, f"probes.{name}.ability") for name in found} if isinstance(found, dict) else {}
    return {name: title for name, title in list(titles.items())[:24] if isinstance(title, str)}


def recall_by_length(report: dict[str, Any]) -> list[tuple[int, float, float]]:
    """Length of the text in tokens, and shares of numbers found by source and bundle."""
    found = figure(report, "passkey.by_length")
    rows = []
    for length, shares in found.items() if isinstance(found, dict) else ():
        plain = isinstance(shares, list) and len(shares) == 2 and all(isinstance(x, int | float) for x in shares)
        if plain and length.isdecimal() and len(length) < 10 and all(0 <= x <= 1 for x in shares):
            rows.append((int(length), float(shares[0]), float(shares[1])))
    return sorted(rows)[:12]


def how_measured(report: dict[str, Any]) -> str:
    """Text, dtype and device in a sentence."""
    scored, source = number(report, "text.scored_tokens"), figure(report, "text.samples.source")
    computed = [figure(report, name) for name in ("compute_dtype", "device")]
    said = []
    if scored and isinstance(source, str):
        said.append(f"{scored:,.0f} tokens of {source} scored")
    if all(isinstance(part, str) for part in computed):
        said.append(f"computed in {computed[0]} on {computed[1]}")
    return ", ".join(said)


def _points(report: dict[str, Any], name: str) -> str:
    bounds = _bounds(report, name)
    return "" if bounds is None else f"loses {100 * bounds[0]:.0f} to {100 * bounds[1]:.0f} points"


def _interval(report: dict[str, Any], name: str, form: str) -> str:
    bounds = _bounds(report, name)
    return "" if bounds is None else f"{bounds[0]:{form}} to {bounds[1]:{form}}"


def _bounds(report: dict[str, Any], name: str) -> list[float] | None:
    bounds = figure(report, name)
    numbers = isinstance(bounds, list) and len(bounds) == 2 and all(isinstance(x, int | float) for x in bounds)
    return bounds if numbers else None
