"""Layer by layer, from the inputs that were captured, a model computes what it computes as a whole.

The quantized model's data runs through each part of a layer once, and gives what the whole layer gives.
"""

from __future__ import annotations

import pytest
import torch
from tiny.checkpoints import save_text
from tiny.llama import write_tiny_llama
from tiny.models import ARCHITECTURES, architectures
from tiny.structures import REFUSED_WEIGHTS
from torch import nn
from transformers import AutoTokenizer

from kvconvert.convert.input_capture import CalibrationInputs, HiddenStates, InputCapture, rows_as_looked_up
from kvconvert.convert.layer_runner import LayerRunner, RunnerInputs
from kvconvert.data.samples import load_mixture
from kvconvert.errors import NumericError, UnsupportedModelError
from kvconvert.io import tensorfile
from kvconvert.io.tensorfile import Mapped
from kvconvert.models.source import open_source

LENGTH = 24
NAMES = [name for name, tiny in ARCHITECTURES.items() if not tiny.multimodal and name not in REFUSED_WEIGHTS]


def through_layers(runner: LayerRunner, inputs: CalibrationInputs, directory) -> torch.Tensor:
    """Hidden states after the last layer, [samples, length, hidden]."""
    runner.begin(inputs)
    hidden = torch.cat(list(runner.first_input()))
    for index in range(runner.num_layers):
        store = HiddenStates(directory / f"{index}.f32", tuple(hidden.shape))
        with store.writing() as writer:
            writer.append(hidden)
            writer.commit()
        layer, _ = runner.layer(index)
        with torch.no_grad():
            hidden = torch.cat([output for *_, output in runner.forward(layer, store, index)])
    return hidden


@pytest.mark.quick("gemma2", "llama4_text", "deepseek_v2", "qwen3_next")
@pytest.mark.parametrize("name", architectures(NAMES))
def test_layers_one_by_one_compute_what_the_model_computes(name, tmp_path):
    tiny = ARCHITECTURES[name]
    source = open_source(str(tiny.write(tmp_path / "model")))
    model = tiny.build()
    ids = tiny.inputs(2, LENGTH)["input_ids"]
    runner = LayerRunner(source, torch.device("cpu"))
    expected = []
    layers = model.get_submodule(runner.architecture.layers)
    hook = layers[-1].register_forward_hook(lambda module, args, output: expected.append(output))
    with torch.no_grad():
        model(ids, use_cache=False)
    hook.remove()
    output = expected[0][0] if isinstance(expected[0], tuple) else expected[0]
    found = through_layers(runner, CalibrationInputs(ids), tmp_path)
    # Both in float32, with other kernels for attention: a few roundings per layer.
    torch.testing.assert_close(found, output, rtol=0, atol=1e-4 * float(output.abs().max()))


class Base(nn.Module):
    """Two layers; the model adds features of an image to the input of the second, and tells layers the sample."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids, features=None, use_cache=None):
        hidden = input_ids[..., None].float() * torch.ones(4)
        hidden = self.layers[0](hidden, shift=input_ids.sum())
        if features is not None:
            hidden = hidden + features
        return self.layers[1](hidden, torch.ones(1))


class Layer(nn.Module):
    def forward(self, hidden, shift, **kwargs):
        return hidden + shift


@pytest.mark.parametrize("in_files", [False, True])
def test_what_differs_between_samples_is_kept_for_each_and_what_the_model_adds_is_added(
    tmp_path, monkeypatch, in_files
):
    monkeypatch.setattr(tensorfile, "_SMALLEST", 1)
    place = Mapped(tmp_path) if in_files else None
    features = torch.zeros(1, 3, 4)
    features[0, 1] = 2.5
    ids = torch.tensor([[1, 2, 3], [4, 5, 6], [1, 2, 3]])
    inputs = CalibrationInputs(ids, ({}, {"features": features}, {}), mapped=place)
    base = Base()
    expected = [base(**inputs.sample(index)) for index in range(3)]
    capture = InputCapture(inputs, "layers")
    recorded = Base()
    first = torch.cat(list(capture.run(recorded, recorded.layers, torch.device("cpu"))))
    assert (capture.shared(0), capture.shared(1)) == (False, True)
    for index in range(3):
        hidden = base.layers[0](first[index : index + 1], **capture.arguments(0, index))
        hidden = base.layers[1](capture.add(1, index, hidden), **capture.arguments(1, index))
        assert torch.equal(hidden, expected[index])
    batch = torch.zeros(3, 3, 4)
    assert torch.equal(capture.add(1, 0, batch)[1:2], features)
    assert not batch.any()


def test_a_model_whose_input_is_not_finite_or_that_passes_over_layers_is_refused():
    inputs = CalibrationInputs(torch.ones(1, 3, dtype=torch.int64), ({"features": torch.full((1, 3, 4), torch.nan)},))
    base = Base()
    with pytest.raises(NumericError, match=r"input of layers\.1"):
        list(InputCapture(inputs, "layers").run(base, base.layers, torch.device("cpu")))
    base = Base()
    layers = nn.ModuleList([*base.layers, Layer()])
    with pytest.raises(UnsupportedModelError, match="2 of 3 layers"):
        list(InputCapture(CalibrationInputs(torch.ones(1, 3)), "layers").run(base, layers, torch.device("cpu")))


def test_an_embedding_has_only_the_rows_that_a_call_looks_up():
    table = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.device("meta"):
        embedding = nn.Embedding(1000, 8)
    ids = torch.tensor([[7, 999, 7], [0, 7, 500]])
    with rows_as_looked_up(embedding, table, torch.device("cpu")):
        assert (embedding.weight.device.type, embedding.weight.dtype) == ("cpu", torch.float32)
        assert torch.equal(embedding(ids), table[ids].float())
        assert embedding.weight.shape == (4, 8)
        assert torch.equal(embedding(ids[:1]), table[ids[:1]].float())
    assert not embedding._forward_pre_hooks


@pytest.mark.quick("gemma3_text")
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_a_pad_token_beyond_the_tokens_of_a_batch_is_no_row_that_has_to_be_there(family, tmp_path):
    vocabulary = 128256
    source = open_source(str(ARCHITECTURES[family].write(tmp_path, vocab_size=vocabulary, pad_token_id=vocabulary - 1)))
    runner = LayerRunner(source, torch.device("cpu"))
    ids = torch.tensor([[5, 120000, vocabulary - 1, 5]])
    runner.begin(CalibrationInputs(ids))
    hidden = torch.cat(list(runner.first_input()))
    table = source.read(["model.embed_tokens.weight"])["model.embed_tokens.weight"].float()
    scale = table.shape[1] ** 0.5 if family == "gemma3_text" else 1
    torch.testing.assert_close(hidden, table[ids] * scale)


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
