"""A bundle goes to the Hub and back: the same bytes, and nothing that does not verify, in either direction."""

import errno
import hashlib
import os
import shutil
import traceback
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants
from tiny import commands
from tiny.bundle import write_tiny_bundle
from tiny.hub import TOKEN, Repository

from kvconvert.bundle.hub import fetch, upload
from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, CheckpointError, HubError, UsageError
from kvconvert.models.source import open_source

NAME = "somebody/tiny"


def kvconvert(*arguments):
    result = commands.kvconvert(*arguments)
    assert TOKEN not in result.output
    return result


def refusal(code, *arguments):
    result = kvconvert(*arguments)
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert "Traceback" not in result.output
    return line


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def publish(hub, directory: Path, **options) -> Repository:
    """What a push would leave."""
    hub.repositories[NAME] = Repository(**options)
    hub.repositories[NAME].commit("main", {".gitattributes": b"", **contents(directory)})
    return hub.repositories[NAME]


def test_push_then_pull_gives_the_same_bytes(hub, golden, tmp_path):
    result = kvconvert("push", golden, NAME, "--private")
    assert result.exit_code == 0, result.output
    assert hub.repositories[NAME].private
    result = kvconvert("pull", NAME, "-o", tmp_path / "copy")
    assert result.exit_code == 0, result.output
    assert contents(tmp_path / "copy") == contents(golden)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    commits = len(hub.repositories[NAME].commits)
    kvconvert("push", golden, NAME)  # nothing changed
    assert len(hub.repositories[NAME].commits) == commits


def test_a_branch_is_made_and_pulled_by_its_name(hub, golden, tmp_path):
    publish(hub, golden)
    (golden / "README.md").write_text("other\n")
    result = kvconvert("push", golden, NAME, "--revision", "second")
    assert result.stdout.endswith(f"next: kvconvert pull {NAME} --revision second -o DIR\n")
    assert hub.repositories[NAME].files("second")["README.md"] == b"other\n"
    assert hub.repositories[NAME].files()["README.md"] != b"other\n"
    assert kvconvert("pull", NAME, "-o", tmp_path / "copy", "--revision", "second").exit_code == 0
    assert (tmp_path / "copy" / "README.md").read_text() == "other\n"
    assert "no revision third" in refusal(1, "pull", NAME, "-o", tmp_path / "b", "--revision", "third")


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_what_a_link_in_place_of_the_card_points_to_is_never_uploaded(hub, golden, tmp_path, caplog, link):
    (tmp_path / "secret").write_text("TOP SECRET")
    (golden / "README.md").unlink(missing_ok=True)
    link(golden / "README.md", tmp_path / "secret")
    result = kvconvert("push", golden, NAME)
    assert result.exit_code == 0, result.output
    assert "Not uploaded, because they are links: README.md" in caplog.text
    files = hub.repositories[NAME].files()
    assert "README.md" not in files
    assert not any(b"TOP SECRET" in content for content in files.values())


def test_commands_take_the_id_of_a_bundle(hub, golden):
    publish(hub, golden)
    assert "golden" in kvconvert("inspect", NAME).stdout
    assert "is intact" in kvconvert("verify", NAME).stdout
    asked = len(hub.fetched())
    assert kvconvert("generate", NAME, "--prompt", "a", "--max-new-tokens", "1").exit_code == 0
    assert len(hub.fetched()) == asked  # all of it is in the Hub's cache


def test_with_the_hub_offline_the_cache_serves_and_nothing_else(hub, golden, monkeypatch, tmp_path):
    publish(hub, golden)
    assert kvconvert("pull", NAME).exit_code == 0
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.utils._http._GLOBAL_CLIENT", None)  # it keeps the mode that it was made in
    assert "is intact" in kvconvert("verify", NAME).stdout
    assert "HF_HUB_OFFLINE is set" in refusal(1, "verify", "somebody/else")
    assert "HF_HUB_OFFLINE is set" in refusal(1, "pull", NAME, "-o", tmp_path / "copy")
    assert len(hub.requests) == asked
    monkeypatch.undo()


def test_a_hub_that_cannot_be_reached_is_asked_without_waiting(hub, golden, monkeypatch):
    def slept(seconds):
        raise AssertionError(seconds)

    publish(hub, golden)
    assert kvconvert("verify", NAME).exit_code == 0
    nowhere = "http://127.0.0.1:9"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    template = f"{nowhere}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("time.sleep", slept)
    for command in ("inspect", "verify"):
        assert kvconvert(command, NAME).exit_code == 0  # from the cache
        assert f"The Hub at {nowhere} cannot be reached" in refusal(1, command, "somebody/else")


