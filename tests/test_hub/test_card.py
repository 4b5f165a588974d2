"""The card's header is the Hub's, its table is what was measured, and writing that leaves the weights alone."""

import dataclasses
import errno
import json
import os
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from tiny.bundle import reseal, tiny_manifest, tiny_tensors
from transformers import LlamaConfig

from kvconvert.bundle.card import LICENSES, model_card
from kvconvert.bundle.describe import describe
from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.export import described
from kvconvert.errors import BundleError, MissingError, RecipeError, UsageError
from kvconvert.fidelity import evaluate as fidelity
from kvconvert.fidelity.evaluate import evaluate
from kvconvert.fidelity.report import check_recordable, record
from kvconvert.io import disk
from kvconvert.models.source import card_facts

STATED = {"base_model": None, "license": None, "license_name": None, "license_link": None}


def test_the_header_says_what_the_hub_understands():
    manifest = tiny_manifest(tiny_tensors(), {})
    source = manifest.source.model_copy(
        update={"licence": "other", "licence_name": "own", "licence_link": "LICENSE", "language": ["no", "en"]}
    )
    data = manifest.data.model_copy(update={"source": "org/texts:en:train:text"})
    card = ModelCard(
        model_card(manifest.model_copy(update={"source": source, "data": data})), ignore_metadata_errors=False
    )
    assert card.data.to_dict() == {
        "library_name": "kvconvert",
        "pipeline_tag": "text-generation",
        "license": "other",
        "license_name": "own",
        "license_link": "LICENSE",
        "language": ["no", "en"],
        "base_model": "somebody/tiny",
        "base_model_relation": "quantized",
        "datasets": ["org/texts"],
        "tags": ["kvconvert", "awq", "4-bit", "kv-cache-quantization"],
    }
    assert ("license", "other, own") in describe(manifest.model_copy(update={"source": source})).facts
    for words in ("pip install", "kvconvert.runtime.load", "## Recipe", "## Fidelity"):
        assert words in card.text


@pytest.mark.parametrize(
    ("source", "named", "said"),
    [
        ("a.txt", [], "a.txt"),
        ("a.txt=1, b.txt=1, 1 of them random tokens", [], "a.txt, b.txt, 1 of the samples random tokens"),
        ("a.txt=2, b.txt=1", [], "a.txt=2, b.txt=1"),
        ("org/a:en:train:text=3, own.jsonl=1.5", ["org/a"], "org/a:en:train:text=3, own.jsonl=1.5"),
        ("org/a=1, org/b=1, org/a:fr=1", ["org/a", "org/b"], "org/a, org/b, org/a:fr"),
    ],
)
def test_the_card_names_each_data_set_and_weights_that_differ(source, named, said):
    manifest = tiny_manifest(tiny_tensors(), {})
    data = manifest.data.model_copy(update={"source": source})
    card = ModelCard(model_card(manifest.model_copy(update={"data": data})), ignore_metadata_errors=False)
    assert (card.data.to_dict().get("datasets") or []) == named
    assert f" from {said} (seed" in card.text


@pytest.mark.parametrize(
    ("samples", "length", "images", "said"),
    [
        (1, 64, 0, "1 sample of 64 tokens from"),
        (16, 2048, 1, "16 samples of 2,048 tokens with 1 image from"),
        (1000, 64, 2000, "1,000 samples of 64 tokens with 2,000 images from"),
    ],
)
def test_one_of_a_kind_is_no_plural(samples, length, images, said):
    manifest = tiny_manifest(tiny_tensors(), {})
    data = manifest.data.model_copy(update={"samples": samples, "length": length, "images": images})
    assert said in model_card(manifest.model_copy(update={"data": data}))


