"""What discovery finds in models, for the tests that need names of their parts."""

from __future__ import annotations

from torch import nn
from transformers import PretrainedConfig

from kvconvert.convert.discovery import Architecture, discover
from kvconvert.convert.layer_runner import build_without_weights
from kvconvert.models.experts import ExpertRoles, separate_experts

# Architectures whose weights are refused, and why in a few words.
REFUSED_WEIGHTS = {
    "gemma3n_text": "some of its layers have no keys and values of their own",
    "gemma4_text_shared": "some of its layers have no keys and values of their own",
    "gpt2": "has no Linear that reads what it computes",
    "bloom": "takes arguments that fit one sequence alone",
    "mpt": "does not run on token ids alone",
    "falcon": "compute attention in code of their own",
    "falcon_alibi": "compute attention in code of their own",
}


def architecture_of(config: PretrainedConfig) -> Architecture:
    """The structure of the model of a configuration."""
    return discover(build_without_weights(config))


def separated(model: nn.Module, architecture: Architecture) -> nn.Module:
    """The model with its fused experts taken apart, in place."""
    for layer, structure in zip(model.get_submodule(architecture.layers), architecture.structures, strict=True):
        if structure.experts is not None:
            separate_experts(layer, ExpertRoles(structure.experts.gate, structure.experts.up, structure.experts.down))
    return model
