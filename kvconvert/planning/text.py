"""A plan for people."""

from __future__ import annotations

from kvconvert.planning.plan import Plan
from kvconvert.tables import text_table


def plan_text(plan: Plan) -> str:
    """Tables of what converting and serving take, with what each figure rests on."""
    memory, disk, cache = plan.memory, plan.disk, plan.cache
    least, basis = {
        "probe": ("", "measured on one layer"),
        "headers": ("at least ", "the largest layer's weights; a probe measures the rest"),
    }[memory.source]
    rows = [("host memory, calibrate", f"{least}{size(memory.calibrate)}", f"anonymous, {basis}")]
    if memory.device is not None:
        rows.append(("GPU memory, calibrate", f"{least}{size(memory.device)}", basis))
    rows += [
        ("host memory, export", size(memory.export), "anonymous; does not grow with the model"),
        ("disk, working directory", size(disk.work), f"{size(disk.work_peak)} while it runs"),
        ("disk, bundle", size(disk.bundle), f"{disk.bundle:,} bytes of tensors"),
    ]
    if plan.seconds is not None:
        rows.append(("time", duration(plan.seconds), "calibrate and export, from a probe of one layer"))
    if plan.searched:
        passes = f"up to {plan.searched:,} passes of the model over {plan.search_tokens:,} tokens each"
        if plan.search_seconds is None:
            rows.append(("search", "", passes))
        else:
            rows.append(("search", duration(plan.search_seconds), f"of that time; {passes}"))
    lines = [
        f"{plan.model}, recipe {plan.recipe}: {plan.samples} sequences of {plan.length} tokens on {plan.device}",
        "",
        text_table(("converting", "", ""), rows),
        "",
    ]
    bits = "no keys and values" if cache.bits_per_value is None else f"{cache.bits_per_value:.2f} bits per value"
    rows = [
        (
            f"cache at {cache.context:,} tokens",
            f"{cache.bytes_per_token:,.0f} bytes per token",
            f"{bits}, {cache.basis}; {cache.plain_bytes_per_token:,.0f} bytes in 16 bits",
        )
    ]
    if plan.fit is not None:
        fit = plan.fit
        rows += [
            ("allowance", size(fit.allowance), "CUDA context, activations of a prompt chunk, logits; not measured"),
            (
                "longest context",
                f"{fit.longest_context:,} tokens" if fit.longest_context else "none",
                f"{_sequences(plan.batch)}, limited by {fit.limited_by}"
                if fit.longest_context
                else f"{_sequences(plan.batch)}: weights and allowance leave no room",
            ),
            ("largest batch", f"{fit.largest_batch:,}", f"sequences of {cache.context:,} tokens"),
        ]
    head = "serving" if plan.gpu_memory is None else f"serving in {size(plan.gpu_memory)}"
    return "\n".join([*lines, text_table((head, "", ""), rows)])


def _sequences(count: int) -> str:
    return "one sequence" if count == 1 else f"each of {count} sequences"


def size(count: int) -> str:
    """Bytes in decimal units."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.2f} {unit}" if unit == "GB" else f"{count / factor:.0f} {unit}"
    return f"{count} bytes"


def duration(seconds: float) -> str:
    """A time that is an estimate."""
    if seconds < 120:
        return f"about {max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    return f"about {minutes} min" if minutes < 120 else f"about {minutes / 60:.1f} h"
