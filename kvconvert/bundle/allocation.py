"""What a search over the layers' cache schemes measured and chose, for people."""

from __future__ import annotations

from kvconvert.bundle.manifest import Allocation, WeightAllocation


def allocation_line(found: Allocation) -> str:
    """The budget and the outcome in one sentence."""
    size = (
        f"{found.bits_per_value:.3f} bits per value at {found.context:,} tokens, {found.bytes_per_token:,.1f} bytes "
        f"per token of {found.budget_bytes_per_token:,.1f} allowed"
    )
    return f"{size}; {_divergence(found, 'for the whole plan', f'{found.plans} plans')}"


def sensitivity_rows(found: Allocation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the table of divergences in 1/1000 nats, chosen ones with a star: a row for each layer."""
    names = [name for name in found.candidates if any(name in layer.kl for layer in found.layers)]
    rows = []
    for layer in found.layers:
        cells = [_cell(layer.kl.get(name), name in (layer.keys, layer.values)) for name in names]
        rows.append((str(layer.index), *cells))
    return ("layer", *names), rows


def weight_allocation_line(found: WeightAllocation) -> str:
    """The budget of the weights and the outcome in one sentence."""
    size = f"{found.bits_per_weight:.3f} bits per weight of {found.budget_bits_per_weight:g} allowed"
    return f"{size}; {_divergence(found, 'with all weights rounded so', f'{found.allocations} allocations')}"


def weight_sensitivity_rows(found: WeightAllocation) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Header and rows of the divergences in 1/1000 nats, the chosen one with a star: a row for each unit."""
    widths = sorted({bits for unit in found.units for bits in unit.kl}, key=int)
    rows = []
    for unit in found.units:
        names = ", ".join(name.rpartition(".")[2] for name in unit.linears[:4]) + (", ..." if unit.linears[4:] else "")
        rows.append((str(unit.layer), names, *(_cell(unit.kl.get(b), b == str(unit.bits)) for b in widths)))
    return ("layer", "Linears", *(f"{bits} bits" for bits in widths)), rows


def _divergence(found: Allocation | WeightAllocation, of: str, tried: str) -> str:
    """What was measured and predicted, on which text."""
    text = found.data
    return (
        f"KL {found.measured_kl:.3g} measured {of}, {found.predicted_kl:.3g} as the sum of its parts ({tried} "
        f"measured, {text.samples} x {text.length} tokens of {text.source}, {found.dtype})"
    )


def _cell(kl: float | None, chosen: bool) -> str:
    shown = "-" if kl is None else "0" if kl == 0 else f"{1000 * kl:.3g}"
    return f"{shown}*" if chosen else shown
