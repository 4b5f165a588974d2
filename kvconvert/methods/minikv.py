"""MiniKV (arXiv 2411.18077): each KV head keeps only the tokens of a prompt that received the most attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.errors import RecipeError
from kvconvert.methods.part import PRESET_SINKS, STRICT, LayerShape, Part, option

_SHARE = "it is a share of the prompt, 0 to 1"
_MINIKV = {"key_group_size": 16, "value_group_size": 16, "heavy_ratio": 0.25, "recent_ratio": 0.25}
_PAPER = {"minikv": _MINIKV, "minikv-pyramid": _MINIKV | {"allocation": "pyramid"}}
# Allocations that are formulas; the other one follows from what calibration measures.
FORMULAS = ("uniform", "pyramid")


@dataclass(frozen=True, config=STRICT)
class MiniKV(Part):
    """Heavy hitters and budgets."""

    method = "MiniKV"
    summary = "of a prompt each KV head keeps its heavy hitters and its newest tokens; budgets may differ by layer"
    source = "arXiv 2411.18077"
    presets = {name: fields | {"sink_tokens": PRESET_SINKS} for name, fields in _PAPER.items()}
    # Pages of 128 tokens leave up to 127 of those that are kept in full precision, and the paper's prefill up to 15.
    paper_presets = {f"{name}-plain": fields for name, fields in _PAPER.items()}
    plan_tensors = {
        "lost_attention": "float32 [n]: attention weight lost when a share i / (n - 1) of the prompt is kept",
        "lost_output": "float32 [n]: squared error of the attention output, relative to its square",
    }
    from_calibration = ("allocation", ("calibrated",), None)

    heavy_ratio: float | None = option(
        None, _SHARE, "share of a sequence's unpadded prompt that each KV head keeps as heavy hitters", ge=0, le=1
    )
    recent_ratio: float | None = option(None, _SHARE, "share that it keeps as its newest tokens", ge=0, le=1)
    allocation: Literal["uniform", "pyramid", "calibrated"] = option(
        "uniform", "", "how heavy_ratio, the mean over layers, is spread over them"
    )
    pyramid_depth: float = option(
        7.0, "choose 1 or more", "of a pyramid: layer 0 gets 2x - x/depth, the last layer x/depth", ge=1
    )

    @property
    def evicts(self) -> bool:
        """Whether only some of the prompt's tokens are kept."""
        return self.heavy_ratio is not None

    def in_use(self) -> bool:
        """Whether tokens are evicted by the prompt's own attention."""
        return self.evicts and not self.heads_apart

    def check(self) -> None:
        """Both shares together; an allocation needs one; norms over all heads need tokens that all heads have."""
        self.require(
            (self.heavy_ratio is None) == (self.recent_ratio is None),
            "recent_ratio",
            "heavy_ratio and recent_ratio go together",
        )
        self.require(
            self.evicts or self.allocation == "uniform", "allocation", "it spreads a heavy_ratio, which is not set"
        )
        self.require(
            not (self.evicts and self.token_norm == "joint"),
            "token_norm",
            "after eviction each KV head holds other tokens, so no norm is common to all heads; choose per_head",
        )

    def compresses_prompts(self) -> bool:
        """A prompt loses tokens when it is complete."""
        return self.evicts

    def clauses(self, shape: LayerShape) -> list[str]:
        """Both shares."""
        return [f"of the prompt {self.heavy_ratio:.3g} kept as heavy hitters and {self.recent_ratio:.3g} as its newest"]

    @classmethod
    def check_layers(cls, schemes: Sequence[Any]) -> str | None:
        """A budget that is spread has to be one for all layers that share it."""
        budgets = {
            (s.allocation, s.heavy_ratio, s.recent_ratio, s.pyramid_depth) for s in schemes if s.allocation != "uniform"
        }
        if len(budgets) < 2:
            return None
        return (
            "spreads several budgets over its layers (allocation, heavy_ratio and recent_ratio differ in "
            "[[kv.layers]]); a budget that is spread has to be one for all layers that share it"
        )

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Which tokens are counted and kept."""
        return {
            "eviction": {
                "score": "attention that a token receives from all queries of the prompt, summed over the query heads "
                "of its KV head",
                "kept": "sinks, the newest round(recent_ratio * n) and, of the others, the round(heavy_ratio * n) with "
                "the highest score, ties to the older; n = the sequence's unpadded prompt, halves to even",
            }
        }


def spread_ratios(schemes: Sequence[Any]) -> tuple[Any, ...]:
    """Give each layer its own heavy ratio, where the schemes state the mean over layers and how to spread it.

    A pyramid is a formula; calibrated allocations arrive spread already, as layers of allocation "uniform" with ratios
    of their own. Layers whose heavy and recent shares exceed the prompt pass the excess on to the others.

    Args:
        schemes: the schemes of all layers; None where a layer has none.

    Raises:
        RecipeError: an allocation that needs calibration.
    """
    schemes = list(schemes)
    evicting = [i for i, scheme in enumerate(schemes) if scheme is not None and scheme.evicts]
    for i in evicting:
        if schemes[i].allocation not in FORMULAS:
            raise RecipeError(
                f"[kv] allocation = {schemes[i].allocation!r} spreads the budget by what calibration measured; use it "
                "in a recipe and load the bundle, or choose uniform or pyramid."
            )
    pyramid = [i for i in evicting if schemes[i].allocation == "pyramid"]
    if pyramid:
        first = schemes[pyramid[0]]
        ratios = pyramid_ratios(first.heavy_ratio, len(pyramid), first.pyramid_depth)
        for i, ratio in zip(pyramid, clamp_ratios(ratios, first.recent_ratio), strict=True):
            schemes[i] = replace(schemes[i], heavy_ratio=ratio, allocation="uniform")
    return tuple(schemes)


def pyramid_ratios(ratio: float, num_layers: int, depth: float) -> list[float]:
    """Heavy ratio of each layer: 2x - x/depth in layer 0, x/depth in the last, linear between.

    The mean is x. MiniKV, section 3.1.3, says that lower layers get more; appendix H prints the formula reversed.
    """
    if num_layers == 1:
        return [ratio]
    top, bottom = 2 * ratio - ratio / depth, ratio / depth
    return [top + (bottom - top) * i / (num_layers - 1) for i in range(num_layers)]


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
