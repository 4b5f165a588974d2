"""What a working directory that is in use, damaged, or in a bad place does to `calibrate` and `export`."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from calibrations import contents, run
from click.testing import CliRunner
from crashes import crash, operations
from tiny.checkpoints import save_checkpoint

from kvconvert.cli import cli
from kvconvert.convert import pipeline, workdir
from kvconvert.convert.export import export
from kvconvert.convert.work_files import check_place, read_sealed, remove_work, sealed_json, work_lock
from kvconvert.convert.workdir import WorkDir
from kvconvert.errors import CheckpointError, KvconvertError, MissingError, UsageError
from kvconvert.io import disk
from kvconvert.models.weight_files import SINGLE_FILE

SHORT = {"samples": 1, "seq_len": 16}


@pytest.fixture(scope="module")
def model(place):
    return save_checkpoint(place / "model", hidden_size=32, intermediate_size=32)


@pytest.fixture(scope="module")
def finished(place, model, text):
    run(model, place / "finished", text, **SHORT)
    return place / "finished"


@pytest.fixture
def work(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "work")


HOLD = """
import fcntl, sys
lock = open(sys.argv[1])
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def used_by_another_process(work):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(work / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"held\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_working_directory_in_use_is_refused_until_its_process_is_gone(tmp_path, model, text, work, finished):
    with used_by_another_process(work) as process:
        for command in (
            lambda: run(model, work, text, **SHORT),
            lambda: run(model, work, text, restart=True, **SHORT),
            lambda: export(work, tmp_path / "bundle", progress=False),
        ):
            with pytest.raises(UsageError, match=f"Another calibrate or export is using {work}; wait"):
                command()
        assert contents(work) == contents(finished)
        process.send_signal(signal.SIGKILL)
        process.wait()
        export(work, tmp_path / "bundle", progress=False)


def test_a_model_that_was_moved_is_exported_after_its_new_place_is_told(tmp_path, model, text, work):
    place, moved = str(tmp_path / "model"), shutil.copytree(model, tmp_path / "moved")
    state = read_sealed(work / "state.json") | {"model": place, "directory": place}
    (work / "state.json").write_text(sealed_json(state))
    with pytest.raises(MissingError, match=r"/model, which was .*, is gone; put it back, or calibrate"):
        export(work, tmp_path / "bundle", progress=False)
    run(moved, work, text, **SHORT)
    export(work, tmp_path / "bundle", progress=False)


def test_an_export_in_progress_admits_other_exports_but_no_calibration(tmp_path, model, text, work):
    with WorkDir.reading(work):
        with pytest.raises(UsageError, match="Another calibrate or export is using"):
            run(model, work, text, restart=True, **SHORT)
        export(work, tmp_path / "bundle", progress=False)


def flipped(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "flipped byte": ("00000.safetensors", flipped),
    "flipped byte of the plan": ("00000.plan.safetensors", flipped),
    "missing tensors": ("00001.safetensors", Path.unlink),
    "emptied record": ("00000.json", lambda file: file.write_text("")),
    "truncated record": ("00001.json", lambda file: file.write_text(file.read_text()[:100])),
    "changed record": ("00001.json", lambda file: file.write_text(file.read_text().replace('"awq"', '"rtn"', 1))),
}


@pytest.mark.quick("flipped byte of the plan", "missing tensors", "truncated")
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_layer_is_not_exported_and_is_computed_again_alone(
    tmp_path, model, text, work, finished, damage, monkeypatch, capsys
):
    name, spoil = DAMAGES[damage]
    file = work / "layers" / name
    spoil(file)
    with pytest.raises(UsageError, match=f"{file} is damaged .*; calibrate again with the same arguments"):
        export(work, tmp_path / "bundle", progress=False)
    assert not (tmp_path / "bundle").exists()
    computed = []
    commit = WorkDir.commit_layer

    def count(self, index, *arguments):
        computed.append(index)
        commit(self, index, *arguments)

    monkeypatch.setattr(WorkDir, "commit_layer", count)
    run(model, work, text, progress=True, **SHORT)
    said = capsys.readouterr().err
    assert f"Layer {int(name[:5])} in {work} is damaged and is computed again" in said
    assert "nothing to do" not in said
    assert computed == [int(name[:5])]
    assert contents(work) == contents(finished)


def test_a_damaged_state_and_one_of_another_version_are_refused(tmp_path, model, text, work):
    state = read_sealed(work / "state.json")
    for content, said in (
        (sealed_json(state | {"format": 999}), "written by another version of kvconvert"),
        (sealed_json(state | {"format": "\x1b[2J" + "9" * 99_999}), "written by another version of kvconvert"),
        ((work / "state.json").read_text().replace('"seed": 0', '"seed": 1'), "does not fit its checksum"),
    ):
        (work / "state.json").write_text(content)
        for command in (lambda: run(model, work, text, **SHORT), lambda: export(work, tmp_path / "b", progress=False)):
            with pytest.raises(UsageError, match=f"{said}.*`restart=True`") as told:
                command()
            assert str(told.value).isprintable()
            assert len(str(told.value)) < 600


def test_places_that_cannot_be_written_to_are_refused_before_the_model_is_opened(tmp_path, text, work, monkeypatch):
    monkeypatch.setattr(pipeline, "open_source", lambda model: pytest.fail("opened"))
    monkeypatch.setattr("kvconvert.convert.export.open_source", lambda model: pytest.fail("opened"))
    place = Path("/proc")  # where even root can create nothing
    with pytest.raises(UsageError, match=r"/proc cannot be written to \(.*\); choose another place as `work`"):
        run(tmp_path / "model", place / "work", text, **SHORT)
    with pytest.raises(UsageError, match=r"/proc cannot be written to \(.*\); choose another place as `bundle`"):
        export(work, place / "bundle", progress=False)


def test_a_shard_that_changes_during_the_run_stops_it_and_what_is_done_stays(
    tmp_path, model, text, finished, monkeypatch
):
    moved, work = shutil.copytree(model, tmp_path / "model"), tmp_path / "work"
    commit = WorkDir.commit_layer

    def change(self, index, *arguments):
        commit(self, index, *arguments)
        os.utime(moved / SINGLE_FILE, (1, 1))

    with monkeypatch.context() as patch:
        patch.setattr(WorkDir, "commit_layer", change)
        with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was being converted"):
            run(moved, work, text, **SHORT)
    assert WorkDir(work, None)._layer(0, "json").exists()
    run(model, work, text, **SHORT)
    # state.json names the directory of the model that the run was started with.
    found, expected = contents(work), contents(finished)
    assert found.pop("state.json") != expected.pop("state.json")
    assert found == expected


def test_an_interrupted_calibration_leaves_nothing_half_written_and_says_how_to_go_on(
    tmp_path, model, text, finished, monkeypatch
):
    work = tmp_path / "work"

    def interrupt(self, sequences):
        raise KeyboardInterrupt

    recipe = tmp_path / "awq.toml"
    recipe.write_text('[weights]\nmethod = "awq"\ngroup_size = 32\n')
    monkeypatch.setattr("kvconvert.convert.input_capture.HiddenWriter.append", interrupt)
    options = ["--recipe", recipe, "--data", text, "--samples", 1, "--seq-len", 16]
    result = CliRunner().invoke(cli, [str(word) for word in ("calibrate", model, "-o", work, *options)])
    assert result.exit_code == 130
    assert result.stderr.strip().endswith(
        "run the same command again to go on from the last finished layer, if there is one."
    )
    assert not list(work.rglob("*.partial"))


@pytest.mark.parametrize("name", ["lock", ".state.json.partial"])
def test_no_link_in_a_working_directory_is_followed_to_a_file_elsewhere(work, model, text, tmp_path, name):
    (tmp_path / "mine").write_text("mine")
    (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(tmp_path / "mine")
    with contextlib.suppress(KvconvertError):
        run(model, work, text, **SHORT, restart=True)
    assert (tmp_path / "mine").read_text() == "mine"
    (work / "lock").unlink(missing_ok=True)
    (work / "lock").symlink_to(tmp_path / "absent")
    with pytest.raises(KvconvertError, match=rf"lock|{name}"):
        export(work, tmp_path / "bundle")
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"num_layers": 10**12},
        {"num_layers": "2"},
        {"recipe": {"name": 3}},
        {"recipe": {"name": "x", "weights": 5, "kv": [], "calibration": {}, "layers": 7, "limits": {}}},
        {"data": {"source": {"a": 1}}},
        {"kept_modules": [[]]},
        {"directory": "x" * 5000, "model": "/nope"},
        {"versions": {"a": {"b": 1}}},
        {"transforms": [[[]]]},
        {"versions": {"transformers": "x" * 3000}},
        {"transforms": ["x" * 3000]},
        {"recipe": json.loads("[" * 300 + "]" * 300)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_state_with_unknown_nested_or_impossible_entries_is_one_sentence(work, tmp_path, change):
    state = read_sealed(work / "state.json")
    (work / "state.json").write_text(sealed_json(state | change))
    with pytest.raises(KvconvertError) as caught:
        export(work, tmp_path / "bundle")
    assert "\n" not in str(caught.value)
    assert next(iter(change)) in str(caught.value) or "more than 100 lists" in str(caught.value)


def stream(path):
    os.mkfifo(path)


def huge(path):
    with path.open("wb") as file:
        file.truncate(10**11)


ODD_ENTRIES = {
    "record that is a pipe": ("layers/00000.json", stream),
    "tensors that are a pipe": ("layers/00001.safetensors", stream),
    "endless tensors": ("layers/00000.plan.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "layers elsewhere": ("layers", lambda path: path.symlink_to(path.parent.parent)),
    "search elsewhere": ("auto", lambda path: path.symlink_to(path.parent.parent)),
    "lock that is a folder": ("lock", Path.mkdir),
    "huge record": ("layers/00000.json", huge),
    "huge tensors": ("layers/00000.plan.safetensors", huge),
}


@pytest.mark.parametrize("kind", ODD_ENTRIES)
def test_a_working_directory_of_odd_files_is_refused_at_once(work, model, text, tmp_path, kind, monkeypatch):
    name, make = ODD_ENTRIES[kind]
    hashed, known = [], workdir.known_sha256
    monkeypatch.setattr(workdir, "known_sha256", lambda files: hashed.extend(files) or known(files))
    if (work / name).is_dir():
        shutil.rmtree(work / name)
    (work / name).unlink(missing_ok=True)
    make(work / name)
    with pytest.raises(UsageError, match=Path(name).name):
        export(work, tmp_path / "bundle", progress=False)
    assert work / name not in hashed
    if not kind.startswith("huge"):  # which is damaged, and computed again
        with pytest.raises(UsageError, match=Path(name).name):
            run(model, work, text, **SHORT)


@pytest.mark.parametrize("name", ["00000.safetensors", "00001.plan.safetensors"])
@pytest.mark.parametrize("content", [b"", b"x" * 100, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 2**62) + b"{}"])
def test_tensors_of_a_stranger_are_refused_whatever_their_checksum(work, tmp_path, name, content):
    index, _, suffix = name.partition(".")
    record = work / "layers" / f"{index}.json"
    (work / "layers" / name).write_bytes(content)
    fields = read_sealed(record)
    fields["files"][suffix] = hashlib.sha256(content).hexdigest()
    record.write_text(sealed_json(fields))
    with pytest.raises(UsageError, match=f"{name} is damaged"):
        export(work, tmp_path / "bundle")


def test_a_state_that_copies_tensors_which_the_source_lacks_is_refused(work, tmp_path):
    state = read_sealed(work / "state.json")
    (work / "state.json").write_text(sealed_json(state | {"kept_tensors": [*state["kept_tensors"], "absent"]}))
    with pytest.raises(CheckpointError, match="'absent' is copied"):
        export(work, tmp_path / "bundle")


def test_a_conversion_holds_its_working_directory_from_calibration_to_removal(tmp_path, model, text, monkeypatch):
    place, tried, taken = tmp_path / "bundle-work", [], []

    def observe(operation, path):
        if (place / "layers").exists():
            tried.append(path)
            with (place / "lock").open() as lock, contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                taken.append(path)

    monkeypatch.setattr(disk, "observe", observe)
    options = ["--weights", "rtn", "--data", text, "--samples", 1, "--seq-len", 16, "--device", "cpu"]
    result = CliRunner().invoke(cli, [str(word) for word in ("convert", model, tmp_path / "bundle", *options)])
    assert (result.exit_code, taken) == (0, [])
    assert len(tried) > 50
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]


def test_an_output_that_another_run_finished_meanwhile_ends_a_conversion_before_calibration(
    tmp_path, model, text, monkeypatch
):
    bundle, written = tmp_path / "bundle", []

    def observe(operation, path):
        written.append(path.name)
        if operation == "mkdir" and not bundle.exists():
            shutil.copytree(Path(__file__).parents[1] / "golden" / "format-1", bundle)

    monkeypatch.setattr(disk, "observe", observe)
    options = ["--weights", "rtn", "--data", text, "--samples", 1, "--seq-len", 16, "--device", "cpu"]
    result = CliRunner().invoke(cli, [str(word) for word in ("convert", model, bundle, *options)])
    assert (result.exit_code, "exists; choose another path" in result.stderr) == (2, True)
    assert ([*tmp_path.iterdir()], ".state.json.partial" in written) == ([bundle], False)


def test_a_lock_whose_directory_was_removed_meanwhile_is_refused(work, monkeypatch):
    lock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda *arguments: (shutil.rmtree(work), lock(*arguments)))
    with pytest.raises(UsageError, match="Another calibrate or export is using"), work_lock(work):
        pass


