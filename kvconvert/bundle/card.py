"""The model card, README.md: what is in a bundle, for the people who find it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from kvconvert.bundle.describe import (
    Description,
    data_size,
    data_sources,
    data_text,
    describe,
    printable_manifest,
    smaller,
)
from kvconvert.bundle.figures import HEADER, fidelity_rows, how_measured, text
from kvconvert.bundle.manifest import Manifest
from kvconvert.methods import awq
from kvconvert.tables import markdown_table

CARD_NAME = "README.md"
FIDELITY = "## Fidelity"

_INSTALL = (
    "Install [PyTorch](https://pytorch.org/get-started/locally/), then kvconvert in a clone of its repository "
    "(`pip install .`)."
)
_USE = (
    'model, tokenizer = kvconvert.runtime.load("user/name")  # the id of this repository, or the path of a copy',
    'inputs = tokenizer("Once upon a time", return_tensors="pt")',
    "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
)
_USE_WITH_IMAGES = (
    'model, processor = kvconvert.runtime.load("user/name")  # the id of this repository, or the path of a copy',
    'content = [{"type": "image", "path": "picture.png"}, {"type": "text", "text": "What is it?"}]',
    'messages = [{"role": "user", "content": content}]',
    'options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}',
    "inputs = processor.apply_chat_template(messages, **options).to(model.dtype)",
    "print(processor.decode(model.generate(**inputs, max_new_tokens=64)[0]))",
)
# The Hub's identifiers in 2026 (https://huggingface.co/docs/hub/repositories-licenses); it refuses a card with another.
LICENSES = """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0 cc-by-2.5
    cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0 cc-by-nc-nd-3.0
    cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0 cdla-permissive-1.0
    cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2 agpl-3.0 gfdl gpl gpl-2.0 gpl-3.0
    lgpl lgpl-2.1 lgpl-3.0 isc h-research intel-research lppl-1.3c ms-pl apple-ascl apple-amlr mpl-2.0 odc-by odbl
    openmdw-1.0 openmdw-1.1 openrail++ osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl lgpl-lr
    deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3 llama4
    grok2-community gemma unknown other
