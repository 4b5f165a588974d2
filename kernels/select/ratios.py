"""How many heavy hitters each layer keeps (MiniKV, section 4.1)."""

from __future__ import annotations


def pyramid_ratios(ratio: float, num_layers: int, depth: float) -> list[float]:
    """Heavy ratio of each layer: 2x - x/depth in layer 0, x/depth in the last, linear between (MiniKV, section 4.1).

    The mean is x. Appendix H of the paper prints the formula reversed.
    """
    if num_layers == 1:
        return [ratio]
    top, bottom = 2 * ratio - ratio / depth, ratio / depth
    return [top + (bottom - top) * i / (num_layers - 1) for i in range(num_layers)]


def proportional_ratios(ratio: float, weights: list[float]) -> list[float]:
    """Heavy ratios with mean `ratio`, in proportion to non-negative `weights`; uniform when these are all zero."""
    total = sum(weights)
    return [ratio * len(weights) * w / total for w in weights] if total > 0 else [ratio] * len(weights)


def clamp_ratios(ratios: list[float], recent_ratio: float) -> list[float]:
    """Limit heavy + recent to 1 in each layer and give the excess to the others in proportion to what they have.

    The mean stays what it was unless every layer is full.
    """
    limit = max(0.0, 1.0 - recent_ratio)
    ratios = list(ratios)
    excess = 0.0
    for _ in range(len(ratios)):
        full = [r >= limit for r in ratios]
        excess = sum(r - limit for r in ratios if r > limit)
        ratios = [min(r, limit) for r in ratios]
        room = sum(r for r, f in zip(ratios, full, strict=True) if not f)
        if excess <= 1e-12 or all(full):
            break
        if room > 0:
            ratios = [r if f else r + excess * r / room for r, f in zip(ratios, full, strict=True)]
        else:
            empty = full.count(False)
            ratios = [r if f else excess / empty for r, f in zip(ratios, full, strict=True)]
    return ratios
