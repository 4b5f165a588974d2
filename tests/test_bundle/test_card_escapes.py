"""What a bundle says of itself is shown in its card and on the terminal, and never interpreted."""

import yaml
from tiny.bundle import tiny_manifest, tiny_tensors

from kvconvert.bundle.card import model_card
from kvconvert.bundle.describe import manifest_text
from kvconvert.bundle.manifest import Fidelity
from kvconvert.io.tensorheader import mismatch

HOSTILE = (
    "a/b\n---\n# x\r| y | `z` <script>alert(1)</script> [t](javascript:1) ![i](http://x) **b** \x1b[2J\u2028"
    '"q": &lt; ~~s~~'
)

REPORT = {"verdict": HOSTILE, "probes": {"json": {"ability": HOSTILE, "source": 0.9, "bundle": 0.5}}}


def hostile_manifest():
    manifest = tiny_manifest(tiny_tensors(), {})
    layer = manifest.layers[0].model_copy(update={"reason": HOSTILE})
    return manifest.model_copy(
        update={
            "source": manifest.source.model_copy(
                update=dict.fromkeys(("id", "licence", "revision"), HOSTILE) | {"language": [HOSTILE]}
            ),
            "data": manifest.data.model_copy(update={"source": HOSTILE, "sha256": HOSTILE}),
            "recipe": {"name": HOSTILE},
            "transforms": [HOSTILE],
            "kvconvert_version": HOSTILE,
            "layers": [layer, *manifest.layers[1:]],
            "modules": [
                module.model_copy(update={"name": HOSTILE, "reason": HOSTILE}) if module.method == "kept" else module
                for module in manifest.modules
            ],
            "fidelity": Fidelity(measured_on="0" * 64, report=REPORT, limits={HOSTILE: 1.0}, missed=[HOSTILE]),
        }
    )


def test_nothing_of_the_manifest_is_markup_in_the_card():
    card, benign = model_card(hostile_manifest()), model_card(tiny_manifest(tiny_tensors(), {}))
    front, body = card.split("\n---\n", 1)
    header = yaml.safe_load(front.removeprefix("---\n"))
    assert header["library_name"] == "kvconvert"
    assert header["base_model"].startswith("a/b\\n---\\n# x")
    assert header.keys() == {
        *yaml.safe_load(benign.split("\n---\n", 1)[0].removeprefix("---\n")),
        "license",
        "language",
        "datasets",
    }
    for markup in ("<script", "[t](", "![i]", "**b**", "~~s~~", "\x1b", "\u2028", "&lt;"):
        assert not [
            at
            for at in range(len(body))
            if body.startswith(markup, at) and body[at - 1] != "\\" and not in_code(body, at)
        ], markup
    assert not any(line.strip() == "---" for line in body.splitlines())
    cells = {line.replace("\\|", "").count("|") for line in body.splitlines() if line.startswith("| ")}
    assert cells <= {3, 5}


def test_the_card_says_what_the_bundle_is_fit_for_and_what_each_probe_found():
    probe = {"ability": "looking up values", "source": 0.9, "bundle": 0.5}
    report = {"verdict": "Not fit for looking up values (keeps 55%).", "probes": {"json": probe, "code": {"source": 1}}}
    fidelity = Fidelity(measured_on="0" * 64, report=report, limits={})
    manifest = tiny_manifest(tiny_tensors(), {}).model_copy(update={"fidelity": fidelity})
    card = model_card(manifest)
    assert "Fidelity: Not fit for looking up values (keeps 55%)." in manifest_text(manifest)
    assert "\n**Not fit for looking up values (keeps 55%).**\n" in card
    assert "| looking up values | 90% | 50% |" in card
    assert "code" not in card.split("## Fidelity")[1].split("## Key-value cache")[0]


def in_code(text, at):
    if text[:at].count("\n```") % 2:  # a fenced block, in which nothing but a fence at a line's beginning is markup
        return not text.startswith(("<", "`"), at)
    line = text[text.rfind("\n", 0, at) + 1 : at]
    return line.replace("\\`", "").count("`") % 2 == 1


def test_nothing_of_the_manifest_reaches_the_terminal_as_a_command_or_a_line():
    text = manifest_text(hostile_manifest())
    assert "\x1b" not in text
    assert "\u2028" not in text
    assert "---" not in text.splitlines()
    message = str(mismatch("x\n\x1b[2J", "y\r", "z\0", "w" * 10_000))
    assert message.isprintable()
    assert len(message) < 2000


def test_a_version_is_shown_without_a_backslash_and_a_number_begins_no_list():
    manifest = tiny_manifest(tiny_tensors(), {})
    card = model_card(manifest.model_copy(update={"kvconvert_version": "0.1.0"}))
    assert "- kvconvert 0.1.0, bundle format" in card
    listed = model_card(manifest.model_copy(update={"kvconvert_version": "7. Buy this"}))
    assert r"- kvconvert 7\. Buy this, bundle format" in listed
