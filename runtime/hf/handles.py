"""The seam into transformers: what travels through a model between the cache layer, the mask and the attention
function.

A model builds its mask before any layer runs and calls attention with whatever `update()` returned. So the keys handed
to
attention are a `KeyHandle` that leads back to the cache layer, and the mask is a `MaskHandle`: a [B, 1, T, 1] tensor
of query columns that carries the 2-D padding mask and the mask function. Nothing of size queries x keys is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function, sdpa_mask

from kvconvert.errors import CacheError


class Chunk:
    """The columns of one forward pass: which are real, which are queries, who sees whom.

    Attributes:
        query_columns: int64 [T].
        real: bool [B, columns so far], or None when nothing is padding.
        is_causal: whether a query sees exactly the tokens at or before its own column.
    """

    def __init__(self, query_columns: torch.Tensor, padding_mask: torch.Tensor | None, mask_function: Callable | None):
        self.query_columns = query_columns
        self.mask_function = mask_function or causal_mask_function
        self.is_causal = self.mask_function is causal_mask_function
        self.real = None if padding_mask is None or bool(padding_mask.all()) else padding_mask.bool()
        self._length = None if padding_mask is None else padding_mask.shape[1]
        self._checked: torch.Tensor | bool | None = False  # the past that was compared already; layers share one
        self._host: list[list[bool]] | None = None

    def check_past(self, past: torch.Tensor | None, length: int, where: str) -> None:
        """Compare this mask's first `length` columns with those stored.

        Raises:
            CacheError: the mask has another length, or calls a stored column padding or the reverse.
        """
        if self._length is not None and self._length != length + len(self.query_columns):
            raise CacheError(
                f"The attention mask has {self._length} columns and {where} of the cache needs "
                f"{length + len(self.query_columns)}: pass one mask over all tokens seen so far and the new ones."
            )
        if past is self._checked:
            return
        if self.real is None:
            same = past is None or bool(past[:, :length].all())
        else:
            now = self.real[:, :length]
            same = bool(now.all()) if past is None else torch.equal(now, past[:, :length].to(now.device))
        if not same:
            raise CacheError(
                f"The attention mask changed for columns that {where} of the cache has stored already; pass the same "
                "mask for old columns, or start a new cache."
            )
        self._checked = past

    def runs(self, row: int, start: int, count: int) -> list[tuple[int, int]]:
        """The real columns among start..start+count-1 as (first column, how many)."""
        if self.real is None:
            return [(start, count)] if count else []
        if self._host is None:
            self._host = self.real[:, start : start + count].tolist()
        runs: list[tuple[int, int]] = []
        for offset, real in enumerate(self._host[row]):
            if not real:
                continue
            if runs and sum(runs[-1]) == start + offset:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((start + offset, 1))
        return runs

    def visible(self, row: int, query_columns: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """bool [H or 1, T, n]: which of the tokens at `columns` [n] or [H, n] each query may see."""
        device = query_columns.device
        batch, head = torch.tensor(row, device=device), torch.tensor(0, device=device)
        columns = columns.to(device).reshape(-1, 1, columns.shape[-1])
        seen = self.mask_function(batch, head, query_columns[None, :, None], columns)
        return seen.expand(columns.shape[0], len(query_columns), columns.shape[2])


class KeyHandle(torch.Tensor):
    """New keys on their way to attention, with a pointer to the cache layer that parked them.

    Models may look at its shape, or move and cast it. Anything that computes with it means that an attention function
    other than kvconvert's received it, and would silently ignore everything stored before: that is an error.
    """

    layer: Any

    @staticmethod
    def wrap(keys: torch.Tensor, layer: Any) -> KeyHandle:
        """The keys as a handle of `layer`."""
        handle = keys.as_subclass(KeyHandle)
        handle.layer = layer
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
            return KeyHandle.wrap(result, source.layer) if isinstance(source, KeyHandle) else result
        layer = next((a.layer for a in args if isinstance(a, KeyHandle) and "layer" in a.__dict__), None)
        where = f" of layer {layer.index}" if layer is not None else ""
        raise CacheError(
            f"The keys{where} in a kvconvert cache reached {name or func!r} instead of kvconvert's attention; call "
            'model.set_attn_implementation("kvconvert") before using this cache.'
        )


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
    """Query columns [B, 1, T, 1] that carry what a mask would say; attributes survive slicing, moving and casting."""

    arguments: dict[str, Any]
    cached: dict

    @staticmethod
    def wrap(columns: torch.Tensor, arguments: dict[str, Any]) -> MaskHandle:
        """Columns [B, 1, T, 1] as a handle; `arguments` are what transformers asked its mask function for."""
        handle = columns.as_subclass(MaskHandle)
        handle.arguments, handle.cached = arguments, {}
        return handle

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        source = next((a for a in args if isinstance(a, MaskHandle) and "cached" in a.__dict__), None)
        if isinstance(result, MaskHandle) and source is not None and result is not source:
            result.arguments, result.cached = source.arguments, source.cached
        return result

    def columns(self) -> torch.Tensor:
        """Query columns, int64 [T]."""
        return self.as_subclass(torch.Tensor)[0, 0, :, 0]

    def chunk(self, device: torch.device, length: int) -> Chunk:
        """The columns of this forward pass on `device`; one object for all layers that share the mask."""
        key = (str(device), length)
        if key not in self.cached:
            columns = self.columns()
            if len(columns) != length:
                raise CacheError(f"The mask speaks of {len(columns)} queries and attention received {length}.")
            padding_mask = self.arguments["attention_mask"]
            padding_mask = None if padding_mask is None else padding_mask.to(device)
            self.cached[key] = Chunk(columns.to(device), padding_mask, self.arguments["mask_function"])
        return self.cached[key]

    def materialise(self, allow_causal_skip: bool) -> torch.Tensor | None:
        """The boolean mask [B, 1, T, n] that the handle stands for, or None where SDPA's own causality says it all."""
        arguments, columns = self.arguments, self.columns()
        sliced = len(columns) != arguments["q_length"]
        if sliced or not allow_causal_skip:
            arguments = arguments | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        mask = sdpa_mask(**arguments)
        return mask[:, :, columns - arguments["q_offset"]] if sliced else mask
