"""A conversion that is stopped at any of its writes, syncs and renames ends, when it is repeated, in the same bytes."""

import errno
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from calibrations import AWQ, KV_ONLY, contents, run
from crashes import crash, failing, operations
from tiny.checkpoints import save_checkpoint

from kvconvert.convert.export import export
from kvconvert.errors import KvconvertError
from kvconvert.io import disk

STEP = 97  # of the changes to files, every one of this many is tried; the full run tries all
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


@pytest.mark.full
def test_a_crash_at_any_change_while_restarting_costs_nothing(tmp_path, model, text, converted, monkeypatch):
    expected = contents(converted / "work")
    run(model, tmp_path / "other", text, KV_ONLY, seed=1, **SHORT)
    shutil.copytree(tmp_path / "other", tmp_path / "whole")
    made = operations(monkeypatch, lambda: run(model, tmp_path / "whole", text, restart=True, **SHORT))
    for at in range(len(made)):
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
