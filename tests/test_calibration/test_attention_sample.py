"""What searches evaluate is the attention of the model, whatever it does to scores."""

import pytest
import torch
from sample_layers import STRUCTURE, cache_format
from tiny.models import ARCHITECTURES, random_ids

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, AttentionSampler
from kvconvert.calibration.protocol import LayerWork


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "granite"])
@pytest.mark.parametrize("index", [0, 1])
def test_the_samples_attention_is_the_layers_own(name, index):
    """Windows, soft caps, sink logits, scalings that are not the head size's: output before W_O, from the sample."""
    model = ARCHITECTURES[name].build("eager")
    model.set_attn_implementation(RECORDING_ATTENTION)
    layer, outputs = model.model.layers[index], []
    work = LayerWork("layer", layer, STRUCTURE, 2, 60, torch.float32, cache_format())
    sampler = AttentionSampler(2)
    ids = random_ids(2, 60)
    with torch.no_grad():
        with sampler.observe(work):
            hook = layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: outputs.append(args[0]))
            for row in ids.split(1):  # as the pipeline passes a layer's arguments: those of a batch of one
                model(row, use_cache=False)
            hook.remove()
        sampler.solve(work)
    sample = sampler.sample
    for sequence in range(2):
        scores = sample.scores(sample.grouped_queries(sequence), sample.keys[sequence])
        weights = sample.weights(scores.masked_fill(~sample.visible_in(sequence), float("-inf")))
        heads = (weights @ sample.values[sequence].unsqueeze(1)).flatten(0, 1)
        torch.testing.assert_close(heads.transpose(0, 1).flatten(1), outputs[sequence][0], rtol=1e-3, atol=1e-4)
    assert (sample.softcap is not None) == (name == "gemma2")
    assert (sample.sink_logits is not None) == (name == "gpt_oss")