def test_a_pull_that_was_cut_off_goes_on_with_what_is_missing(hub, golden, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)  # the client waits longer before each attempt
    publish(hub, golden)
    hub.cut["model.safetensors"] = 1000
    line = refusal(1, "pull", NAME, "-o", tmp_path / "copy")
    assert "run the same command again" in line
    assert not (tmp_path / "copy").exists()
    complete = set(hub.fetched()) - {"model.safetensors"}
    hub.requests.clear()
    hub.cut.clear()
    assert kvconvert("pull", NAME, "-o", tmp_path / "copy").exit_code == 0
    assert "model.safetensors" in hub.fetched()
    assert not complete & set(hub.fetched())
    assert contents(tmp_path / "copy") == contents(golden)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
def test_a_pull_writes_nothing_into_what_others_put_in_its_place(hub, golden, tmp_path, kind):
    publish(hub, golden)
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    staging = tmp_path / f".copy.pulling-{hashlib.sha256(NAME.encode()).hexdigest()[:8]}"
    if kind == "pipe":
        os.mkfifo(staging)
    else:
        staging.symlink_to(home if kind == "link" else tmp_path / "nothing")
    assert "remove it" in refusal(2, "pull", NAME, "-o", tmp_path / "copy")
    assert os.listdir(home) == ["letter.txt"]
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("below", ["", "x"])
def test_an_output_that_is_a_link_to_itself_is_one_sentence(hub, golden, tmp_path, below):
    publish(hub, golden)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    output = tmp_path / "loop" / below
    for arguments in (["pull", NAME], ["report", golden], ["pull", NAME, "--force"]):
        assert str(output) in refusal(2, *arguments, "-o", output)


def test_a_connection_that_breaks_inside_a_file_is_continued_there(hub, golden, tmp_path, monkeypatch):
    def mend(_):  # other threads may sleep as well
        if any(path.endswith("model.safetensors") and method == "GET" for method, path, _ in hub.requests):
            hub.cut.clear()

    monkeypatch.setattr("time.sleep", mend)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    publish(hub, golden)
    hub.cut["model.safetensors"] = 1000
    fetch(NAME, tmp_path / "copy")
    ranges = [asked for method, path, asked in hub.requests if path.endswith("model.safetensors") and method == "GET"]
    assert ranges == [None, "bytes=1000-"]
    assert contents(tmp_path / "copy") == contents(golden)


def test_a_file_that_changed_on_the_server_is_caught_and_nothing_is_left(hub, golden, tmp_path):
    files = publish(hub, golden).files()
    changed = bytearray(files["model.safetensors"])
    changed[-1] ^= 1
    files["model.safetensors"] = bytes(changed)
    line = refusal(1, "pull", NAME, "-o", tmp_path / "copy")
    assert "does not verify" in line
    assert "model.safetensors" in line
    assert "sha256" in line
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert "sha256" in refusal(1, "pull", NAME)  # into the cache
    assert "sha256" in refusal(1, "verify", NAME)


def test_what_programs_would_run_in_a_folder_is_not_fetched_into_it(hub, golden, tmp_path):
    files = publish(hub, golden).files()
    files[".git/config"] = b"[core]\nfsmonitor = touch evil\n"
    files["sub/.envrc"] = b"touch evil\n"
    fetch(NAME, tmp_path / "copy")
    assert contents(tmp_path / "copy") == contents(golden)
    for directory in (fetch(NAME)[0], locate(NAME)):  # in the cache
        assert contents(directory) == contents(golden)


def test_a_bundle_that_does_not_verify_is_not_pushed(hub, golden):
    weights = golden / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert "sha256" in refusal(1, "push", golden, NAME)
    assert hub.requests == []
    assert "no such directory" in refusal(1, "push", golden / "missing", NAME)
    assert "no id of a repository" in refusal(2, "push", Path(__file__).parents[1] / "golden" / "format-1", "a/b/c")


def test_files_of_an_earlier_bundle_are_removed_and_other_models_are_left_alone(hub, tmp_path):
    write_tiny_bundle(tmp_path / "two")
    write_tiny_bundle(tmp_path / "one", max_shard_bytes=10**9)
    upload(open_bundle(tmp_path / "two"), NAME)
    files = hub.repositories[NAME].files()
    files["picture.png"] = b"kept"
    upload(open_bundle(tmp_path / "one"), NAME)
    names = {*hub.repositories[NAME].files()}
    assert names == {*contents(tmp_path / "one"), ".gitattributes", "picture.png"}
    hub.repositories["somebody/else"] = other = Repository()
    for name in ("pytorch_model.bin", "model.safetensors"):  # the other is a file of the bundle, too
        other.commit("main", {name: b"x"})
        with pytest.raises(UsageError, match=f"holds {name} and is no bundle"):
            upload(open_bundle(tmp_path / "one"), "somebody/else")
    assert len(other.commits) == 2


