"""Keys of a short text in the source model, as attention computes on them."""

from __future__ import annotations

import hashlib
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from kvconvert.bundle.manifest import Manifest
from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, attention_observed
from kvconvert.calibration.oscar import KeyStatistics
from kvconvert.data.text import load_token_samples
from kvconvert.errors import UsageError
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models.configuration import context_length
from kvconvert.models.processors import load_tokenizer
from kvconvert.models.source import float_dtype, open_source

TOKENS = 512


@dataclass(frozen=True)
class KeySample:
    """Keys of one text, after q/k norms and RoPE, before any rotation.

    Attributes:
        keys: by layer, [KV heads, T, head_dim].
        channel_range: by layer, OScaR's statistic float32 [3, KV heads], see `kvconvert.calibration.oscar`.
        model: the id of the model that computed them.
        is_recorded_source: whether its configuration is the one that the manifest names.
        text: that was read.
    """

    keys: dict[int, Tensor]
    channel_range: dict[int, Tensor]
    model: str
    is_recorded_source: bool
    text: str

    def norms(self) -> tuple[tuple[int, ...], Tensor]:
        """Layers, and the L2 norm of each token's key, the mean over KV heads: float32 [layers, T]."""
        return tuple(self.keys), torch.stack([keys.float().norm(dim=-1).mean(0) for keys in self.keys.values()])

    def most_uneven(self) -> tuple[int, int]:
        """Layer and KV head whose channels' ranges are largest, relative to the keys' size."""
        return max(
            ((layer, head) for layer, ranges in self.channel_range.items() for head in range(ranges.shape[1])),
            key=lambda at: float(self.channel_range[at[0]][0, at[1]]),
        )


@torch.no_grad()
def sample_keys(model: str, manifest: Manifest, tokens: int = TOKENS) -> KeySample:
    """Run the embedded evaluation text through a model on the CPU, in the dtype in which its weights are stored.

    Args:
        model: directory or Hub id of the bundle's source; it is read whole.
        manifest: of the bundle, whose layers the model's have to be.
        tokens: of the text; fewer where the model has fewer positions.

    Raises:
        UsageError: the model has other layers than the bundle.
        KvconvertError: the model cannot be read.
    """
    source = open_source(model)
    config = source.config.get_text_config(decoder=True)
    tokens = min(tokens, context_length(config) or tokens)
    depth = config.num_hidden_layers
    if depth != len(manifest.layers):
        raise UsageError(
            f"`model` has {depth} layers and the bundle {len(manifest.layers)}; give the model that it was made of."
        )
    text = load_token_samples(None, load_tokenizer(source.directory), 1, tokens, 0, "evaluation")
    loaded = source.load(float_dtype(source), attn_implementation=RECORDING_ATTENTION).eval()
    keys: dict[int, Tensor] = {}
    statistics: dict[int, KeyStatistics] = {}

    def observer(layer: LayerIndex):
        def observe(query: Tensor, key: Tensor, value: Tensor) -> None:
            plan = manifest.layers[layer].scheme()
            norm = "per_head" if plan is not None and plan.token_norm == "per_head" else "joint"
            statistics[layer] = KeyStatistics(PAGE_SIZE, norm)
            statistics[layer].update(key)
            keys[layer] = key[0].clone()

        return observe

    with ExitStack() as stack:
        for module in loaded.modules():
            index = getattr(module, "layer_idx", None)
            if isinstance(index, int) and 0 <= index < depth:
                stack.enter_context(attention_observed(module, observer(index)))
        loaded(text.ids, use_cache=False)
    if not keys:
        raise UsageError("`model` has no attention whose keys can be read; leave it out.")
    for layer in manifest.layers:
        own = keys.get(layer.index)
        if own is not None and layer.kv is not None and own.shape[::2] != (layer.num_key_value_heads, layer.head_dim):
            raise UsageError("`model` has other key heads than the bundle; give the model that it was made of.")
    digest = hashlib.sha256(source.file("config.json").read_bytes()).hexdigest()
    ranges = {layer: found.result()["key_channel_range"] for layer, found in sorted(statistics.items())}
    same = digest == manifest.source.config_sha256
    return KeySample(dict(sorted(keys.items())), ranges, source.id, same, text.info.source)


LayerIndex = int
