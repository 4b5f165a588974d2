"""What a bundle's model may launch, found by its own dispatch: all kinds of passes, recorded and not launched.

What kernels would compute is missing, so that all numbers are meaningless; what is stored where, and which kernel is
chosen for it, does not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kvconvert.kernels.linear import QuantizedLinear, gpu_row_counts, packed_product
from kvconvert.kernels.linear.packed_layout import PackedWeight
from kvconvert.kernels.rotate import many_rows
from kvconvert.models import CACHE
from kvconvert.runtime.hf.cache import KVCache
from kvconvert.runtime.hf.captured import prepare_steps
from kvconvert.runtime.hf.fused_modules import packed_linears
from kvconvert.runtime.hf.prompts import max_positions, seal_prompt, takes

# Tokens of passes: alone, and after stored ones, such that kernels for few and for many queries are chosen. Of the last
# ones pages become complete.
FIRST = (1, 2, 3, 700)
LATER = (1, 2, 3, 5, 9, 17, 33, 65, 129, 257, 512)
# Of packed ones, without stored tokens and after them.
PACKED = (300, 2, 3, 5, 9, 16, 17, 257)


@torch.no_grad()
def rehearse(model: Any) -> None:
    """Run what `generate` may run of a bundle's model, within `record_specializations`."""
    with shortened(model):
        rehearse_products(model)
        for new_cache in _kinds_of_caches(model):
            # As long prompts are read, and what cannot be packed.
            with model.prompts.layer_by_layer():
                for first in FIRST:
                    read_chunks(model, (first, *LATER), new_cache())
                read_chunks(model, (_many_tokens(model),), new_cache())
                _read_padded(model, new_cache())
            read_chunks(model, PACKED, new_cache())
        if takes(model, "position_ids"):
            for tokens in ([1], [1, 260]):
                prepare_steps(model, tokens, longest=max(tokens))


def _kinds_of_caches(model: Any) -> list[Callable[[], KVCache]]:
    """What makes a cache of each kind that a model reads prompts into."""
    kinds = [model.new_kv_cache]
    if model.new_kv_cache().predicts:
        kinds.append(lambda: model.new_kv_cache().reader())
    return kinds


def _many_tokens(model: Any) -> int:
    """Tokens whose queries are so many rows that kernels of rotation for many are chosen, as far as positions go."""
    tokens = -(-many_rows() // model.config.get_text_config(decoder=True).num_attention_heads)
    return min(tokens, max_positions(model) - 1)


def read_chunks(model: Any, lengths: Sequence[int], cache: KVCache) -> None:
    """Read a prompt in chunks of these lengths, as far as the model's positions go, and generate a token."""
    begin, most = 0, max_positions(model)
    options: dict[str, Any] = {"logits_to_keep": 1} if takes(model, "logits_to_keep") else {}
    cache.begin_prompt()
    for length in lengths:
        if begin + length >= most:
            break
        ids = torch.zeros(1, length, dtype=torch.int64, device=model.device)
        if takes(model, "position_ids"):
            options["position_ids"] = torch.arange(begin, begin + length, device=model.device)[None]
        model(input_ids=ids, **{CACHE: cache}, **options)
        begin += length
    seal_prompt(model, cache, torch.zeros(1, begin, dtype=torch.int64))
    one = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    if "position_ids" in options:
        options["position_ids"] = one + begin
    model(input_ids=one, **{CACHE: cache}, **options)


def _read_padded(model: Any, cache: KVCache) -> None:
    """Read a batch with padding."""
    mask = torch.ones(2, min(300, max_positions(model)), dtype=torch.int64, device=model.device)
    mask[0, :7] = 0
    model(input_ids=torch.zeros_like(mask), attention_mask=mask, **{CACHE: cache})


@contextmanager
def shortened(model: Any) -> Iterator[None]:
    """Within the context a model has only as many of its first layers as contain one of every kind: the others launch
    nothing else. Models whose layers share keys and values keep all.
    """
    config = model.config.get_text_config(decoder=True)
    count, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    stacks = [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and len(module.layers) == count
    ]
    derived = types is not None and "layer_types" not in vars(config)
    # Embeddings of every layer, and layers that read another one's keys and values.
    whole = getattr(config, "hidden_size_per_layer_input", 0) or getattr(config, "num_kv_shared_layers", 0)
    if len(stacks) != 1 or derived or whole:
        yield
        return
    ((stack,), schemes) = stacks, getattr(model, "kv_schemes", None)
    layers = stack.layers
    kinds = [
        (kind, None if scheme is None else _without_floats(scheme.to_dict()), _shapes(layer))
        for kind, scheme, layer in zip(types or [None] * count, schemes or [None] * count, layers, strict=True)
    ]
    kept = 1 + max(kinds.index(kind) for kind in kinds)
    try:
        stack.layers, config.num_hidden_layers = layers[:kept], kept
        if types:
            config.layer_types = types[:kept]
        if schemes:
            model.kv_schemes = schemes[:kept]
        yield
    finally:
        stack.layers, config.num_hidden_layers = layers, count
        if types:
            config.layer_types = types
        if schemes:
            model.kv_schemes = schemes


def _shapes(layer: nn.Module) -> list[tuple[Any, ...]]:
    """What tells a layer's modules from another one's."""
    found = []
    for name, part in layer.named_modules():
        sizes: tuple[Any, ...] = tuple(parameter.shape for parameter in part.parameters(recurse=False))
        if isinstance(part, QuantizedLinear):
            sizes = part.in_features, part.out_features, part.bits, part.group_size, part.bias is None
        found.append((name, type(part), sizes))
    return found


def _without_floats(value: Any) -> Any:
    """A scheme's fields but for numbers that kernels take as arguments, such as clip ratios."""
    if isinstance(value, dict):
        return {name: _without_floats(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_floats(entry) for entry in value]
    return isinstance(value, float) or value


@torch.no_grad()
def rehearse_products(model: Any) -> None:
    """Run every product of each shape of packed weights, by number of rows, within `record_specializations`."""
    shapes: dict[Any, tuple[PackedWeight, torch.Tensor | None]] = {}
    for module in packed_linears(model):
        if module.unsupported(model.device, model.dtype) is not None:
            continue
        found = [(module._packed(), module.bias)]
        if module.shared_input is not None:
            found.append(module.shared_input.storage.packed())
        for weight, bias in found:
            shapes[weight.inputs, weight.outputs, weight.bits, weight.group_size, bias is None] = weight, bias
    for weight, bias in shapes.values():
        for rows in gpu_row_counts(weight):
            packed_product(torch.empty(rows, weight.inputs, dtype=model.dtype, device=model.device), weight, bias)
