"""A conversion that is stopped at any of its writes, syncs and renames ends, when it is repeated, in the same bytes.

A calibration that was killed, repeated or given other inputs goes on to the same bytes, or is refused.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
from calibrations import AWQ, KV_ONLY, contents, run
from crashes import crash, failing, operations
from safetensors.torch import load_file, save_file
from tiny import forked
from tiny.checkpoints import save_checkpoint

from kvconvert.convert import workdir
from kvconvert.convert.export import export
from kvconvert.convert.input_capture import HiddenWriter
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import KvconvertError, UsageError
from kvconvert.io import disk

STEP = 31  # of the changes to files, every one of this many is tried; the full run tries all
SHORT = {"samples": 1, "seq_len": 16}


@pytest.fixture(scope="module")
def model(place):
    return save_checkpoint(place / "model", hidden_size=32, intermediate_size=32, vocab_size=4096)


@pytest.fixture(scope="module")
def converted(place, model, text):
    """An undisturbed conversion: folder with work and bundle."""
    run(model, place / "converted" / "work", text, **SHORT)
    export(place / "converted" / "work", place / "converted" / "bundle", progress=False)
    return place / "converted"


def tried(count, step):
    """Every step-th of `count` operations, and the last."""
    return sorted({*range(step // 2, count, step), count - 1})


@pytest.mark.parametrize("step", [STEP, pytest.param(1, marks=pytest.mark.full)])
def test_a_crash_at_any_change_to_the_working_directory_costs_nothing(
    place, tmp_path, model, text, converted, monkeypatch, step
):
    expected = contents(converted / "work")
    made = operations(monkeypatch, lambda: run(model, tmp_path / "whole", text, **SHORT))
    assert {"mkdir", "create", "write", "sync", "rename", "remove"} == {operation for operation, _ in made}
    assert contents(tmp_path / "whole") == expected
    for at in tried(len(made), step):
        work = tmp_path / "work"
        crash(monkeypatch, lambda work=work: run(model, work, text, **SHORT), at)
        run(model, work, text, **SHORT)
        assert contents(work) == expected, f"crashed before {made[at]}, number {at}"
        shutil.rmtree(work)


@pytest.mark.parametrize("step", [3 * STEP, pytest.param(1, marks=pytest.mark.full)])
def test_a_crash_at_any_change_while_restarting_costs_nothing(tmp_path, model, text, converted, monkeypatch, step):
    expected = contents(converted / "work")
    run(model, tmp_path / "other", text, KV_ONLY, seed=1, **SHORT)
    shutil.copytree(tmp_path / "other", tmp_path / "whole")
    made = operations(monkeypatch, lambda: run(model, tmp_path / "whole", text, restart=True, **SHORT))
    for at in tried(len(made), step):
        work = shutil.copytree(tmp_path / "other", tmp_path / "work")
        crash(monkeypatch, lambda work=work: run(model, work, text, restart=True, **SHORT), at)
        run(model, work, text, restart=True, **SHORT)
        assert contents(work) == expected, f"crashed before {made[at]}, number {at}"
        shutil.rmtree(work)


@pytest.mark.parametrize("step", [STEP // 2, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "replacing"])
def test_a_crash_at_any_change_of_an_export_leaves_the_old_bundle_or_the_new_one(
    tmp_path, converted, monkeypatch, replaces, step
):
    """`--force` is needed again only for as long as the old bundle is there."""
    bundle, expected = tmp_path / "out" / "bundle", contents(converted / "bundle")
    old = shutil.copytree(converted / "bundle", tmp_path / "old")
    (old / "README.md").write_text("the old bundle")

    def begin():
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        if replaces:
            shutil.copytree(old, bundle)

    def go():
        export(converted / "work", bundle, force=replaces, progress=False, max_shard_bytes=100_000)

    begin()
    made = operations(monkeypatch, go)
    expected = contents(bundle)
    for at in tried(len(made), step):
        begin()
        crash(monkeypatch, go, at)
        if bundle.exists():
            assert contents(bundle) in (contents(old), expected), f"crashed before {made[at]}, number {at}"
        export(converted / "work", bundle, force=True, progress=False, max_shard_bytes=100_000)
        assert contents(bundle) == expected, f"crashed before {made[at]}, number {at}"
        assert [entry.name for entry in bundle.parent.iterdir()] == ["bundle"]


@pytest.mark.parametrize("step", [2 * STEP, pytest.param(1, marks=pytest.mark.full)])
def test_a_full_disk_at_any_change_is_one_sentence_and_costs_nothing(
    tmp_path, model, text, converted, monkeypatch, step
):
    expected = contents(converted / "work")
    made = operations(monkeypatch, lambda: run(model, tmp_path / "whole", text, **SHORT))
    for at in tried(len(made), step):
        operation, path = made[at]
        work = tmp_path / "work"
        with failing(monkeypatch, at, errno.ENOSPC), pytest.raises(KvconvertError) as caught:
            run(model, work, text, **SHORT)
        said = str(caught.value)
        assert said.startswith(f"The disk is full: {str(path).replace('whole', 'work')} could not be written"), said
        assert "\n" not in said
        assert ("bytes are needed for this file" in said) == (
            operation in ("create", "write", "sync") and "." in path.name
        )
        run(model, work, text, **SHORT)
        assert contents(work) == expected, f"full at {made[at]}, number {at}"
        shutil.rmtree(work)


@pytest.mark.parametrize("step", [STEP // 2, pytest.param(1, marks=pytest.mark.full)])
def test_a_full_disk_at_any_change_of_an_export_leaves_nothing(tmp_path, converted, monkeypatch, step):
    bundle = tmp_path / "out" / "bundle"
    made = operations(monkeypatch, lambda: export(converted / "work", bundle, progress=False))
    shutil.rmtree(tmp_path / "out")
    final = next(i for i, (name, path) in enumerate(made) if name == "rename" and path == bundle)
    for at in [*tried(final + 1, step)]:
        with failing(monkeypatch, at, errno.ENOSPC), pytest.raises(KvconvertError, match="nothing was left behind"):
            export(converted / "work", bundle, progress=False)
        assert not (tmp_path / "out").exists(), f"full at {made[at]}, number {at}"


def test_every_change_to_files_goes_through_one_module(tmp_path, model, text, converted, monkeypatch):
    """With every operation impossible, neither command changes anything."""

    def refuse(operation, path):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk, "observe", refuse)
    with pytest.raises(KvconvertError, match=r"Writing failed.*Read-only file system"):
        run(model, tmp_path / "work", text, **SHORT)
    with pytest.raises(KvconvertError, match="Read-only file system"):
        export(converted / "work", tmp_path / "out" / "bundle", progress=False)
    assert not list(tmp_path.iterdir())


COMMANDS = """
import sys
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
model, work, data, bundle = sys.argv[1:]
recipe = Recipe(weights=WeightsRecipe(method="awq", group_size=32))
print("begun", flush=True)
calibrate(model, work, recipe=recipe, data=data, samples=1, seq_len=16, progress=False)
export(work, bundle, force=True, progress=False)
"""


@pytest.mark.full
def test_forty_real_kills_at_random_instants(tmp_path, model, text, converted):
    """Each after a random part of the time that an undisturbed run takes; killed again until one gets through."""
    assert AWQ.weights.group_size == 32
    chance, kills, rounds = random.Random(0), 0, 0
    expected = {part: contents(converted / part) for part in ("work", "bundle")}

    def begin(folder):
        command = [sys.executable, "-c", COMMANDS, model, folder / "work", text, folder / "bundle"]
        process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.readline()
        return process

    started = time.monotonic()
    process = begin(tmp_path / "whole")
    assert process.wait() == 0, process.stderr.read().decode()
    whole = time.monotonic() - started
    while kills < 40:
        folder, rounds = tmp_path / f"{rounds}", rounds + 1
        for attempt in range(100):
            process = begin(folder)
            if attempt < 5 and kills < 40:
                try:
                    process.wait(chance.uniform(0, whole))
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    kills += 1
                    continue
            assert process.wait() == 0, process.stderr.read().decode()
            break
        for part, files in expected.items():
            assert contents(folder / part) == files, f"round {rounds}"


def test_a_second_run_does_nothing_and_says_so(model, text, finished, capsys):
    before = contents(finished.path)
    again = run(model, finished.path, text, progress=True)
    assert "already complete (2 layers); nothing to do" in capsys.readouterr().err
    assert contents(finished.path) == before
    assert again.state == finished.state


def test_a_real_kill_between_layer_and_hidden_states_costs_nothing(place, model, text, finished, monkeypatch):
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
    run(model, work, text)
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
def test_a_changed_input_refuses_to_resume_and_restart_obeys(tmp_path, model, text, finished, change, said):
    shutil.copytree(finished.path, tmp_path / "work")
    changed = shutil.copytree(model, tmp_path / "model")
    before = contents(tmp_path / "work")
    options = {}
    change(changed, options)
    with pytest.raises(UsageError, match=f"{said}.*`restart=True`") as caught:
        run(changed, tmp_path / "work", text, **options)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path / "work") == before
    run(changed, tmp_path / "work", text, restart=True, **options)
    run(changed, tmp_path / "fresh", text, **options)
    redone, fresh = contents(tmp_path / "work"), contents(tmp_path / "fresh")
    assert redone == fresh


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