@pytest.mark.each_value
@pytest.mark.parametrize("revision", [None, "second"])
@pytest.mark.parametrize("exists", [False, True])
def test_two_pushes_at_once_do_not_mix(hub, golden, monkeypatch, revision, exists):
    if exists:
        publish(hub, golden)
        (golden / "README.md").write_text("other\n")
    send = HfApi.upload_folder

    def late(api, **options):
        other = hub.repositories[NAME]
        branch = revision or "main"
        other.commit(branch, other.files(branch) | {"model-2.safetensors": b"of another", "kvconvert.json": b"{}"})
        return send(api, **options)

    monkeypatch.setattr(HfApi, "upload_folder", late)
    arguments = ("push", golden, NAME) if revision is None else ("push", golden, NAME, "--revision", revision)
    assert "somebody else changed it meanwhile" in refusal(1, *arguments)
    assert hub.repositories[NAME].files(revision or "main")["kvconvert.json"] == b"{}"
    monkeypatch.undo()


def test_a_private_push_into_a_public_repository_is_refused(hub, golden):
    publish(hub, golden)
    line = refusal(2, "push", golden, NAME, "--private")
    assert "is public" in line
    assert "--private" in line
    assert len(hub.repositories[NAME].commits) == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_other_bytes_on_the_hub_after_a_push_are_an_error(hub, golden, name):
    hub.alter[name] = b"other"
    with pytest.raises(HubError, match=f"{name} of {NAME} on the Hub differs"):
        upload(open_bundle(golden), NAME)


def test_an_output_that_exists_is_replaced_only_by_force(hub, golden, tmp_path):
    publish(hub, golden)
    assert "--force" in refusal(2, "pull", NAME, "-o", golden)
    (golden / "README.md").write_text("edited")
    assert kvconvert("pull", NAME, "-o", golden, "--force").exit_code == 0
    assert (golden / "README.md").read_text() != "edited"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    assert "not a bundle" in refusal(2, "pull", NAME, "-o", tmp_path / "mine", "--force")


@pytest.mark.parametrize("replaced", [False, True], ids=["moved aside", "not yet removed"])
def test_what_a_pull_that_was_killed_had_set_aside_goes_back_or_goes_away(hub, golden, tmp_path, replaced):
    publish(hub, golden)
    old = Path(shutil.copytree(golden, tmp_path / ".copy.replaced-dead"))
    (old / "README.md").write_text("the old bundle")
    if replaced:
        shutil.copytree(golden, tmp_path / "copy")
    assert "--force" in refusal(2, "pull", NAME, "-o", tmp_path / "copy")
    assert ((tmp_path / "copy" / "README.md").read_text() == "the old bundle") != replaced
    assert kvconvert("pull", NAME, "-o", tmp_path / "copy", "--force").exit_code == 0
    assert not old.exists()
    assert contents(tmp_path / "copy") == contents(golden)


@pytest.mark.parametrize("command", ["inspect", "pull"])
def test_every_error_of_the_client_is_one_sentence(hub, golden, command, monkeypatch, tmp_path):
    monkeypatch.setattr("time.sleep", lambda _: None)
    arguments = [command, NAME] if command == "inspect" else [command, NAME, "-o", tmp_path / "copy"]
    missing = "neither a path somebody/tiny nor a repository" if command == "inspect" else "no somebody/tiny on the Hub"
    assert missing in refusal(1, *arguments)
    hub.repositories[NAME] = Repository()
    hub.repositories[NAME].commit("main", {"config.json": b"{}", "model.safetensors": b"much"})
    assert "is not a kvconvert bundle: it has no kvconvert.json; give another id." in refusal(1, *arguments)
    assert "model.safetensors" not in hub.fetched()
    publish(hub, golden, gated=True)
    assert f"gated: accept its conditions at {hub.endpoint}/{NAME}" in refusal(1, *arguments)
    publish(hub, golden, private=True)
    monkeypatch.setenv("HF_TOKEN", "hf_somebodyElse")
    assert "log in" in refusal(1, *arguments)
    for status, words in ((403, "refuses access"), (429, "too many requests"), (503, "try again later")):
        hub.status = status
        assert words in refusal(1, *arguments)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    template = "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    assert refusal(1, *arguments).endswith("; check the network and run the same command again.")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert refusal(1, *arguments).endswith("; check HF_ENDPOINT and the network and run the same command again.")


