"""Every script of examples/ for users runs, on tiny models; onnx_generate.py and read_bundle.py have tests of their
own.
"""

import contextlib
import hashlib
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fetch_models
import long_context
import mixture
import own_data
import own_recipe
import production
import pytest
import share
import torch
import vision_language
from PIL import Image
from tiny.checkpoints import REFERENCE, save_checkpoint
from tiny.hub import standing_in
from tiny.mixtures import tiny_mixture

from kvconvert import KvconvertError, calibrate, export
from kvconvert.bundle.reader import open_bundle
from kvconvert.data.drawings import draw

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = (production, own_recipe, own_data, vision_language, mixture, long_context, share)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with standing_in(monkeypatch, tmp_path) as hub:
        yield hub


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model and the bundle of it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("examples")
    save_checkpoint(folder / "model", max_position_embeddings=2048)
    calibrate(folder / "model", folder / "work", recipe="kv-only", samples=1, seq_len=32, progress=False)
    export(folder / "work", folder / "bundle", progress=False)
    return folder


def test_help_explains_every_argument_and_does_not_wait_for_torch():
    program = """
import argparse, contextlib, os, runpy, sys
add_argument = argparse.ArgumentParser.add_argument

def explained(parser, *names, **options):
    assert names[0].startswith("-") or options.get("help"), (sys.argv, names)
    return add_argument(parser, *names, **options)

argparse.ArgumentParser.add_argument = explained
sys.stdout = sys.stderr = open(os.devnull, "w")
for file in sys.argv[1:]:
    for arguments, code in ((["--help"], 0), ([], 2)):
        sys.argv = [file, *arguments]
        try:
            runpy.run_path(file, run_name="__main__")
        except SystemExit as ended:
            assert ended.code == code, (file, ended.code)
        assert not {"torch", "transformers"} & sys.modules.keys(), file
"""
    files = [script.__file__ for script in (*SCRIPTS, fetch_models)]
    ran = subprocess.run([sys.executable, "-c", program, *files], check=False)
    assert ran.returncode == 0


def test_production_answers_and_refuses_another_bundle_than_the_pinned_one(folder, capsys):
    pinned = hashlib.sha256((folder / "bundle" / "kvconvert.json").read_bytes()).hexdigest()
    texts = production.main(str(folder / "bundle"), pinned)
    assert [text.startswith(prompt) for text, prompt in zip(texts, production.PROMPTS, strict=True)] == [True, True]
    assert "bytes_used" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="is not the bundle that was deployed"):
        production.main(str(folder / "bundle"), "0" * 64)
    with pytest.raises(KvconvertError, match="not a kvconvert bundle"):
        production.main(str(folder / "nowhere"))


