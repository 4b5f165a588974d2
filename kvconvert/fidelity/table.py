"""A fidelity report as a table for a person; `--json` has every figure."""

from __future__ import annotations

from kvconvert.bundle.text import text_table
from kvconvert.fidelity.report import FidelityReport

HEADER = ("", "source", "bundle", "")


def table(report: FidelityReport) -> str:
    """About twenty rows, what the bundle is fit for, then how all was measured."""
    rows = [tuple(row) for part in (_text, _recall, _probes, _images, _sizes) for row in part(report)]
    text = report.text
    said = [f"computed in {report.compute_dtype} on {report.device} against {report.against.id}"]
    if text.scored_tokens:
        said.insert(
            0,
            f"{text.scored_tokens:,} tokens of {text.samples.source} scored: whole segments, "
            f"{text.scored_per_segment:,} of each after {text.prefill:,} read first",
        )
    judged = [] if report.verdict is None else [report.verdict, ""]
    return "\n".join([text_table(HEADER, rows), "", *judged, *said, *report.notes])


def _text(report: FidelityReport) -> list[tuple[str, ...]]:
    rows = []
    if (p := report.perplexity) is not None:
        rows.append(
            (
                "perplexity",
                f"{p.source:.2f}",
                f"{p.bundle:.2f}",
                f"{p.increase:+.1%}{_range(p.increase_interval, '.1%')}",
            )
        )
    if (kl := report.kl) is not None:
        rows.append(("KL from the source, mean", "0", f"{kl.mean:.4g}", _range(kl.mean_interval, ".4g", "")))
        rows.append(("KL, 99% and 99.9% of tokens below", "0", f"{kl.p99:.4g}, {kl.p999:.4g}", ""))
    if report.noise is not None and report.kl is not None:
        rows.append(("KL of rounding alone", f"{report.noise.kl:.2g}", "", report.noise.what))
    if report.top1_agreement is not None:
        interval = _range(report.top1_agreement_interval, ".1%", "")
        rows.append(("same most likely token", "", f"{report.top1_agreement:.1%}", interval))
    return rows


def _recall(report: FidelityReport) -> list[tuple[str, ...]]:
    rows = []
    if (found := report.passkey) is not None and found.prompts:
        lengths = list(found.by_length)
        for length in lengths[-1:] if report.recall_form == "chat template" else lengths:
            shares = [f"{share:.0%}" for share in found.by_length[length]]
            prompts = f"{found.prompts // len(lengths)} prompts, {report.recall_form}"
            rows.append((f"number found in {int(length):,} tokens", *shares, prompts))
    if (free := report.free_running) is not None and free.prompts:
        told = f"of {free.generated}, {free.prompts} texts"
        rows.append(("tokens until texts differ", "", f"{free.agreement_tokens:.1f}", told))
    return rows


def _probes(report: FidelityReport) -> list[tuple[str, ...]]:
    rows = []
    for found in (report.probes or {}).values():
        bundle = "" if found.bundle is None else f"{found.bundle:.0%}"
        told = f"{found.answers} answers" if found.bundle is not None else "the source cannot do it"
        if found.loss_interval is not None:
            told = f"loses {_points(found.loss_interval)} points; {told}"
        rows.append((found.ability, f"{found.source:.0%}", bundle, told))
    return rows


def _points(interval: tuple[float, float]) -> str:
    low, high = (round(100 * bound) for bound in interval)
    return f"{low} to {high}"


def _images(report: FidelityReport) -> list[tuple[str, ...]]:
    images = report.images
    if images is None:
        return []
    interval = _range(images.kl_interval, ".4g", "")
    return [("KL on text about images", "0", f"{images.kl:.4g}", interval or f"{images.drawings} images")]


def _sizes(report: FidelityReport) -> list[tuple[str, ...]]:
    rows = []
    if (kv := report.kv) is not None:
        plain = 8 * kv.source_bytes_per_token
        ratio = kv.source_bytes_per_token / kv.bytes_per_token
        exact = "" if kv.residual_share is None else f"{kv.residual_share:.0%} of attended tokens exact"
        rows.append(("KV cache, bytes per token", f"{plain / 8:,.0f}", f"{kv.bytes_per_token:,.0f}", f"{ratio:.1f}x"))
        told = ", ".join(filter(None, (f"at {kv.context:,} tokens", exact)))
        rows.append(("KV cache, bits per value", f"{_plain_bits(kv.dtype)}", f"{kv.bits_per_value:.2f}", told))
    if (weights := report.weights) is not None:
        rows.append(
            ("weights, bytes", f"{weights.source_bytes:,}", f"{weights.bytes:,}", f"{weights.bits_per_weight:.2f} bits")
        )
    return rows


def _plain_bits(dtype: str) -> int:
    return 32 if dtype == "float32" else 16


def _range(interval: tuple[float, float] | None, form: str, before: str = " ") -> str:
    return "" if interval is None else f"{before}({interval[0]:{form}} to {interval[1]:{form}})"