def test_a_working_directory_can_be_used_after_a_crash_at_any_moment_of_its_removal(finished, tmp_path, monkeypatch):
    work = shutil.copytree(finished, tmp_path / "work")
    made = operations(monkeypatch, lambda: remove_work(work))
    assert not work.exists()
    for at in range(len(made)):
        shutil.copytree(finished, work)
        crash(monkeypatch, lambda: remove_work(work), at)
        check_place(work)
        shutil.rmtree(work)


def test_a_working_directory_that_another_run_takes_while_it_is_removed_stays(work, monkeypatch):
    def observe(operation, path):
        if path == work:
            (work / "lock").touch()

    monkeypatch.setattr(disk, "observe", observe)
    remove_work(work)
    assert [entry.name for entry in work.iterdir()] == ["lock"]


def test_a_name_without_room_for_those_of_temporary_directories_is_refused_first(finished, model, tmp_path):
    most = os.pathconf(tmp_path, "PC_NAME_MAX") - 19
    for name in ("n" * (most + 1), "ü" * (most // 2 + 1)):
        with pytest.raises(UsageError, match=f"may have {most}, because"):
            export(finished, tmp_path / name)
        result = CliRunner().invoke(cli, ["convert", str(model), str(tmp_path / name)])
        assert (result.exit_code, "choose a shorter one" in result.stderr, [*tmp_path.iterdir()]) == (2, True, [])
    for force in (False, True):
        export(finished, tmp_path / ("n" * most), force=force, progress=False)
