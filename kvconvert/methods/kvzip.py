"""KVzip (arXiv 2505.23416): of a prompt those keys and values are kept from which the model can reconstruct it.

Which they are is found by reading the prompt a second time, or predicted by a small network for each layer that
calibration fits to what second readings found, as KVzap does (arXiv 2601.07891).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, PlanTensor, option

SCORER_CHANNELS = 256  # of the hidden layer of the network that predicts scores
SCORE_QUANTILES = 129  # of each KV head


@dataclass(frozen=True, config=STRICT)
class KVzip(Part):
    """The choice of a prompt's tokens that are kept."""

    method = "KVzip"
    summary = (
        "kept is what a repetition of the prompt attends to most, read or predicted; KV heads keep different numbers"
    )
    source = "arXiv 2505.23416, 2601.07891"
    plan_tensors = {
        "scorer_hidden_weight": "network that predicts scores: first layer",
        "scorer_hidden_bias": "its bias",
        "scorer_weight": "second layer",
        "scorer_bias": "its bias",
        "scorer_quantiles": "logarithms of its scores on calibration text, evenly spaced, highest first",
    }

    from_calibration = ("selection", ("predicted",), None)

    selection: Literal["attention", "reconstruction", "predicted"] = option(
        "attention",
        "",
        "what heavy_ratio is a share of: tokens by attention of the prompt, of its repetition, or that predicted",
    )

    @property
    def reconstructs(self) -> bool:
        """Whether tokens are kept by the attention that a repetition of the prompt pays them."""
        return self.selection == "reconstruction"

    @property
    def predicts(self) -> bool:
        """Whether the attention that a repetition would pay is predicted from keys and values."""
        return self.selection == "predicted"

    @property
    def heads_apart(self) -> bool:
        """Whether KV heads share one budget, so that they hold different numbers of tokens."""
        return self.selection != "attention"

    def in_use(self) -> bool:
        """Whether a repetition of the prompt decides."""
        return self.heads_apart

    def check(self) -> None:
        """It selects what an eviction keeps, and heads that hold different numbers of tokens share no tensors."""
        if not self.heads_apart:
            return
        for ok, rule in (
            (self.evicts, "it selects what a heavy_ratio and a recent_ratio keep, and these are not set"),
            (self.allocation == "uniform", "it shares one budget among all heads of all layers; leave allocation out"),
            (not self.feeds_errors_back, 'heads are stored apart, without matrices; choose key_rounding = "nearest"'),
            (not self.is_static, 'heads are stored apart, without tables; choose static_scales = "none"'),
            (
                not self.boost_fraction or self.boost_select == "dynamic",
                'heads are stored apart, without tables; choose boost_select = "dynamic"',
            ),
            (
                not (self.key_recent_tokens or self.value_recent_tokens),
                "it keeps whole pages and a recent_ratio; leave key_recent_tokens and value_recent_tokens at 0",
            ),
        ):
            self.require(ok, "selection", rule)

    def clauses(self, shape: LayerShape) -> list[str]:
        """Kept shares."""
        how = "predicted reconstruction" if self.predicts else "reconstruction"
        return [f"of the prompt {self.heavy_ratio + self.recent_ratio:.3g} kept, by {how}, over all KV heads"]

    def required_tensors(self, shape: LayerShape) -> dict[str, PlanTensor]:
        """The network of a layer that predicts."""
        if not self.predicts:
            return {}
        shapes = scorer_shapes(*shape.sizes)
        return {name: PlanTensor("F32", sizes, 'selection = "predicted"') for name, sizes in shapes.items()}

    @classmethod
    def check_layers(cls, schemes: Sequence[Any]) -> str | None:
        """All layers share the budget."""
        budgets = {(s.selection, s.heavy_ratio, s.recent_ratio, s.sink_tokens) for s in schemes}
        shared = next((selection for selection, *_ in budgets if selection != "attention"), None)
        if shared is None or len(budgets) == 1:
            return None
        return (
            f'selects by selection = "{shared}" in some layers and otherwise in others, or keeps other shares or '
            "sinks; it shares one heavy_ratio, recent_ratio, and number of sink_tokens among all layers"
        )

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Which tokens are counted and kept."""
        read = (
            "largest attention weight that a token receives, in its KV head, from any query of its part "
            "of 512 tokens when the prompt is read again right after itself; these attend to sinks, their part, "
            "and its repetition up to themselves"
        )
        predicted = (
            "exp(scorer_weight gelu(scorer_hidden_weight x + scorer_hidden_bias) + scorer_bias), one for each KV head, "
            "of the KV plan's tensors; x are the token's values of all KV heads as they are stored, rotated where "
            "values are, then for each KV head and i < head_dim / 2 the norms of (key_i, key_{i + head_dim / 2}) after "
            "RoPE, not rotated"
        )
        kept = (
            "sinks, the newest round(recent_ratio * n) and, of the others of all layers and KV heads, those with the "
            "highest scores, in whole pages of 128 tokens of a head: "
            "floor((heavy_ratio + recent_ratio) * n * KV heads / 128) pages per layer on average"
        )
        shared = "; how many pages a head has follows from scores distributed as its scorer_quantiles"
        predicts = any(scheme.predicts for scheme, _ in layers)
        return {"eviction": {"score": predicted if predicts else read, "kept": kept + shared * predicts}}


def scorer_shapes(heads: int, key_dim: int, value_dim: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the network that predicts scores of a layer's tokens, by the names of its tensors in the KV plan."""
    features = heads * (value_dim + key_dim // 2)
    return {
        "scorer_hidden_weight": (SCORER_CHANNELS, features),
        "scorer_hidden_bias": (SCORER_CHANNELS,),
        "scorer_weight": (heads, SCORER_CHANNELS),
        "scorer_bias": (heads,),
        "scorer_quantiles": (heads, SCORE_QUANTILES),
    }
