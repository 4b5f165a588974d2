"""What vLLM's planner makes of models' layers: reads cases as JSON and writes for each its groups of layers and blocks.

Run as a program by `test_planning.py`, with a Python that has vLLM; no engine is started.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

MARKER = "PLANNED "
MEMORY = 30 << 30


def planned(case: dict[str, Any]) -> dict[str, Any]:
    """One model: `layers`, each with its type, schemes' fields, heads and head_dim; `layout` of the cache."""
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core import kv_cache_utils as planner
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec, create_kv_cache_views

    from kvconvert.methods import KVScheme
    from kvconvert.vllm.backend import LowBitBackend
    from kvconvert.vllm.bundle import ServedBundle

    names = {"num_key_value_heads": "heads", "head_dim": "head_dim", "value_head_dim": "value_dim"}
    layers = [SimpleNamespace(**{name: one[own] for name, own in names.items()}) for one in case["layers"]]
    schemes = [None if one["scheme"] is None else KVScheme(**one["scheme"]) for one in case["layers"]]
    manifest = SimpleNamespace(schemes=lambda: schemes, layers=layers, modules=[])
    config = {"layer_types": [one["type"] for one in case["layers"]]}
    served = LowBitBackend.served = ServedBundle(SimpleNamespace(manifest=manifest, config=config, plan={}))
    LowBitBackend.drafts = case.get("drafts", 0)

    config = VllmConfig()
    config.cache_config.block_size = 32 if served.has_windows else 128
    config.cache_config.kv_cache_layout = case["layout"]
    config.model_config = SimpleNamespace(max_model_len=8192, original_max_model_len=8192)
    states = {"shapes": ((3, 8192), (32, 128, 128)), "dtypes": (torch.bfloat16, torch.float32)}
    padded = None
    if served.has_states:
        # What vLLM's platforms do with such models.
        sizes = {"num_kv_heads": layers[served.attending[0]].num_key_value_heads, "head_size": layers[0].head_dim}
        probe = LowBitBackend.customize_spec(FullAttentionSpec(block_size=1, dtype=torch.bfloat16, **sizes))
        state = MambaSpec(block_size=-1, **states).page_size_bytes
        config.cache_config.block_size = 128 * -(-state // (128 * probe.page_size_bytes))
        padded = config.cache_config.block_size * probe.page_size_bytes
    specs = {}
    for index, (one, layer) in enumerate(zip(case["layers"], layers, strict=True)):
        sizes = {"num_kv_heads": layer.num_key_value_heads, "head_size": layer.head_dim, "dtype": torch.bfloat16}
        sizes |= {"head_size_v": layer.value_head_dim, "block_size": config.cache_config.block_size}
        name = f"model.layers.{index}.self_attn.attn"
        if one["type"] == "full_attention":
            specs[name] = LowBitBackend.spec(name, FullAttentionSpec(**sizes))
        elif one["type"] == "sliding_attention":
            specs[name] = SlidingWindowSpec(sliding_window=1024, **sizes)
        else:
            specs[name] = MambaSpec(block_size=8192, page_size_padded=padded, **states)
    (found,) = planner.get_kv_cache_configs(config, [specs], [MEMORY])
    known = planner.generate_scheduler_kv_cache_config([found])
    views = {}
    for tensor in found.kv_cache_tensors:
        spec = specs[tensor.layers[0]]
        memory = torch.empty(tensor.size, dtype=torch.int8, device="meta")
        layout = config.cache_config.get_resolved_kv_cache_layout()
        if spec.block_size % 128 == 0 and isinstance(spec, FullAttentionSpec):
            for view, name in zip(
                create_kv_cache_views(memory, spec, found.num_blocks, layout, tensor, 128), tensor.layers, strict=True
            ):
                views[name] = list(view.shape)
    groups = [(group.kv_cache_spec, len(group.layer_names)) for group in known.kv_cache_groups]
    exact, drafted = (
        served.layouts(torch.bfloat16, 1, drafts, LowBitBackend.drafts_by_model).values()
        for drafts in (0, LowBitBackend.drafts)
    )
    row = specs[f"model.layers.{served.attending[0]}.self_attn.attn"].max_num_blocks_per_req
    return {
        "groups": [{"spec": type(spec).__name__, "layers": count, "block": spec.block_size} for spec, count in groups],
        "blocks": found.num_blocks,
        "bytes_per_block": MEMORY // found.num_blocks,
        "pages": sum(layout.key_bytes + layout.value_bytes for layout in exact),
        "first": max(layout.first_page for layout in drafted),
        "row": row(SimpleNamespace(parallel_config=config.parallel_config), 8192),
        "views": views,
    }


if __name__ == "__main__":
    from kvconvert.vllm.plugin import _register_backend

    _register_backend()
    print(MARKER + json.dumps([planned(case) for case in json.load(sys.stdin)]), flush=True)
