"""`generate --image`: images of a prompt, of the first turn and of a later one reach the model, or one sentence."""

import json
import re
from dataclasses import replace

import pytest
import torch
from PIL import Image
from tiny.commands import kvconvert
from tiny.models import ARCHITECTURES
from tiny.processors import quick_and_full, write_vision_model

from kvconvert.console import Console
from kvconvert.data.drawings import draw
from kvconvert.errors import NO_IMAGES, UsageError
from kvconvert.fidelity.images import image_figures
from kvconvert.fidelity.scoring import Decoder
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.models.processors import load_processor
from kvconvert.recipes.recipe import Limits
from kvconvert.runtime import KVCache, load

RECIPE = '[weights]\nmethod = "none"\n[kv]\npreset = "kivi"\n'


def converted(folder):
    """The bundle of the model in a folder, made through the command line."""
    (folder / "recipe.toml").write_text(RECIPE)
    options = ["--recipe", folder / "recipe.toml", "--samples", "2", "--seq-len", "64"]
    for arguments in (("calibrate", folder / "model", "-o", folder / "work", *options), ("export", folder / "work")):
        result = kvconvert(*arguments, *(["-o", folder / "bundle"] if arguments[0] == "export" else []))
        assert result.exit_code == 0, result.output
    return folder / "bundle"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bundles of a tiny LLaVA and a tiny Qwen2-VL, and two drawings."""
    folder = tmp_path_factory.mktemp("images")
    for name in ("llava", "qwen2_vl"):
        (folder / name).mkdir()
        write_vision_model(folder / name / "model", name)
        converted(folder / name)
    for index in (1, 2):
        Image.fromarray(draw(3, index).image).save(folder / f"{index}.png")
    return folder


class Seen:
    """A console whose model notes what it is given."""

    def __init__(self, bundle, monkeypatch):
        self.console, self.calls = Console(bundle, 4), []
        # Whole words only: a random model's pieces of words are other tokens when an answer is read again.
        tokenizer, vocabulary = self.console.tokenizer, self.console.model.config.get_text_config().vocab_size
        words = {i for i in range(vocabulary) if re.fullmatch(" [a-z]{3,}", tokenizer.decode([i]))}
        self.console.model.generation_config.suppress_tokens = [i for i in range(vocabulary) if i not in words]
        generate = self.console.model.generate

        def spy(ids, **inputs):
            cached = inputs[CACHE]
            self.calls.append(inputs | {"ids": ids, "cached": 0 if cached is None else cached.get_seq_length()})
            return generate(ids, **inputs)

        monkeypatch.setattr(self.console.model, "generate", spy)

    def text(self, call):
        return self.console.tokenizer.decode(self.calls[call]["ids"][0])


def pixels(bundle, folder, *indices):
    images = [Image.open(folder / f"{index}.png") for index in indices]
    return load_processor(bundle).image_processor(images, return_tensors="pt")["pixel_values"]


def test_a_prompt_goes_through_the_chat_template_with_its_images(folder, monkeypatch):
    bundle = folder / "llava" / "bundle"
    seen = Seen(bundle, monkeypatch)
    seen.console.complete("What is it?", [folder / "1.png", folder / "2.png"])
    assert seen.text(0) == f"[user]{'<image>' * 8}What is it?<|endoftext|>[assistant]"
    assert torch.equal(seen.calls[0]["pixel_values"].float(), pixels(bundle, folder, 1, 2))


def test_the_command_streams_an_answer_about_an_image(folder):
    for name in ("llava", "qwen2_vl"):
        options = ["--prompt", "What is it?", "--image", folder / "1.png", "--max-new-tokens", "5"]
        result = kvconvert("generate", folder / name / "bundle", *options)
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()


def test_images_of_the_first_and_of_a_later_turn_are_read_where_they_were_given(folder, monkeypatch):
    for name in ("llava", "qwen2_vl"):
        bundle = folder / name / "bundle"
        seen = Seen(bundle, monkeypatch)
        lines = ["What is it?\n", "Where?\n", f"/image {folder / '2.png'}\n", "And this?\n", "Thanks\n"]
        seen.console.chat(iter(lines), [folder / "1.png"])
        first, again, later, last = seen.calls
        count = int((first["ids"] == 4096).sum())
        assert count == int((later["ids"] == 4096).sum()) / 2 > 0
        text = seen.text(2)
        assert 0 < text.index("<image>") < text.index("Where?") < text.rindex("<image>") < text.index("And this?")
        assert torch.equal(later["pixel_values"].float(), pixels(bundle, folder, 1, 2))
        # A turn of text goes on in the cache, which holds the image; one that brings an image begins anew.
        assert "pixel_values" not in again
        assert "pixel_values" not in last
        assert again["cached"] == first["ids"].shape[1] + 4 - 1
        assert later["cached"] == 0
        assert last["cached"] == later["ids"].shape[1] + 4 - 1


def test_a_turn_that_goes_on_in_the_cache_answers_as_if_everything_were_read_again(folder, monkeypatch):
    # Short enough that no page is full: the cache is exact.
    for name in ("llava", "qwen2_vl"):
        answers = []
        for anew in (False, True):
            seen = Seen(folder / name / "bundle", monkeypatch)
            if anew:
                monkeypatch.setattr("kvconvert.console._continues", lambda *_: False)
            turns, generate = [], seen.console._generate
            monkeypatch.setattr(seen.console, "_generate", lambda *a, g=generate, t=turns: t.append(g(*a)) or t[-1])
            seen.console.chat(iter(["What is it?\n", "Where?\n"]), [folder / "1.png"])
            assert (seen.calls[1]["cached"] == 0) is anew
            answers.append(turns[1][0].tolist())
            monkeypatch.undo()
        assert answers[0] == answers[1]


def test_without_a_chat_template_the_models_own_sign_stands_for_an_image(folder, monkeypatch):
    seen = Seen(folder / "llava" / "bundle", monkeypatch)
    seen.console.prompts.images.templated = False
    seen.console.complete("What is it?", [folder / "1.png"])
    assert seen.text(0) == f"{'<image>' * 4}What is it?"


def test_a_vision_language_bundle_continues_plain_text_as_well(folder):
    result = kvconvert("generate", folder / "llava" / "bundle", "--prompt", "It was", "--max-new-tokens", "3")
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


def test_missing_files_and_bundles_without_vision_are_one_sentence(folder, tmp_path):
    bundle = folder / "llava" / "bundle"
    result = kvconvert("generate", bundle, "--prompt", "x", "--image", tmp_path / "gone.png")
    assert result.exit_code == 1
    assert result.stderr.strip().endswith(f"--image: there is no image {tmp_path / 'gone.png'}; check the path.")
    (tmp_path / "text.png").write_text("no image")
    result = kvconvert("generate", bundle, "--chat", stdin=f"/image {tmp_path / 'text.png'}\n")
    assert result.exit_code == 1
    assert "not an image that can be read" in result.stderr
    (tmp_path / "plain").mkdir()
    ARCHITECTURES["llama"].write(tmp_path / "plain" / "model")
    plain = converted(tmp_path / "plain")
    with pytest.raises(UsageError, match="holds no processor of images"):
        Console(plain, 4).complete("x", [folder / "1.png"])
    (plain / "model.safetensors").unlink()  # it is not loaded to say so
    result = kvconvert("generate", plain, "x", "--image", folder / "1.png")
    assert (result.exit_code, result.stderr) == (2, f"Error: {NO_IMAGES.replace('`images`', '--image')}\n")


def test_the_bundle_carries_the_processors_files(folder):
    names = {file.name for file in (folder / "llava" / "bundle").iterdir()}
    assert {"preprocessor_config.json", "processor_config.json", "chat_template.jinja"} <= names


@pytest.mark.parametrize("name", quick_and_full(["llava", "qwen2_vl"], "llava"))
def test_what_is_said_about_images_is_measured_through_what_the_cache_made_of_them(folder, name):
    model, processor = load(folder / name / "bundle", dtype=torch.float32, verify="headers")
    source = Decoder.plain(ARCHITECTURES[name].build())
    schemes = {bits: KVScheme.preset(f"calibquant-{bits}bit-paper") for bits in (1, 2)}
    # As the released code has it.
    schemes[1] = replace(schemes[1], key_clip_ratio=0.5, value_clip_ratio=0.3)
    found = {
        bits: image_figures(source, Decoder(model, lambda s=scheme: KVCache(model.config, s)), processor, 0)
        for bits, scheme in schemes.items()
    }
    assert (found[1].drawings, found[1].image_tokens) == (16, 4)
    assert 1e-4 < found[2].kl < found[1].kl
    exact = image_figures(source, Decoder.plain(model), processor, 0)
    assert abs(exact.kl) < 1e-6
    assert exact.top1_agreement == 1


@pytest.mark.full
def test_eval_asks_about_images_and_says_what_the_rest_was_measured_on(folder):
    bundle, model = folder / "llava" / "bundle", folder / "llava" / "model"
    result = kvconvert("eval", bundle, "--against", model, "--tokens", "64", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["images"]["drawings"] == 16
    assert "measured on text without images: perplexity, kl" in " ".join(report["notes"])


def test_the_cards_example_answers_about_an_image(folder, tmp_path, monkeypatch, capsys):
    card = (folder / "llava" / "bundle" / "README.md").read_text()
    assert "pipeline_tag: image-text-to-text" in card
    example = re.search(r"```python\n(.*?)```", card, re.DOTALL)[1]
    Image.open(folder / "1.png").save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    exec(example.replace("user/name", str(folder / "llava" / "bundle")))
    assert "[user]<image><image><image><image>What is it?" in capsys.readouterr().out


def test_a_limit_on_the_divergence_holds_for_text_about_images_too():
    report = {"kl": {"mean": 0.01}, "images": {"kl": 0.5}}
    assert Limits(max_kl=0.1).missed(report) == ["the mean KL divergence on text about images is 0.5, max_kl is 0.1"]
    assert Limits(max_kl=0.1).missed(report | {"images": None}) == []


def test_settings_of_a_processor_that_no_image_fits_are_one_sentence(folder, monkeypatch):
    console = Console(folder / "llava" / "bundle", 2, "cpu")
    processor = console.prompts.images.processor
    monkeypatch.setattr(processor, "num_additional_image_tokens", 7)
    with pytest.raises(UsageError, match="model refuses what its processor made of images"):
        console.complete("What?", [folder / "1.png"])

    def overflow(*_, **__):
        raise OverflowError("signed integer is greater than maximum")

    monkeypatch.setattr(type(processor), "__call__", overflow)
    with pytest.raises(UsageError, match="processor refuses the text with 1 images"):
        console.complete("What?", [folder / "1.png"])
