"""What stored tokens depend on besides the tokens, as a hash: of prefixes that are shared, and of sessions in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PretrainedConfig

from kvconvert.methods import KVScheme

# Of what pages hold and where they begin; part of every fingerprint.
LAYOUT = 1
# Of a config: where it came from, and by what it is read.
_UNRELATED = {"_name_or_path", "transformers_version", "dtype", "architectures", "quantization_config"}


def fingerprint_of(
    config: PretrainedConfig, schemes: Sequence[KVScheme | None], plan: Mapping[str, torch.Tensor], seal: str
) -> str:
    """A hash of model, schemes and KV plan.

    Args:
        config: of the model.
        schemes: of all layers.
        plan: see `KVCache`.
        seal: of the manifest of the model's bundle; with "" the model is known by its config alone.
    """
    known = _related(config.to_dict())
    described = [scheme and scheme.to_dict() for scheme in schemes]
    found = hashlib.sha256(json.dumps([LAYOUT, seal, known, described], sort_keys=True, default=str).encode())
    for name in sorted(plan):
        tensor = plan[name].detach().cpu().contiguous()
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _related(value: Any) -> Any:
    """Plain values without what says nothing of the numbers, in nested configs, too."""
    if isinstance(value, dict):
        return {str(name): _related(part) for name, part in value.items() if name not in _UNRELATED}
    return [_related(part) for part in value] if isinstance(value, (list, tuple)) else value
