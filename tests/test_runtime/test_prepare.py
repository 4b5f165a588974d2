"""Decoding steps that are prepared beforehand ask the model for nothing that it does not have."""

from tiny.models import tiny_model

from kvconvert.methods import KVScheme
from kvconvert.runtime.hf.captured import ShortBatch, prepare_steps
from kvconvert.runtime.hf.generation import adopt


def test_prepared_steps_stay_within_the_models_positions(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=2, max_position_embeddings=40)
    adopt(model, [KVScheme()] * 2, {})
    positions = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: positions.append(kwargs["position_ids"].max().item()), with_kwargs=True
    )
    # What is recorded on a GPU is run here.
    monkeypatch.setattr(type(model.captured), "serves", lambda self, arguments: "position_ids" not in arguments)
    monkeypatch.setattr(ShortBatch, "work", lambda *_: None)  # else the last length takes what the first one took
    prepare_steps(model, [30], 40)
    assert positions == [29, 30, 39]
