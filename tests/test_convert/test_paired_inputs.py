"""The quantized model's data runs through each part of a layer once, and gives what the whole layer gives."""

import pytest
import torch
from tiny.checkpoints import save_text
from tiny.llama import write_tiny_llama
from torch import nn
from transformers import AutoTokenizer

from kvconvert.convert.input_capture import CalibrationInputs
from kvconvert.convert.layer_runner import LayerRunner, RunnerInputs
from kvconvert.data.samples import load_mixture
from kvconvert.models.source import open_source

ATTENTION, MLP = "self_attn.q_proj", "mlp.gate_proj"


class Held:
    """`HiddenStates` in memory."""

    first = 0

    def __init__(self, values):
        self.values, self.shape = values, tuple(values.shape)

    def read(self, start, stop):
        return self.values[start:stop]


class Wrapped(nn.Module):
    """An MLP that adds to what its down projection computes."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + 1


@pytest.mark.parametrize("plain", [True, False], ids=["the MLP gives what is written", "it gives something else"])
def test_parts_before_a_writer_run_once(tmp_path, plain):
    model, text = write_tiny_llama(tmp_path / "model"), save_text(tmp_path)
    ids = load_mixture(str(text), AutoTokenizer.from_pretrained(model), 6, 24, 0).ids
    source = open_source(str(model))
    runner = LayerRunner(source, torch.device("cpu"))
    runner.batch_size = lambda length: 4
    runner.begin(CalibrationInputs(ids))
    states = Held(torch.cat(list(runner.first_input())))
    other = Held(states.values * 1.1)
    layer, _ = runner.layer(0)
    if not plain:
        layer.mlp = Wrapped(layer.mlp)
    structure = runner.structure(0)
    paired = RunnerInputs(runner, 0, structure, other, torch.clone)
    runs = {ATTENTION: 0, MLP: 0}
    for name in runs:

        def count(*_, name=name):
            runs[name] += 1

        layer.get_submodule(name).register_forward_hook(count)
    with torch.no_grad(), paired.recording(layer, (MLP, *(after for _, after in structure.writers.values()))):
        source_outputs = [output for *_, output in runner.forward(layer, states, 0)]
    with torch.no_grad():
        for writer, (before, after) in structure.writers.items():
            batches = list(paired.of(layer, after, (before, writer)))
            assert [len(kept) for kept, _ in batches] == [4, 2]
            if not after:
                assert all(torch.equal(kept, output) for (kept, _), output in zip(batches, source_outputs, strict=True))
            layer.get_submodule(writer).weight.mul_(0.9)
        assert runs == {ATTENTION: 2 + 2, MLP: 2 + 2}
        found = list(paired.outputs(layer))
        assert runs == {ATTENTION: 2 + 2, MLP: 2 + 2 + (0 if plain else 2)}
        expected = [output for *_, output in runner.forward(layer, other, 0)]
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert runs[ATTENTION] == 2 + 2 + 2
