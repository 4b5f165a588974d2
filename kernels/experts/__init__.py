"""A mixture's experts with quantized weights: every pair of token and expert in a fixed number of launches.

The host never learns which experts were chosen, so that decode steps can be captured as CUDA graphs. Few pairs are
computed each by itself; more are sorted by expert on the device, so that a weight is read once for several of them.
`experts_reference` is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvconvert.kernels import linear
from kvconvert.kernels.elementwise.reference import Gate, gated_reference
from kvconvert.kernels.linear.packed_layout import TILE
from kvconvert.kernels.linear.shared_input import PackedLinear, SharedStorage
from kvconvert.kernels.linear.shared_input import unsupported as unshared

Pointwise = Callable[[Tensor], Tensor]


def experts_reference(
    x: Tensor,
    chosen: Tensor,
    scores: Tensor | None,
    gate_up: Tensor,
    down: Tensor,
    kind: Gate | Pointwise,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The sum over each token's experts of score times output: [tokens, hidden].

    Args:
        x: [tokens, hidden].
        chosen: experts of each token, [tokens, k]; an index outside of 0..experts - 1 stands for none.
        scores: weights of their outputs, [tokens, k]; None for 1.
        gate_up: [experts, 2 intermediate, hidden], all gates first; [experts, intermediate, hidden] without a gate.
        down: [experts, hidden, intermediate].
        kind: how gate and up are joined, or without a gate the function of up.
        gate_up_bias, down_bias: of these outputs, [experts, ...], if any.
    """
    y = torch.zeros(*chosen.shape, down.shape[1], dtype=x.dtype, device=x.device)
    for expert in range(len(down)):
        token, position = (chosen == expert).nonzero(as_tuple=True)
        joined = x[token] @ gate_up[expert].T
        if gate_up_bias is not None:
            joined = joined + gate_up_bias[expert]
        active = gated_reference(*joined.chunk(2, -1), kind) if isinstance(kind, Gate) else kind(joined)
        output = active @ down[expert].T
        if down_bias is not None:
            output = output + down_bias[expert]
        y[token, position] = output if scores is None else output * scores[token, position, None]
    return y.sum(1)


@dataclass(frozen=True)
class ExpertLinears:
    """The Linears of a layer's experts, in two buffers.

    Attributes:
        gate_up: gate and up of the first expert, of the second, and so on; up alone where there is no gate.
        down: in the same order.
        experts: how many there are.
    """

    gate_up: SharedStorage
    down: SharedStorage
    experts: int


def store_experts(experts: Sequence[tuple[PackedLinear, ...]]) -> ExpertLinears | str:
    """Put the Linears of experts (gate, if there is one, up, and down of each, of equal sizes) into two buffers.

    Returns:
        the buffers; or why that cannot be.
    """
    gate_up = [part for expert in experts for part in expert[:-1]]
    down = [expert[-1] for expert in experts]
    for linears in (gate_up, down):
        if reason := unshared(linears):
            return reason
        if linears[-1].out_features % TILE:
            return f"outputs of a Linear are no multiple of {TILE}"
    return ExpertLinears(SharedStorage(gate_up), SharedStorage(down), len(experts))


def unsupported(x: Tensor, stored: ExpertLinears | str, kind: Gate | Pointwise | None) -> str | None:
    """Why the Triton kernels cannot compute these experts for x [tokens, hidden]; None if they can.

    `kind` is None for experts that join gate and up in a way that `Gate` does not describe.
    """
    if isinstance(stored, str):
        return stored
    for storage in (stored.gate_up, stored.down):
        first = storage.linears[0]
        reason = linear.unsupported(x.device, x.dtype, first.group_size)
        if reason is None and first.scales.device != x.device:
            reason = f"weights are on {first.scales.device}, tokens on {x.device}"
        if reason is not None:
            return reason
    if kind is None:
        return "there is no kernel for the experts' activation"
    if x.requires_grad and torch.is_grad_enabled():
        return "the kernels of experts record no gradients"
    return None


def routed_experts(x: Tensor, chosen: Tensor, scores: Tensor, stored: ExpertLinears, kind: Gate | Pointwise) -> Tensor:
    """The sum over each token's experts of score times output; only for what `unsupported` accepts.

    Args:
        x: [tokens, hidden], fp16 or bf16.
        chosen: experts of each token, integers [tokens, k], each at most once; an index beyond the last one stands for
            none.
        scores: weights of their outputs, [tokens, k], any float dtype.
        stored: the experts.
        kind: how gate and up are joined, or without a gate the function of up.

    Returns:
        [tokens, hidden] in the dtype of `x`.
    """
    from kvconvert.kernels.experts import triton as launch

    if not len(x):
        return torch.zeros_like(x)
    tokens, per_token = chosen.shape
    routing = launch.route(chosen.flatten(), stored.experts, tokens, tokens * per_token / stored.experts)
    gate_up, down = stored.gate_up.packed(), stored.down.packed()
    return launch.routed_experts(x, routing, scores.contiguous(), gate_up, down, kind, per_token)


def scored_experts(x: Tensor, stored: ExpertLinears, kind: Gate) -> Tensor:
    """Experts whose input holds every token once per expert, zeros where it is not routed there.

    Args:
        x: [experts * tokens, hidden] in order of experts, fp16 or bf16.
        stored: the experts, without biases.
        kind: how gate and up are joined.

    Returns:
        the same shape and dtype, zeros for rows of zeros.
    """
    from kvconvert.kernels.experts import triton as launch

    if not len(x):
        return torch.zeros_like(x)
    tokens = len(x) // stored.experts
    routed = x.ne(0).any(-1).view(stored.experts, tokens)
    numbers = torch.arange(stored.experts, device=x.device)[:, None]
    chosen = torch.where(routed, numbers, stored.experts).flatten()
    # Such models choose one expert per token.
    routing = launch.route(chosen, stored.experts, tokens, tokens / stored.experts)
    return launch.routed_experts(x, routing, None, stored.gate_up.packed(), stored.down.packed(), kind, 1)