def test_the_source_s_card_gives_licence_and_languages(tmp_path):
    header = {"license": "other", "license_name": "n", "license_link": "https://l", "language": ["en", "no"]}
    (tmp_path / "README.md").write_text(f"---\n{yaml.safe_dump(header)}---\n# x\n".replace("'no'", "no"))
    facts = {"licence": "other", "licence_name": "n", "licence_link": "https://l", "language": ["en", "no"]}
    assert card_facts(tmp_path) == facts
    (tmp_path / "README.md").write_text("---\nlicense: mit\nlanguage: {a: [}\n---\n")
    assert card_facts(tmp_path) == {"licence": "mit", "licence_name": None, "licence_link": None, "language": []}


@pytest.mark.parametrize(
    "value", ["!!int ''", "!!bool x", "!!timestamp x", "!!float ''", "2024-99-99", "1" + ":59" * 10_000, "[" * 5_000]
)
def test_a_card_with_values_that_are_none_says_its_license_all_the_same(tmp_path, value):
    (tmp_path / "README.md").write_text(f"---\nlicense: mit\na: {value}\nlicense_name: null\n---\n")
    assert card_facts(tmp_path) == {"licence": "mit", "licence_name": None, "licence_link": None, "language": []}


@pytest.mark.parametrize("license", LICENSES)
def test_every_license_of_the_hub_is_read_from_a_card(tmp_path, license):
    (tmp_path / "README.md").write_text(f"---\nlicense: {license}\n---\n")
    assert card_facts(tmp_path)["licence"] == license


@pytest.mark.parametrize("line", ["\n", " \n", "\t\n", "- \n", "---"])
def test_a_card_that_never_ends_its_front_matter_says_nothing(tmp_path, line):
    (tmp_path / "README.md").write_text("---" + line * 200_000)
    assert card_facts(tmp_path).get("licence") is None


def test_what_the_user_says_of_a_local_source_is_recorded():
    source = tiny_manifest(tiny_tensors(), {}).source.model_copy(update={"id": "folder"})
    found = described(source, **STATED | {"base_model": "org/model", "license": "mit"})
    assert (found.id, found.licence, found.config_sha256) == ("org/model", "mit", source.config_sha256)
    for wrong, words in (
        ({"base_model": "./folder"}, "no id on the Hub"),
        ({"license": "a b"}, "identifiers .*give other with"),
        ({"license": "foo"}, "identifiers"),
        ({"license": ""}, "identifiers"),
        ({"license": "Apache 2.0"}, "did you mean apache-2.0"),
        ({"license": "MIT"}, "did you mean mit"),
        ({"license": "llama-3.1"}, "did you mean llama3.1"),
        ({"license": "other"}, "license_name"),
        ({"license_link": "x"}, "other"),
    ):
        with pytest.raises(UsageError, match=words):
            described(source, **STATED | wrong)
    newer = source.model_copy(update={"licence": "newer-1.0"})  # as the source's own card has it
    assert described(newer, **STATED | {"license": "newer-1.0"}).licence == "newer-1.0"
    with pytest.raises(UsageError, match="came from the Hub"):
        described(source.model_copy(update={"revision": "a"}), **STATED | {"base_model": "org/model"})


@dataclasses.dataclass
class Report:
    """As much of a `FidelityReport` as is recorded."""

    files_digest: str
    against: SimpleNamespace = dataclasses.field(
        default_factory=lambda: SimpleNamespace(id="x", is_recorded_source=True)
    )

    prompts: int = 16
    unanswered: int = 0  # prompts of a probe of which the source knows nothing

    def losses(self):
        return ["following chains (10% right, the source 50%)"]

    def to_dict(self):
        text = {"samples": {"source": "novels"}, "scored_tokens": 8192}
        retrieval = {"source": 1.0, "bundle": 1.0, "prompts": self.prompts}
        chains = {"source": 0.0, "bundle": None, "prompts": self.unanswered, "ability": "following chains"}
        return {
            "kl": {"mean": 0.0125, "p99": float("inf")},
            "retrieval": retrieval,
            "probes": {"json": retrieval | {"ability": "looking up"}} | ({"chains": chains} if self.unanswered else {}),
            "text": text,
            "compute_dtype": "float32",
            "device": "cpu",
        }


