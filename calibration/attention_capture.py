"""An attention function that shows calibration passes what a model's attention computes on.

It is registered with transformers as `RECORDING_ATTENTION`. A model built with that implementation computes as with
SDPA, and the observers of a layer's attention module get its queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

RECORDING_ATTENTION = "kvconvert_record"
_OBSERVERS = "kvconvert_attention_observers"
_ARGUMENTS = "kvconvert_attention_arguments"

AttentionObserver = Callable[[Tensor, Tensor, Tensor], None]


@contextmanager
def attention_observed(attention: nn.Module, observer: AttentionObserver) -> Iterator[None]:
    """Call `observer(query, key, value)` with what the attention computes on: after q/k norms and RoPE.

    Shapes [B, heads, T, head_dim], with the number of KV heads for key and value. The model has to run with
    `attn_implementation=RECORDING_ATTENTION`. Several observers get the same tensors, in the order of their contexts.
    """
    previous: tuple[AttentionObserver, ...] = getattr(attention, _OBSERVERS, ())
    setattr(attention, _OBSERVERS, (*previous, observer))
    try:
        yield
    finally:
        setattr(attention, _OBSERVERS, previous)


@contextmanager
def attention_arguments(attention: nn.Module) -> Iterator[dict[str, Any]]:
    """A dict of the arguments, other than tokens' tensors, that the model passes to attention: those of these it has.

    `scaling` of the dot products, `softcap` of the scores, `s_aux`: sink logits [heads].
    """
    found: dict[str, Any] = {}
    setattr(attention, _ARGUMENTS, found)
    try:
        yield found
    finally:
        delattr(attention, _ARGUMENTS)


def _recording_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    for observer in getattr(module, _OBSERVERS, ()):
        observer(query, key, value)
    wanted = getattr(module, _ARGUMENTS, None)
    if wanted is not None:
        wanted |= {name: kwargs[name] for name in ("scaling", "softcap", "s_aux") if kwargs.get(name) is not None}
    return model_attention(module, query, key, value, attention_mask, **kwargs), None


def model_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Attention as the model means it, with the arguments that the model passes: [B, T, heads, head_dim]."""
    if kwargs.get("softcap") is None and kwargs.get("s_aux") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    return _capped_attention(query, key, value, attention_mask, **kwargs)


def _capped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Attention with a soft cap on its scores and a sink logit per query head, which torch's function lacks."""
    heads, kv_heads = query.shape[1], key.shape[1]
    key, value = (side.repeat_interleave(heads // kv_heads, dim=1) for side in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(
            scores.shape[3] - scores.shape[2]
        )
    if attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, float("-inf"))
    else:
        scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.to(scores).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(RECORDING_ATTENTION, _recording_attention)
AttentionMaskInterface.register(RECORDING_ATTENTION, sdpa_mask)