""".split()  # noqa: SIM905 (words are easier to read so)


def _supports_images(manifest: Manifest) -> bool:
    """Whether the bundle has a vision tower and the processor that feeds it."""
    has_tower = any("vision" in module.name or "visual" in module.name for module in manifest.modules)
    return has_tower and any(name.endswith("processor_config.json") for name in manifest.files)


def model_card(manifest: Manifest, windows: Sequence[int | None] = (), positions: int | None = None) -> str:
    """README.md with the Hub's YAML header; texts of the manifest are shown, never interpreted.

    Args:
        manifest: the bundle's manifest.
        windows: the sliding window of each layer; empty for a model without any.
        positions: over which the model may attend; None for any number.
    """
    found = describe(manifest, windows, positions)
    manifest = found.manifest
    before = [*_header(manifest), *_introduction(found), *_warning(manifest), *_usage(manifest)]
    about = [*fidelity_section(manifest), *_kv_plan(found), *_coverage(found)]
    return "\n".join([*before, *about, *_recipe(manifest), *_provenance(manifest)])


def _plain(text: str) -> str:
    """Text of the manifest as Markdown that shows it: no emphasis, link, HTML, cell or heading begins in it."""
    escaped = re.sub(r"([\\`*\[\]<>|&~])", r"\\\1", text)
    escaped = re.sub(r"^([#+=-])", r"\\\1", escaped)
    # Before a digit a backslash would be shown, and "0.1.0" begins no list.
    return re.sub(r"^(\d+)([.)])(?!\S)", r"\1\\\2", escaped)


def _code(text: str) -> str:
    """The same as a code span in a table."""
    return f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def _quoted(text: str) -> str:
    """A YAML string, whatever is in it."""
    return json.dumps(text, ensure_ascii=False)


def _header(manifest: Manifest) -> list[str]:
    source = manifest.source
    tags = ["kvconvert"]
    tags += awq.tags(manifest.weights.method, manifest.widths())
    if any(layer.kv for layer in manifest.layers):
        tags.append("kv-cache-quantization")
    task = "image-text-to-text" if _supports_images(manifest) else "text-generation"
    lines = ["---", "library_name: kvconvert", f"pipeline_tag: {task}"]
    if source.licence:
        lines.append(f"license: {_quoted(source.licence)}")
    if source.licence == "other":
        files = [name for name in manifest.informative if name.upper().startswith(("LICENSE", "LICENCE"))]
        link = source.licence_link or next(iter(files), None)
        lines += [f"license_name: {_quoted(source.licence_name)}"] if source.licence_name else []
        lines += [f"license_link: {_quoted(link)}"] if link else []
    if source.language:
        lines += ["language:", *(f"- {_quoted(code)}" for code in source.language)]
    if "/" in source.id:  # a local directory's name would not be a link
        lines += [f"base_model: {_quoted(source.id)}", "base_model_relation: quantized"]
    named = [] if manifest.data is None else data_sources(manifest.data.source)
    # name:config:split:column; local ones have no slash
    if sets := dict.fromkeys(name.partition(":")[0] for name in named if "/" in name):
        lines += ["datasets:", *(f"- {_quoted(name)}" for name in sets)]
    return [*lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""]


def _introduction(found: Description) -> list[str]:
    manifest = found.manifest
    cache = (
        "a calibrated low-bit key-value cache"
        if any(layer.kv for layer in manifest.layers)
        else "the model's own cache"
    )
    return [
        f"# {_plain(manifest.source.id.rsplit('/', 1)[-1])}, converted by kvconvert",
        "",
        f"{_plain(manifest.source.id)} with {awq.describe(manifest.weights.method, manifest.widths())} and {cache}.",
        "",
        *_sizes(found),
    ]


def _sizes(found: Description) -> list[str]:
    """What it saves, in a sentence."""
    weights = f"Its weights take {found.manifest.weights.bits_per_weight:.2f} bits each, embeddings included"
    if found.size is None:
        return [f"{weights}.", ""]
    cache = f"its cache is **{smaller(found.size)} smaller** than in 16 bits at {found.size.context:,} tokens"
    return [f"{weights}; {cache} ({found.size.bits_per_value:.2f} bits per value).", ""]


def _warning(manifest: Manifest) -> list[str]:
    if manifest.fidelity is None or not manifest.fidelity.missed:
        return []
    return [
        "> **This bundle misses the fidelity limits of its own recipe.**",
        *(f"> - {_plain(sentence)}" for sentence in manifest.fidelity.missed),
        "",
    ]


def _usage(manifest: Manifest) -> list[str]:
    lines = [
        "## Use",
        "",
        _INSTALL,
        "",
        "```python",
        "import kvconvert.runtime",
        "",
        *(_USE_WITH_IMAGES if _supports_images(manifest) else _USE),
        "```",
        "",
    ]
    if manifest.widths() == (4,):
        lines += [
            "The weights have the names and the layout of a standard AWQ checkpoint.",
            "`import kvconvert.runtime` has to come before `from_pretrained`: transformers alone asks for gptqmodel,",
            "and with it generates with a full-precision cache.",
            "",
        ]
    return lines


def _coverage(found: Description) -> list[str]:
    rows = [(_code(name), *map(_plain, others)) for name, *others in found.modules.rows]
    return ["## Coverage", "", f"{found.weights}.", "", markdown_table(found.modules.header, rows), ""]


def _kv_plan(found: Description) -> list[str]:
    rows = [(layers, _plain(", ".join(clauses))) for layers, clauses in found.layers]
    lines = ["## Key-value cache", "", f"Size: {found.cache}.", "", markdown_table(("layers", "plan"), rows), ""]
    for sentence in found.cautions:
        lines += [f"> {sentence}", ""]
    return lines


def fidelity_section(manifest: Manifest) -> list[str]:
    """The table of what was measured; begins with its heading."""
    if manifest.fidelity is None:
        return [FIDELITY, "", "Not measured; `kvconvert eval BUNDLE --write` measures it and fills this in.", ""]
    report, limits = manifest.fidelity.report, manifest.fidelity.limits
    rows = [tuple(map(_plain, row)) for row in fidelity_rows(report)]
    fit, how = text(report, "verdict"), how_measured(report)
    bounds = ", ".join(f"{_plain(name)} = {value:g}" for name, value in limits.items())
    outcome = f" Limits of the recipe ({bounds}): {'missed' if manifest.fidelity.missed else 'met'}."
    return [
        FIDELITY,
        "",
        *([f"**{_plain(fit)}**", ""] if fit else []),
        f"Measured on exactly these files{how and f': {_plain(how)}'}.{outcome if bounds else ''}",
        "",
        markdown_table(HEADER, rows),
        "",
    ]


def replace_fidelity(card: str, manifest: Manifest) -> str | None:
    """A card that was edited, with its section about fidelity replaced; None where it has none."""
    lines = card.split("\n")
    if FIDELITY not in lines:
        return None
    start = lines.index(FIDELITY)
    end = next((at for at in range(start + 1, len(lines)) if lines[at].startswith("## ")), len(lines))
    return "\n".join([*lines[:start], *fidelity_section(printable_manifest(manifest)), *lines[end:]])


def _recipe(manifest: Manifest) -> list[str]:
    # Fields without a value say nothing. JSON's own escapes keep markup from ending the block.
    entries = [
        f" {json.dumps(name)}: {json.dumps(value)}"
        for name, value in manifest.recipe.items()
        if value not in (None, [], {})
    ]
    text = re.sub(r"[<>&`]", lambda found: f"\\u{ord(found[0]):04x}", ",\n".join(entries))
    head = "<details><summary>All fields of the recipe, as resolved for this model</summary>"
    return ["## Recipe", "", head, "", "```json", "{", *text.split("\n"), "}", "```", "", "</details>", ""]


def _provenance(manifest: Manifest) -> list[str]:
    source, data = manifest.source, manifest.data
    revision = f" at revision {_plain(source.revision)}" if source.revision else ""
    changes = _plain(", ".join(manifest.transforms)) or "nothing"
    lines = [
        "## Where it comes from",
        "",
        f"- Source: {_plain(source.id)}{revision}, config sha256 {_code(source.config_sha256)}",
        *([f"- Its weights were stored as {_plain(source.stored_as)}"] if source.stored_as else []),
        f"- Recipe: {_plain(str(manifest.recipe.get('name')))}; weights changed by: {changes}",
    ]
    if data is not None:
        given = f"{data_size(data)} from {_plain(data_text(data.source))}"
        hashed = "inputs" if data.images else "token ids"
        lines.append(f"- Calibration: {given} (seed {data.seed}, sha256 of the {hashed} {_code(data.sha256)})")
    lines.append(
        f"- kvconvert {_plain(manifest.kvconvert_version)}, bundle format {manifest.format_version}; see "
        "`kvconvert.json`"
    )
    return [*lines, ""]
