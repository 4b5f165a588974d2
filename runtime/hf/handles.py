"""Handles: tensors that carry through a model what the cache, the mask and the attention function share.

A model builds its mask before any layer runs and calls attention with whatever `update()` returned. So the keys that
`update()` returns are a `KeyHandle` that leads to the layer's store, and the mask is a `MaskHandle`: a [B, 1, T, 1]
tensor of query positions that carries the 2-D padding mask and the mask function. Nothing of size queries x keys is
allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from kvconvert.errors import CacheError
from kvconvert.models.masks import tensor_mask
from kvconvert.runtime.cache.forward_pass import PassTokens
from kvconvert.runtime.cache.store import LayerStore


class KeyHandle(torch.Tensor):
    """New keys on their way to attention, with a pointer to the store that parked them, or the layer of several stores.

    Models may read its shape, or move and cast it. Any computation with it means that an attention function other than
    kvconvert's received it and would silently ignore everything stored before: that is an error.
    """

    store: LayerStore | CacheLayerMixin

    @classmethod
    def wrap(cls, keys: torch.Tensor, store: LayerStore | CacheLayerMixin) -> Self:
        """The keys as a handle of `store`, which has an `index`."""
        handle = keys.as_subclass(cls)
        handle.store = store
        return handle

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in _CASTS:
            source = args[0]
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            return KeyHandle.wrap(result, source.store) if isinstance(source, KeyHandle) else result
        store = next((a.store for a in args if isinstance(a, KeyHandle) and "store" in a.__dict__), None)
        where = f" of layer {store.index}" if store is not None else ""
        if name == "_is_view":  # asked by the tracer alone
            raise CacheError("A kvconvert cache cannot be traced; use the model without torch.compile.")
        raise CacheError(
            f"The keys{where} in a kvconvert cache reached {name or func!r} instead of kvconvert's attention; call "
            'model.set_attn_implementation("kvconvert") before using this cache.'
        )


class ExpandedKeys(KeyHandle):
    """Keys of every head that a model of latent attention has made of new latents; it fills them in slice by slice."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if getattr(func, "__name__", "") == "__getitem__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {})).as_subclass(torch.Tensor)
        return super().__torch_function__(func, types, args, kwargs)


class LatentHandle(torch.Tensor):
    """New latents of an MLA layer on their way through the model's `expand_kv`, with a pointer to the store.

    The model projects them to channels without RoPE and values, which are handles too, and makes room for whole keys
    with `new_empty`: `ExpandedKeys`, which no attention but kvconvert's takes.
    """

    store: LayerStore

    @staticmethod
    def wrap(latents: torch.Tensor, store: LayerStore) -> LatentHandle:
        """The latents [B, 1, T, R] as a handle of `store`."""
        handle = latents.as_subclass(LatentHandle)
        handle.store = store
        return handle

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        store = next((a.store for a in args if isinstance(a, LatentHandle) and "store" in a.__dict__), None)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if store is None:
            return result
        if getattr(func, "__name__", "") == "new_empty":
            return ExpandedKeys.wrap(result, store)
        if isinstance(result, torch.Tensor):
            return LatentHandle.wrap(result, store)
        if isinstance(result, (tuple, list)):
            return type(result)(LatentHandle.wrap(x, store) if isinstance(x, torch.Tensor) else x for x in result)
        return result


# Property getters all carry the name __get__; none of them computes.
_LOOKS = frozenset(
    {
        "__get__",
        "size",
        "dim",
        "stride",
        "numel",
        "is_contiguous",
        "is_floating_point",
        "__repr__",
        "__len__",
        "element_size",
    }
)
_CASTS = frozenset({"to", "type", "contiguous", "detach", "float", "half", "bfloat16", "cpu", "cuda", "type_as"})


class MaskHandle(torch.Tensor):
    """Query positions [B, 1, T, 1] with all that defines the mask; attributes survive slicing, moving and casting."""

    arguments: dict[str, Any]
    cached: dict

    @staticmethod
    def wrap(positions: torch.Tensor, arguments: dict[str, Any]) -> MaskHandle:
        """Positions [B, 1, T, 1] as a handle; `arguments` are those of transformers' mask interface."""
        handle = positions.as_subclass(MaskHandle)
        handle.arguments, handle.cached = arguments, {}
        return handle

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        source = next((a for a in args if isinstance(a, MaskHandle) and "cached" in a.__dict__), None)
        if isinstance(result, MaskHandle) and source is not None and result is not source:
            result.arguments, result.cached = source.arguments, source.cached
        return result

    def positions(self) -> torch.Tensor:
        """Query positions, int64 [T]."""
        return self.as_subclass(torch.Tensor)[0].flatten()

    def chunk(self, device: torch.device, length: int, rows: int = 1) -> PassTokens:
        """The tokens of this forward pass, with positions on `device`; one object for all layers that share the mask.

        Each sequence has `rows` rows.

        Raises:
            CacheError: the mask has another number of queries than `length`.
        """
        key = (str(device), length, rows)
        if key not in self.cached:
            positions = self.positions()
            if len(positions) != length:
                raise CacheError(f"The mask has {len(positions)} queries and attention received {length}.")
            padding_mask, mask_function = self.arguments["attention_mask"], self.arguments["mask_function"]
            padding_mask = None if padding_mask is None else padding_mask.to(device).repeat_interleave(rows, 0)
            causal = mask_function is causal_mask_function
            self.cached[key] = PassTokens(positions.to(device), padding_mask, None if causal else mask_function)
        return self.cached[key]

    def materialise(self, allow_causal_skip: bool) -> torch.Tensor | None:
        """The boolean mask [B, 1, T, n] that the handle stands for, or None where SDPA's own causal mask suffices."""
        arguments, positions = self.arguments, self.positions()
        sliced = len(positions) != arguments["q_length"]
        if sliced or not allow_causal_skip:
            arguments = arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = tensor_mask(**arguments)
        return mask[:, :, positions - arguments["q_offset"]] if sliced else mask