def test_a_measurement_is_written_into_manifest_and_card_and_weights_are_untouched(golden, caplog):
    before = open_bundle(golden)
    weights = (golden / "model.safetensors").stat()
    (golden / "README.md").write_text(model_card(before.manifest, positions=512))
    check_recordable(golden)
    record(golden, Report(before.manifest.files_digest()))
    assert "loses more than a tenth of what its source can do: following chains (10% right" in caplog.text
    after = open_bundle(golden).manifest
    assert after.fidelity.report["kl"] == {"mean": 0.0125, "p99": None}
    assert after.model_copy(update={"fidelity": None, "manifest_sha256": ""}) == before.manifest.model_copy(
        update={"fidelity": None, "manifest_sha256": ""}
    )
    found = (golden / "model.safetensors").stat()
    assert (found.st_ino, found.st_mtime_ns) == (weights.st_ino, weights.st_mtime_ns)
    card = (golden / "README.md").read_text()
    assert card == model_card(after, positions=512)
    assert "at 512 tokens" in card
    assert "| KL from the source, mean | 0 | 0.0125 |" in card
    assert "8,192 tokens of novels scored, computed in float32 on cpu" in card


@pytest.mark.parametrize("at", range(8))  # manifest and card are created, written, synced, and renamed
def test_a_bundle_stays_whole_wherever_writing_a_measurement_is_killed(golden, monkeypatch, at):
    left, report = [at], Report(open_bundle(golden).manifest.files_digest())

    def observe(operation, path):
        left[0] -= 1
        if left[0] < 0:  # and nothing tidies up
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(disk, "observe", observe)
        with pytest.raises(KeyboardInterrupt):
            record(golden, report)
    open_bundle(golden)
    record(golden, report)


@pytest.mark.parametrize("full", ["kvconvert.json", "README.md"])
def test_a_full_disk_replaces_neither_manifest_nor_card(golden, monkeypatch, full):
    manifest = open_bundle(golden).manifest
    (golden / "README.md").write_text(model_card(manifest))
    before = {path: path.read_bytes() for path in golden.iterdir() if path.is_file()}

    def observe(operation, path):
        if operation == "write" and full in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk, "observe", observe)
    with pytest.raises(OSError, match="No space left on device"):
        record(golden, Report(manifest.files_digest()))
    assert {path: path.read_bytes() for path in golden.iterdir() if path.is_file()} == before


def test_what_one_prompt_found_is_not_sealed(golden, caplog):
    digest = open_bundle(golden).manifest.files_digest()
    record(golden, Report(digest))
    assert "| retrieval | 100% | 100% | 16 prompts |" in (golden / "README.md").read_text()
    assert "fewer than 8 prompts" not in caplog.text
    record(golden, Report(digest, prompts=1))
    report = open_bundle(golden).manifest.fidelity.report
    assert (report["retrieval"], report["probes"], report["kl"]["mean"]) == (None, {}, 0.0125)
    card = (golden / "README.md").read_text()
    assert "retrieval" not in card
    assert "looking up" not in card
    assert "retrieval and the probe json: fewer than 8 prompts show nothing and are not recorded" in caplog.text


def test_what_the_source_cannot_do_is_sealed_after_the_first_of_many_prompts_alone(golden, caplog):
    digest = open_bundle(golden).manifest.files_digest()
    record(golden, Report(digest, unanswered=3))
    assert open_bundle(golden).manifest.fidelity.report["probes"]["chains"]["prompts"] == 3
    record(golden, Report(digest, prompts=2, unanswered=2))
    assert open_bundle(golden).manifest.fidelity.report["probes"] == {}
    record(golden, Report(digest, unanswered=2))
    assert "chains" not in open_bundle(golden).manifest.fidelity.report["probes"]


