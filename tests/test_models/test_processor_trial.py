"""A processor that makes gigabytes or minutes of a small picture is refused before anything uses it."""

import json
import os
import signal

import pytest
from PIL import Image
from tiny.processors import write_vision_model
from transformers import AutoConfig

from kvconvert.errors import CheckpointError, UsageError
from kvconvert.models import processors
from kvconvert.models.processors import ImagePrompts, load_processor


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return {name: write_vision_model(tmp_path_factory.mktemp(name), name) for name in ("qwen2_vl", "llava", "internvl")}


@pytest.mark.parametrize(
    ("name", "file", "key", "value"),
    [
        ("qwen2_vl", "preprocessor_config.json", "patch_size", 20_000),
        ("qwen2_vl", "preprocessor_config.json", "temporal_patch_size", 2**20),
        ("qwen2_vl", "preprocessor_config.json", "size", {"shortest_edge": 10**9, "longest_edge": 10**9}),
        ("llava", "preprocessor_config.json", "size", {"height": 10**5, "width": 10**5}),
        ("llava", "preprocessor_config.json", "crop_size", {"height": 10**5, "width": 10**5}),
        ("internvl", "processor_config.json", "image_seq_length", 10**9),
    ],
)
def test_settings_that_make_much_of_a_picture_are_refused(models, name, file, key, value):
    path = models[name] / file
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {key: value}))
    try:
        with pytest.raises(CheckpointError, match=r"is not applied to any picture .*takes more than"):
            load_processor(models[name])
    finally:
        path.write_text(before)


def test_processors_as_they_are_pass_and_errors_of_their_own_are_left_to_their_use(models):
    for directory in models.values():
        load_processor(directory)
    path = models["llava"] / "preprocessor_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"image_mean": [0.5] * 4}))
    load_processor(models["llava"])
    path.write_text(before)


def test_numbers_of_a_picture_that_are_none_are_refused(models):
    path = models["llava"] / "preprocessor_config.json"
    before = path.read_text()
    path.write_text(json.dumps(json.loads(before) | {"image_std": [0.5, 0.0, 0.5]}))
    prompts = ImagePrompts(load_processor(models["llava"]), AutoConfig.from_pretrained(models["llava"]))
    path.write_text(before)
    with pytest.raises(UsageError, match="NaN or infinity of the 1 images"):
        prompts.encode(prompts.image, [Image.new("RGB", (64, 48))])


def test_what_takes_too_long_or_ends_the_process_is_told_apart(monkeypatch):
    monkeypatch.setattr(processors, "SECONDS", 0.2)

    def endless(picture):
        while True:
            pass

    assert "seconds for a picture" in processors.why_refused([endless])
    assert "ends the process" in processors.why_refused([lambda picture: os.kill(os.getpid(), signal.SIGKILL)])
    assert processors.why_refused([lambda picture: 1 / 0]) is None
