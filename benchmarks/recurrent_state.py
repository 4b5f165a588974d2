"""What a hybrid model loses when the states of its linear attention are stored at 8 bits between tokens.

    python benchmarks/recurrent_state.py MODEL TEXT.txt [--json benchmarks/results/recurrent_state.json]

MODEL has layers of linear attention whose state is written at every token (Qwen3.5 and what is like it); for instance
the small one that `examples/reference-lm/train_latent_lm.py --hybrid` trains. Text is read as a prompt of 256 tokens
and then token by token, and a state is rounded whenever it is written, as a cache would store it: codes with a scale
for each key channel, for each value channel, or for a whole head. "feedback" keeps what rounding left in codes of its
own and adds it back before the next token; "stochastic" rounds up or down at random, right on average. KL to the model
with its own cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from latent import add_segment_options, keep, read_segments
from runner import option_parser
from tables import table
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

PROMPT = 256


@dataclass(frozen=True)
class Case:
    """How a state [B, heads, K, V] is stored.

    Attributes:
        bits: of a code; 16 is bf16, and 0 forgets the state, which tells how much the model relies on it.
        axes: along which entries share a scale: 2 (one for each value channel), 3 (for each key channel), or both.
        rounding: "nearest", "stochastic", or "feedback".
        left_bits: of the codes of what rounding left, for feedback.
    """

    bits: int
    axes: tuple[int, ...] = (2,)
    rounding: str = "nearest"
    left_bits: int = 0


CASES = (
    Case(16),
    Case(8, (2, 3)),
    Case(8, (2,)),
    Case(8, (3,)),
    Case(8, (3,), "stochastic"),
    Case(8, (3,), "feedback", 2),
    Case(4, (3,)),
    Case(4, (3,), "stochastic"),
    Case(4, (3,), "feedback", 4),
    Case(2, (3,)),
    Case(0),
)


def rounded(x: Tensor, bits: int, axes: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
    """Symmetric codes with a float32 scale, dequantized."""
    largest = 2 ** (bits - 1) - 1
    scale = x.abs().amax(axes, keepdim=True) / largest
    quotient = x / torch.where(scale > 0, scale, 1.0)
    if generator is not None:
        quotient = (quotient + torch.rand(x.shape, generator=generator)).floor()
    return quotient.round().clamp(-largest - 1, largest) * scale


class StoredState(LinearAttentionLayer):
    """transformers' layer, whose recurrent state is rounded whenever it is written."""

    def __init__(self, case: Case):
        super().__init__()
        self.case, self.generator = case, torch.Generator().manual_seed(0)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: Any) -> Tensor:
        """Store a state [B, heads, K, V]."""
        case, state = self.case, recurrent_states.float()
        if case.bits == 16:
            stored = state.bfloat16().float()
        elif case.bits == 0:
            stored = torch.zeros_like(state)
        elif case.rounding == "stochastic":
            stored = rounded(state, case.bits, case.axes, self.generator)
        else:
            stored = rounded(state, case.bits, case.axes)
        if case.rounding == "feedback":
            stored = stored + rounded(state - stored, case.left_bits, case.axes)
        return super().update_recurrent_state(stored.to(recurrent_states.dtype), state_idx, **kwargs)


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: Tensor, case: Case | None) -> Tensor:
    """Of the tokens after the prompt of ids [B, T], read one by one: [B, T - PROMPT, vocabulary]."""
    cache = DynamicCache(config=model.config)
    if case is not None:
        linear = [type(layer) is LinearAttentionLayer for layer in cache.layers]
        cache.layers = [
            StoredState(case) if is_linear else layer for is_linear, layer in zip(linear, cache.layers, strict=True)
        ]
    model(ids[:, :PROMPT], past_key_values=cache, logits_to_keep=1)
    tokens = [model(token, past_key_values=cache).logits for token in ids[:, PROMPT:].split(1, 1)]
    return torch.cat(tokens, 1).double().log_softmax(-1)


def measure(model: PreTrainedModel, ids: Tensor) -> dict[str, Any]:
    """KL of each segment, by case and in the last quarter of the tokens."""
    source = log_probabilities(model, ids, None)
    loss = -source[:, :-1].gather(2, ids[:, PROMPT + 1 :, None]).mean()
    found = []
    for case in CASES:
        kl = kl_div(log_probabilities(model, ids, case), source, log_target=True, reduction="none").sum(-1)
        last = kl[:, -(kl.shape[1] // 4) :].mean(1)
        found.append(asdict(case) | {"kl": kl.mean(1).tolist(), "kl_last": last.tolist()})
        print(f"{case}: {kl.mean():.1e}, last quarter {last.mean():.1e}", flush=True)
    return {"perplexity": loss.exp().item(), "cases": found}


def report(found: dict[str, Any]) -> str:
    """KL of each way of storing states."""
    names = {(2,): "value channel", (3,): "key channel", (2, 3): "head"}
    rows = []
    for case in found["cases"]:
        bits = str(case["bits"]) + (f" + {case['left_bits']}" if case["left_bits"] else "")
        means = [f"{sum(case[key]) / len(case[key]):.1e}" for key in ("kl", "kl_last")]
        scale = names[tuple(case["axes"])] if 0 < case["bits"] < 16 else ""
        rows.append((bits, scale, case["rounding"], *means))
    head = ("bits", "scale per", "rounding", "KL", "last quarter")
    return table(head, rows)


def main() -> None:
    """Measure and print."""
    parser = option_parser(__doc__)
    add_segment_options(parser, segments=16, length=768)
    args = parser.parse_args()
    model, ids = read_segments(args)
    found = measure(model, ids)
    keep(args, found)
    print(report(found))


if __name__ == "__main__":
    main()