def test_long_context_reads_a_text_in_chunks_beside_other_requests(folder, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("It was a dark night, and the old house stood. " * 30)
    texts = long_context.main(str(folder / "bundle"), str(tmp_path / "text.txt"), 2**22, 64)
    assert len(texts) == 3
    assert "finished=3" in capsys.readouterr().out


def test_share_pushes_fetches_and_loads_the_commit(folder, hub, tmp_path, capsys):
    text = share.main(str(folder / "bundle"), "somebody/tiny", str(tmp_path))
    assert text.startswith(share.PROMPT)
    (commit,) = hub.repositories["somebody/tiny"].branches.values()
    assert f"somebody/tiny at {commit}" in capsys.readouterr().out
    assert hub.repositories["somebody/tiny"].private
    assert open_bundle(tmp_path / "copy").manifest == open_bundle(folder / "bundle").manifest
    hub.status = 403
    with pytest.raises(KvconvertError, match="The Hub refuses access"):
        share.main(str(folder / "bundle"), "somebody/tiny", str(tmp_path / "other"))


@pytest.mark.full
def test_own_recipe_is_what_the_bundle_says(folder, tmp_path, capsys):
    bundle = own_recipe.main(str(folder / "model"), str(tmp_path), samples=2, seq_len=64)
    assert f"The bundle is in {bundle}." in capsys.readouterr().out
    manifest = open_bundle(bundle).manifest
    assert manifest.layers[0].kv is None
    assert manifest.layers[1].scheme().key_bits == 4
    assert {m.bits for m in manifest.modules if m.method == "rtn" and m.name.endswith("down_proj")} == {8}


def test_own_recipe_writes_nothing_into_a_bundle(tmp_path):
    (tmp_path / "kvconvert.json").write_text("{}")
    with pytest.raises(KvconvertError, match="is a bundle, which stays as it was sealed"):
        own_recipe.main("model", str(tmp_path))
    assert os.listdir(tmp_path) == ["kvconvert.json"]


@pytest.mark.full
def test_own_data_is_measured_on_other_data(folder, tmp_path):
    for name, text in (("calibration", "The miller walked home. "), ("held", "It was a dark night. ")):
        (tmp_path / f"{name}.txt").write_text(text * 1000)
    files = [str(tmp_path / f"{name}.txt") for name in ("calibration", "held")]
    assert own_data.main(str(folder / "model"), str(tmp_path), *files, samples=2, tokens=256) >= 0


@pytest.mark.full
def test_a_vision_language_model_answers_about_an_image(tmp_path):
    Image.fromarray(draw(3, 1).image).save(tmp_path / "drawing.png")
    model = str(ROOT / "examples" / "reference-vlm")
    assert vision_language.main(model, str(tmp_path), str(tmp_path / "drawing.png"), samples=2).strip()


@pytest.mark.full
def test_a_mixtures_experts_are_quantized(tmp_path):
    tiny_mixture("qwen3_moe").save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(REFERENCE / name, tmp_path / "model" / name)
    stored = mixture.main(str(tmp_path / "model"), str(tmp_path), samples=4, seq_len=32, group_size=16)
    assert stored["awq"] == 2 * 4 * 3


@pytest.mark.parametrize("script", [own_recipe, own_data, vision_language, mixture], ids=lambda script: script.__name__)
def test_where_the_bundle_is_is_said_once_it_is_written(script, tmp_path, monkeypatch, capsys):
    class Ended(Exception):
        pass

    def end(*arguments, **options):
        raise Ended

    Image.fromarray(draw(3, 1).image).save(tmp_path / "drawing.png")
    config = SimpleNamespace(to_json_string=lambda: "num_experts")
    monkeypatch.setattr("kvconvert.models.source.open_source", lambda model: SimpleNamespace(config=config))
    monkeypatch.setattr(script.kvconvert, "calibrate", lambda *arguments, **options: None)
    monkeypatch.setattr(script.kvconvert, "export", lambda work, bundle, force: bundle)
    for name in ("load", "evaluate"):
        monkeypatch.setattr(script.kvconvert, name, end)
    arguments = {vision_language: [str(tmp_path / "drawing.png")], own_data: ["a.txt", "b.txt"]}.get(script, [])
    with contextlib.suppress(Ended, FileNotFoundError):  # the mixture's manifest is read
        script.main("model", str(tmp_path), *arguments)
    assert f"The bundle is in {tmp_path / 'bundle'}." in capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_wrong_path_ends_in_one_sentence(script, tmp_path, monkeypatch):
    count = {production: 1, vision_language: 3, own_data: 4, share: 3}.get(script, 2)
    monkeypatch.setattr(sys, "argv", [script.__file__, *(str(tmp_path / f"no{i}") for i in range(count))])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(script.__file__, run_name="__main__")
    assert str(tmp_path) in ended.value.code
    assert "\n" not in ended.value.code


def test_what_a_script_cannot_use_is_refused_before_any_work(folder, tmp_path):
    with pytest.raises(SystemExit, match="There is no file gone"):
        long_context.main(str(folder / "bundle"), "gone.txt")
    with pytest.raises(SystemExit, match="There is no file gone"):
        vision_language.main(str(folder / "model"), str(tmp_path), "gone.png")
    with pytest.raises(SystemExit, match="is not a mixture of experts"):
        mixture.main(str(folder / "model"), str(tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["onnx_generate", "read_bundle"])
def test_a_script_for_numpy_says_that_a_directory_is_another(script, tmp_path, monkeypatch, capsys):
    file = ROOT / "examples" / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(file), str(tmp_path), *["a text"][: script == "onnx_generate"]])
    with pytest.raises(SystemExit):
        runpy.run_path(str(file), run_name="__main__")
    assert f"{tmp_path} is no" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("script", "arguments", "said"),
    [
        ("read_bundle", ["bundle"], "has no weights of 4 bits"),
        ("fetch_models", ["smollm2", "new", "--from-gguf", "model/config.json"], "is no GGUF file"),
        ("quickstart", ["--check", "gone.md"], "gone.md is no file"),
    ],
)
def test_a_file_of_another_kind_is_refused_before_any_work(folder, script, arguments, said, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    file = ROOT / "examples" / f"{script}.py"
    monkeypatch.setattr(sys, "argv", [str(file), *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(file), run_name="__main__")
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_is_short_and_says_how_it_is_called(script):
    lines = Path(script.__file__).read_text(encoding="utf8").splitlines()
    assert len(lines) < 60
    assert re.search(
        rf"^    python examples/{script.__name__}\.py [A-Z]|^    python .*OUTPUT", script.__doc__, re.MULTILINE
    )
