"""A calibration that was killed, repeated or given other inputs goes on to the same bytes, or is refused."""

import json
import os
import shutil
import signal
import threading

import pytest
from calibrations import KV_ONLY, contents, run
from safetensors.torch import load_file, save_file
from tiny import forked

from kvconvert.convert import workdir
from kvconvert.convert.input_capture import HiddenWriter
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import KvconvertError, UsageError


def test_a_second_run_does_nothing_and_says_so(model, text, finished, capsys):
    before = contents(finished.path)
    again = run(model, finished.path, text, progress=True)
    assert "already complete (2 layers); nothing to do" in capsys.readouterr().err
    assert contents(finished.path) == before
    assert again.state == finished.state


def test_what_is_done_of_the_first_layer_is_said(model, text, tmp_path, capsys):
    run(model, tmp_path / "work", text, progress=True)
    said = capsys.readouterr().err
    for stage in ("reading", "activations of 3 sequences", "awq"):
        assert f"layers: layer 0, {stage}\n" in said
    assert "layer 1" not in said


def test_a_real_kill_between_layer_and_hidden_states_costs_nothing(place, model, text, finished, monkeypatch, capsys):
    work, commit = place / "sigkill", HiddenWriter.commit

    def killed(self):
        if self._path.name == "00001.f32":
            os.kill(os.getpid(), signal.SIGKILL)
        commit(self)

    with monkeypatch.context() as patch:
        patch.setattr(HiddenWriter, "commit", killed)
        assert forked.wait(forked.start(lambda: run(model, work, text))) == -signal.SIGKILL
    with pytest.raises(UsageError, match="stopped after 1 of 2 layers"):
        WorkDir.open(work)
    run(model, work, text, progress=True)
    assert f"Going on in {work}, where 1 of 2 layers are done." in capsys.readouterr().err
    assert contents(work) == contents(finished.path)


def changed_weights(model, options):
    file = sorted(model.glob("*.safetensors"))[-1]
    tensors = load_file(file)
    tensors[min(tensors)] = tensors[min(tensors)] + 1
    save_file(tensors, file)


def changed_config(model, options):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed_weights, r"the model's model-.*safetensors"),
        (changed_config, r"the model's config\.json"),
        (lambda model, options: options.update(seed=1), "the seed \\(0 to 1\\)"),
        (lambda model, options: options.update(samples=2), "the number of samples \\(3 to 2\\)"),
        (lambda model, options: options.update(recipe=KV_ONLY), r"the recipe's weights\.method \(awq to none\)"),
    ],
    ids=["weights", "config", "seed", "samples", "recipe"],
)
def test_a_changed_input_refuses_to_resume(tmp_path, model, text, finished, change, said):
    shutil.copytree(finished.path, tmp_path / "work")
    changed = shutil.copytree(model, tmp_path / "model")
    before = contents(tmp_path / "work")
    options = {}
    change(changed, options)
    with pytest.raises(UsageError, match=f"{said}.*`restart=True`") as caught:
        run(changed, tmp_path / "work", text, **options)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "work") == before


def test_restart_begins_anew_with_another_input(tmp_path, model, text, finished):
    shutil.copytree(finished.path, tmp_path / "work")
    options = {"recipe": KV_ONLY, "seed": 1, "samples": 2}
    run(model, tmp_path / "work", text, restart=True, **options)
    run(model, tmp_path / "fresh", text, **options)
    assert contents(tmp_path / "work") == contents(tmp_path / "fresh")


def test_the_same_model_in_another_place_resumes(tmp_path, model, text, finished):
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    shutil.copytree(finished.path, tmp_path / "work")
    before = contents(tmp_path / "work")
    run(moved, tmp_path / "work", text)
    assert contents(tmp_path / "work") == before


def test_other_peoples_files_are_left_alone(tmp_path, model, text):
    (tmp_path / "notes.txt").write_text("mine")
    for restart in (False, True):
        with pytest.raises(UsageError, match="holds files that are not kvconvert's"):
            run(model, tmp_path, text, restart=restart)
    assert contents(tmp_path) == {"notes.txt": b"mine"}


@pytest.mark.quick("never saved")
@pytest.mark.parametrize(("every", "left"), [(0.0, ["00001.f32"]), (1e9, [])], ids=["saved", "never saved"])
def test_inputs_held_in_memory_give_the_same_bytes_and_resume(
    tmp_path, model, text, finished, monkeypatch, every, left
):
    """As on a GPU with room for them."""
    monkeypatch.setattr(LayerRunner, "has_room", lambda self, shape: True)
    monkeypatch.setattr(workdir, "SAVED_EVERY_S", every)
    work, commit_layer = tmp_path / "work", WorkDir.commit_layer

    def stop_at_the_second(self, index, *rest):
        if index == 1:
            raise KeyboardInterrupt
        commit_layer(self, index, *rest)

    with monkeypatch.context() as stopping:
        stopping.setattr(WorkDir, "commit_layer", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            run(model, work, text)
    assert [file.name for file in (work / "hidden").iterdir()] == left
    run(model, work, text)
    assert contents(work) == contents(finished.path)


def test_a_layer_with_inputs_in_memory_is_written_while_the_next_is_computed(
    tmp_path, model, text, finished, monkeypatch
):
    """As on a GPU with room for them. A failure of the writing ends the run, and another goes on to the same bytes."""
    monkeypatch.setattr(LayerRunner, "has_room", lambda self, shape: True)
    read, layer, commit = threading.Event(), LayerRunner.layer, WorkDir.commit_layer

    def reading(self, index, *rest):
        if index == 1:
            read.set()
        return layer(self, index, *rest)

    def late(self, index, *rest):
        assert read.wait(60)
        commit(self, index, *rest)

    def failing(self, index, *rest):
        raise KvconvertError(f"no room for layer {index}")

    with monkeypatch.context() as patched:
        patched.setattr(LayerRunner, "layer", reading)
        patched.setattr(WorkDir, "commit_layer", late)
        assert contents(run(model, tmp_path / "late", text).path) == contents(finished.path)
    with monkeypatch.context() as patched:
        patched.setattr(WorkDir, "commit_layer", failing)
        with pytest.raises(KvconvertError, match="no room for layer 0"):
            run(model, tmp_path / "failed", text)
    assert not list((tmp_path / "failed" / "layers").glob("*.json"))
    assert contents(run(model, tmp_path / "failed", text).path) == contents(finished.path)
