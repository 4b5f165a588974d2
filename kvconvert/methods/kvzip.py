"""KVzip (arXiv 2505.23416): of a prompt those keys and values are kept from which the model can reconstruct it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic.dataclasses import dataclass

from kvconvert.methods.part import STRICT, LayerShape, Part, option


@dataclass(frozen=True, config=STRICT)
class KVzip(Part):
    """The choice of a prompt's tokens that are kept."""

    method = "KVzip"
    summary = (
        "the prompt is read twice, and kept is what the second reading attends to most; KV heads keep different numbers"
    )
    source = "arXiv 2505.23416"

    selection: Literal["attention", "reconstruction"] = option(
        "attention", "", "what heavy_ratio is a share of: tokens by the attention of the prompt, or of its repetition"
    )

    @property
    def reconstructs(self) -> bool:
        """Whether tokens are kept by the attention that a repetition of the prompt pays them."""
        return self.selection == "reconstruction"

    def in_use(self) -> bool:
        """Whether prompts are read twice."""
        return self.reconstructs

    def check(self) -> None:
        """It selects what an eviction keeps, and heads that hold different numbers of tokens share no tensors."""
        if not self.reconstructs:
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
        return [f"of the prompt {self.heavy_ratio + self.recent_ratio:.3g} kept, by reconstruction, over all KV heads"]

    @classmethod
    def check_layers(cls, schemes: Sequence[Any]) -> str | None:
        """All layers share the budget."""
        budgets = {(s.reconstructs, s.heavy_ratio, s.recent_ratio) for s in schemes}
        if not any(reconstructs for reconstructs, *_ in budgets) or len(budgets) == 1:
            return None
        return (
            'selects by reconstruction in some layers and otherwise in others; selection = "reconstruction" shares one '
            "heavy_ratio and one recent_ratio among all layers"
        )

    @classmethod
    def conventions(cls, layers: Sequence[tuple[Any, LayerShape]]) -> dict[str, Any]:
        """Which tokens are counted and kept."""
        return {
            "eviction": {
                "score": "largest attention weight that a token receives, in its KV head, from any query of its part "
                "of 512 tokens when the prompt is read again right after itself; these attend to sinks, their part, "
                "and its repetition up to themselves",
                "kept": "sinks, the newest round(recent_ratio * n) and, of the others of all layers and KV heads, "
                "those with the highest scores, in whole pages of 128 tokens of a head: "
                "floor((heavy_ratio + recent_ratio) * n * KV heads / 128) pages per layer on average",
            }
        }