def test_pushing_without_a_token_or_with_one_that_may_not_write_is_one_sentence(hub, golden, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_readOnly")
    assert "refuses access" in refusal(1, "push", golden, NAME)
    monkeypatch.delenv("HF_TOKEN")
    assert "`hf auth login`" in refusal(1, "push", golden, NAME)
    assert not hub.repositories


def test_the_token_is_nowhere_in_output_files_or_exceptions(hub, golden, tmp_path, monkeypatch, caplog):
    kvconvert("push", golden, NAME)
    kvconvert("pull", NAME, "-o", tmp_path / "copy")
    hub.status = 403
    with pytest.raises(HubError) as caught:
        upload(open_bundle(golden), NAME)
    assert caught.value.__cause__ is caught.value.__context__ is None  # the client's error holds the request
    seen = "".join(traceback.format_exception(caught.value)) + caplog.text
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\x01")  # no header can hold this, which a message about it would show
    seen += refusal(1, "push", golden, NAME) + refusal(1, "inspect", NAME)
    assert "characters that no token has" in seen
    assert TOKEN not in seen
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (OSError(errno.ENOSPC, "No room"), "(No room); make room or"),
        (PermissionError(errno.EACCES, "Denied", "a", None, "b"), "(b: Denied); make it writable or"),
    ],
)
def test_what_cannot_be_stored_is_no_failure_of_the_hub(hub, golden, tmp_path, monkeypatch, failure, said):
    publish(hub, golden)

    def fail(*_):
        raise failure

    monkeypatch.setattr("kvconvert.bundle.hub._snapshot", fail)
    assert f"{NAME} could not be stored {said}" in refusal(1, "pull", NAME, "-o", tmp_path / "copy")


def test_a_source_that_is_nowhere_names_both_places_in_one_sentence(hub, monkeypatch):
    with pytest.raises(HubError, match=f"neither a path {NAME} nor a repository"):
        open_source(NAME)
    asked = len(hub.requests)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.utils._http._GLOBAL_CLIENT", None)
    with pytest.raises(HubError, match=f"no path {NAME}, and the Hub cannot be asked.*HF_HUB_OFFLINE"):
        open_source(NAME)
    assert len(hub.requests) == asked


@pytest.mark.parametrize("removed", [(), ("kvconvert.json",)])
def test_a_bundle_is_refused_as_a_source_before_its_weights_are_fetched(hub, golden, monkeypatch, tmp_path, removed):
    publish(hub, golden)
    files = hub.repositories[NAME].files()
    hub.repositories[NAME].commit("main", {name: files[name] for name in files.keys() - {*removed}})
    monkeypatch.chdir(tmp_path)
    assert f"{NAME} is a kvconvert bundle, not a model" in refusal(1, "convert", NAME, "copy")
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_inspect_and_report_fetch_no_weights(hub, golden, tmp_path, monkeypatch):
    publish(hub, golden)
    monkeypatch.chdir(tmp_path)
    shown = kvconvert("inspect", NAME).stdout
    assert shown == kvconvert("inspect", golden).stdout
    described = {"kvconvert.json", "config.json", "kvconvert/plan.safetensors"}
    assert set(hub.fetched()) == described
    assert "Wrote tiny-report/report.html" in kvconvert("report", NAME).stdout
    assert len(hub.fetched()) == len(described)
    plan = bytearray(hub.repositories[NAME].files()["kvconvert/plan.safetensors"])
    plan[-1] ^= 1
    publish(hub, golden)
    hub.repositories[NAME].commit("main", hub.repositories[NAME].files() | {"kvconvert/plan.safetensors": bytes(plan)})
    assert "sha256" in refusal(1, "inspect", NAME)


def test_what_looks_like_a_path_never_reaches_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("./a/b", "../a", "/a/b", "~/a", "a/b/", "a\\b", "a/b/c", "missing"):
        with pytest.raises(BundleError, match="there is no such directory"):
            locate(name)
    (tmp_path / "somebody").mkdir()
    with pytest.raises(BundleError, match=f"as somebody is one here, the Hub was not asked.*{NAME}, pull it"):
        locate(NAME)
    with pytest.raises(CheckpointError, match=f"as somebody is a directory here.*hf download {NAME}"):
        open_source(NAME)
    with pytest.raises(CheckpointError, match="There is no model directory gpt2"):
        open_source("gpt2")
    asked = len(hub.requests)
    with pytest.raises(HubError, match="neither a path"):  # recorded with a commit, it can only be an id
        open_source(NAME, was_fetched=True)
    assert len(hub.requests) > asked
    hub.requests.clear()
    (tmp_path / "somebody" / "tiny").mkdir()
    with pytest.raises(BundleError, match="is not a kvconvert bundle: it has no kvconvert"):
        locate(NAME)  # what exists is a path
    assert hub.requests == []