def test_a_link_in_place_of_the_card_is_replaced_and_not_followed(golden, tmp_path):
    (tmp_path / "secret").write_text("# Mine\n\n## Fidelity\n\nTOP SECRET\n")
    (golden / "README.md").unlink(missing_ok=True)
    (golden / "README.md").symlink_to(tmp_path / "secret")
    record(golden, Report(open_bundle(golden).manifest.files_digest()))
    assert not (golden / "README.md").is_symlink()
    assert (golden / "README.md").read_text() == model_card(open_bundle(golden).manifest, positions=512)
    assert (tmp_path / "secret").read_text().endswith("TOP SECRET\n")


def test_of_a_card_that_was_edited_only_the_table_is_replaced(golden):
    (golden / "README.md").write_text("# Mine\n\n## Fidelity\n\nold\n\n## Thanks\n\nto all\n")
    record(golden, Report(open_bundle(golden).manifest.files_digest()))
    card = (golden / "README.md").read_text()
    assert card.startswith("# Mine\n\n## Fidelity\n\nMeasured on exactly")
    assert card.endswith("\n\n## Thanks\n\nto all\n")
    assert "old" not in card


def test_bytes_of_an_edited_card_that_are_no_text_stay(golden):
    (golden / "README.md").write_bytes(b"caf\xe9\n\n## Fidelity\n\nold\n")
    record(golden, Report(open_bundle(golden).manifest.files_digest()))
    assert (golden / "README.md").read_bytes().startswith(b"caf\xe9\n\n## Fidelity\n\nMeasured on exactly")


def test_a_card_of_any_size_is_not_read_whole(golden):
    os.truncate(golden / "README.md", 2**36)
    with pytest.raises(BundleError, match="more than 256,000,000 bytes, too many for a card; replace it"):
        record(golden, Report(open_bundle(golden).manifest.files_digest()))


def test_figures_of_other_files_or_another_source_are_not_written(golden, tmp_path):
    digest = open_bundle(golden).manifest.files_digest()
    before = {path.name: path.read_bytes() for path in golden.iterdir() if path.is_file()}
    with pytest.raises(BundleError, match="changed while it was measured"):
        record(golden, Report("0" * 64))
    with pytest.raises(UsageError, match="not the checkpoint"):
        record(golden, Report(digest, SimpleNamespace(id="x", is_recorded_source=False)))
    assert before == {path.name: path.read_bytes() for path in golden.iterdir() if path.is_file()}
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "kvconvert.json").symlink_to(golden / "kvconvert.json")
    for place in (tmp_path / "snapshot", "owner/name"):
        with pytest.raises(UsageError, match="`kvconvert pull` it"):
            check_recordable(place)
    assert json.loads((golden / "kvconvert.json").read_text())["fidelity"] is None


def test_a_bundle_that_cannot_be_written_to_is_refused_with_what_helps(golden, monkeypatch):
    monkeypatch.setattr(disk.tempfile, "TemporaryFile", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(MissingError, match="make it writable, or measure a copy of the bundle"):
        check_recordable(golden)


def test_a_source_that_will_not_be_recorded_is_refused_before_it_is_measured(golden, monkeypatch):
    monkeypatch.setattr(fidelity, "load", lambda *args, **kwargs: pytest.fail("the bundle was loaded"))
    other = SimpleNamespace(config_sha256="0" * 64, weights_sha256={})
    checkpoint = SimpleNamespace(id="other", config=LlamaConfig(dtype=torch.float32, vocab_size=256))
    checkpoint.info = lambda progress: other
    monkeypatch.setattr(fidelity, "open_source", lambda *args, **kwargs: checkpoint)
    with pytest.raises(UsageError, match="other is not the checkpoint that"):
        evaluate(golden, "other", for_record=True, device="cpu", progress=False)


@pytest.mark.parametrize("recipe", [{}, {"name": "x"}, {"name": "x", "weights": [], "kv": 1}])
def test_a_bundle_without_a_recipe_is_refused_before_it_is_measured(golden, recipe):
    reseal(golden, recipe=recipe)
    with pytest.raises(RecipeError, match="recorded recipe"):
        check_recordable(golden)
