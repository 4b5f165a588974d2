"""Structures say which Linears add to the residual stream: compared by running every family's layers."""

from itertools import chain

import pytest
import torch
from tiny.models import ARCHITECTURES, architectures
from tiny.structures import REFUSED_WEIGHTS, architecture_of

TEXTS = [name for name, tiny in ARCHITECTURES.items() if not tiny.multimodal and name not in REFUSED_WEIGHTS]


def module_inputs_and_outputs(layer, names):
    """What the layer's modules get and give, as hooks fill it in."""
    found = {}

    def record(name):
        def hook(module, args, output):
            found[name] = args[0], output[0] if isinstance(output, tuple) else output

        return hook

    for name in names:
        (layer.get_submodule(name) if name else layer).register_forward_hook(record(name))
    return found


@pytest.mark.quick("gemma4_text_same_kv", "gpt_oss", "llama4_text", "deepseek_v2", "gpt_neox")
@pytest.mark.parametrize("name", architectures(TEXTS))
def test_writers_add_what_they_compute_to_the_stream(name):
    model = ARCHITECTURES[name].build()
    architecture = architecture_of(model.config)
    layers, structures = model.get_submodule(architecture.layers), architecture.structures
    recorded = [
        module_inputs_and_outputs(layer, {"", *structure.writers, *chain(*structure.writers.values())})
        for layer, structure in zip(layers, structures, strict=True)
    ]
    with torch.no_grad():
        model(torch.arange(3, 20)[None], use_cache=False)
    for structure, seen in zip(structures, recorded, strict=True):
        for writer, (before, after) in structure.writers.items():
            stream = seen[after][0] if after else seen[""][1]
            torch.testing.assert_close(seen[before][0] + seen[writer][1], stream, rtol=1e-4, atol=1e-5)


def test_the_families_measured_have_writers():
    for name in ("llama", "qwen2", "qwen3", "mistral"):
        config = ARCHITECTURES[name].config()
        assert list(architecture_of(config).structures[0].writers) == ["self_attn.o_proj", "mlp.down_proj"]
