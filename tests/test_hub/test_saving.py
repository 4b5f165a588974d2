"""`save_pretrained` and `push_to_hub` of a loaded bundle: its own files, or a sentence."""

import shutil

import pytest
from test_push_pull import NAME, contents

from kvconvert import export
from kvconvert.errors import BundleError, KvconvertError, UsageError
from kvconvert.runtime import load


def test_save_pretrained_copies_the_bundle_and_push_to_hub_uploads_it(hub, golden, tmp_path):
    model, _ = load(golden, verify="headers")
    (golden / "notes.txt").write_text("mine")
    model.save_pretrained(tmp_path / "copy")
    assert contents(tmp_path / "copy") == {k: v for k, v in contents(golden).items() if k != "notes.txt"}
    model.save_pretrained(golden)  # it is there already
    model.save_pretrained(tmp_path / "copy")  # an earlier one is replaced
    load(tmp_path / "copy")
    model.push_to_hub(NAME, private=True)
    assert hub.repositories[NAME].private
    sent = hub.repositories[NAME].files()
    assert {name: sent[name] for name in sent if name != ".gitattributes"} == contents(tmp_path / "copy")


def test_what_a_copy_cannot_do_is_refused_and_nothing_is_written(hub, golden, tmp_path):
    model, _ = load(golden, verify="headers")
    target = tmp_path / "copy"
    for options in ({"push_to_hub": True}, {"state_dict": {}}, {"max_shard_size": "1GB"}, {"variant": "x"}):
        with pytest.raises(UsageError, match=next(iter(options))):
            model.save_pretrained(target, **options)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for place, reason in ((tmp_path / ("s" * 300), "name"), (tmp_path / "loop", "link")):
        with pytest.raises(UsageError, match=reason):
            model.save_pretrained(place)
    (tmp_path / "loop").unlink()
    with pytest.raises(KvconvertError, match="sss"):
        export(tmp_path / ("s" * 300), target)
    with pytest.raises(UsageError, match="`kvconvert push`"):
        model.push_to_hub(NAME, create_pr=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(UsageError, match="not a bundle"):
        model.save_pretrained(tmp_path / "mine")
    weights = golden / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    for save in (lambda: model.save_pretrained(target), lambda: model.push_to_hub(NAME)):
        with pytest.raises(BundleError, match="sha256"):
            save()
    shutil.rmtree(golden)
    with pytest.raises(BundleError, match="is not a kvconvert bundle"):
        model.save_pretrained(target)
    assert not target.exists()
    assert hub.requests == []
