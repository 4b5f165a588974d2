"""No statement of a manifest stands alone: what follows from the bundle is compared with it, the rest is named here."""

import copy
import json
import re

import pytest
from click.testing import CliRunner
from fuzzing import MEASURED
from tiny.bundle import refusal, reseal, write_tiny_bundle

from kvconvert.bundle.describe import check_cache_size
from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import Manifest
from kvconvert.bundle.reader import open_bundle
from kvconvert.cli import cli
from kvconvert.errors import BundleError

# Where a bundle comes from, what was measured, and words: nothing in a bundle could say that they are otherwise.
AUTHORS_WORD = (
    r"kvconvert_version|versions\..*|source\..*|data\..*|recipe\..*",
    r"transforms\.1|conventions\..*",
    r"layers\.\d+\.num_key_value_heads",  # compared with the model that is built (`check_fits`)
    r"layers\.\d+\.(kv|statistics|reason).*|modules\.\d+\.reason",
    r"modules\.\d+\.(stored_name|kind)",  # which config.json repeats where engines need it, or tensors have to match
    r"(weight_)?allocation\.(measured_kl|plans|allocations|dtype|data\..*)",
    r"allocation\.(context|budget_bytes_per_token|candidates.*|layers\.\d+\.(clip_ratios|treatments).*)",
    r"allocation\.layers\.\d+\.index|allocation\.(bits_per_value|bytes_per_token)",  # `check_cache_size`
    r"weight_allocation\.(budget_bits_per_weight|units\.\d+\.(layer|kl\.2))",
    r"fidelity\.report.*|fidelity\.missed\.0",
)
SEALED_ELSEWHERE = r"(files|tensors|plan|informative|manifest_sha256|format_version).*"  # other tests of this folder


def leaves(value, at=()):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from leaves(entry, (*at, key))
    if not isinstance(value, dict | list):
        yield at, value


def changed_at(fields, keys, value):
    """A copy of the fields with another value in one place."""
    changed = copy.deepcopy(fields)
    *parents, last = keys
    entry = changed
    for key in parents:
        entry = entry[key]
    entry[last] = value
    return changed


def another(value):
    """Other values of the same type; one that is absent becomes a text or a number."""
    if isinstance(value, str):
        return [value[:-1] + ("0" if value[-1:] != "0" else "1"), value + "x"]
    return [value + 1] if isinstance(value, int | float) else ["sylvester(8)", 8]


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    directory = tmp_path_factory.mktemp("measured") / "bundle"
    manifest = write_tiny_bundle(directory)
    said = copy.deepcopy(MEASURED)
    said["fidelity"]["measured_on"] = manifest.files_digest()
    reseal(directory, **said)
    open_bundle(directory)
    return directory


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.full)])
def test_every_statement_that_follows_from_the_bundle_is_compared_with_it(measured, count):
    fields = json.loads((measured / MANIFEST_NAME).read_text())
    accepted, refused = [], []
    for keys, value in leaves(fields):
        path, results = ".".join(map(str, keys)), []
        for change in () if re.fullmatch(SEALED_ELSEWHERE, path) else another(value)[:count]:
            reseal(measured, **changed_at(fields, keys, change))
            try:
                open_bundle(measured, verify="headers")
                results.append(True)
            except BundleError:
                results.append(False)
        (accepted if any(results) else refused).append(path)
    reseal(measured, **fields)
    word = re.compile("|".join(AUTHORS_WORD))
    assert [path for path in accepted if not word.fullmatch(path)] == []
    assert len(refused) > 100


@pytest.mark.each_value
@pytest.mark.parametrize("verify", ["full", "headers", "plan"])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("weights.bits_per_weight", 1.0),
        ("weights.bytes", 1),
        ("weights.quantized_bits_per_weight", 1.0),
        ("layers.1.rotation", "paley(12) x sylvester(4)"),
        ("layers.0.value_rotation", "sylvester(16)"),
        ("conventions.rotation", {"matrix": {"16": "sylvester(8)"}}),
        ("transforms", ["quantize_weights"]),
        ("modules.4.in_features", 5),
        ("modules.5.bits", 4),
        ("weight_allocation.units.0.bits", 2),
        ("weight_allocation.bits_per_weight", 2.0),
        ("weight_allocation.units.0.linears", ["model.layers.0.q_proj", "model.layers.0.q_proj"]),
        ("allocation.layers.0.keys", "V2g128s8"),
        ("allocation.candidates.K2g128s8.key_bits", 4),
        ("allocation.layers", []),
        ("fidelity.missed", []),
        ("fidelity.limits", {}),
        ("fidelity.report.weights", {"bytes": 7}),
    ],
)
def test_a_manifest_sealed_again_with_a_false_statement_is_refused(measured, field, value, verify):
    before = json.loads((measured / MANIFEST_NAME).read_text())
    keys = [int(key) if key.isdecimal() else key for key in field.split(".")]
    reseal(measured, **changed_at(before, keys, value))
    message = refusal(measured, verify)
    reseal(measured, **before)
    assert MANIFEST_NAME in message
    assert field.split(".")[0] in message


def test_tensors_of_any_size_that_only_a_manifest_states_are_one_sentence(measured):
    before = json.loads((measured / MANIFEST_NAME).read_text())
    huge = {"dtype": "F32", "shape": [2**56] * 16}
    reseal(measured, tensors=before["tensors"] | {"model.norm.weight": huge})
    message = refusal(measured, "plan")
    reseal(measured, **before)
    assert "model.norm" in message or "weights.bytes" in message


def test_the_size_of_the_cache_that_a_search_states_is_that_of_its_schemes(measured):
    fields = json.loads((measured / MANIFEST_NAME).read_text())
    told = fields["allocation"]
    check_cache_size(Manifest(**fields), ())
    for name in ("bits_per_value", "bytes_per_token"):
        false = Manifest(**fields | {"allocation": told | {name: told[name] / 2}})
        with pytest.raises(BundleError, match=f"allocation.{name}"):
            check_cache_size(false, ())


def test_inspect_asks_transformers_for_nothing_that_config_json_says(measured, monkeypatch):
    monkeypatch.setattr("kvconvert.models.configuration.read_config", lambda *_: pytest.fail("transformers was asked"))
    assert CliRunner().invoke(cli, ["inspect", str(measured)]).exit_code == 0


@pytest.mark.parametrize("command", [["inspect"], ["inspect", "--json"], ["report"]], ids=" ".join)
def test_no_command_shows_a_search_that_states_another_size_of_the_cache(measured, command):
    before = json.loads((measured / MANIFEST_NAME).read_text())
    reseal(measured, **changed_at(before, ["allocation", "bits_per_value"], 1.0))
    result = CliRunner().invoke(cli, [*command, str(measured)])
    reseal(measured, **before)
    assert result.exit_code == 1
    assert "allocation.bits_per_value should be 3.95877" in result.output
