"""`kvconvert report`: the page loads nothing, runs nothing, and shows a bundle's texts as texts."""

import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from click.testing import CliRunner
from test_report.chromium import EXECUTABLE, chromium
from test_report.test_report_data import config, searched_manifest
from tiny.bundle import write_tiny_bundle
from tiny.llama import write_tiny_llama

from kvconvert.bundle.card import model_card
from kvconvert.bundle.manifest import Fidelity
from kvconvert.bundle.reader import open_bundle
from kvconvert.cli import cli
from kvconvert.errors import MissingError, UsageError
from kvconvert.report import figures, render, write_report
from kvconvert.report.data import KeySample, sample_keys

matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install '.[report]'")

HOSTILE = """<script>alert("1")</script>'"><img src=http://x.example/a onerror=alert(1)>\n\r\x1b[2J\u2028&lt;$\\frac$"""
REPORT = {
    "perplexity": {"source": 19.6, "bundle": 20.4, "increase": 0.04},
    "kl": {"mean": 0.03, "p99": 0.4, "mean_interval": [0.02, 0.04]},
    "retrieval": {"source": 1.0, "bundle": 0.5, "by_length": {"256": [1.0, 0.75], "1024": [1.0, 0.25]}},
    "kv": {"bits_per_value": 2.4, "bytes_per_token": 10.0, "source_bytes_per_token": 64.0, "tokens": 4096},
    "text": {"scored_tokens": 100, "samples": {"source": HOSTILE}},
    "compute_dtype": HOSTILE,
    "device": {"not": "text"},
    "top1_agreement": "0.9",
    "verdict": f"Fit for {HOSTILE}",
    "probes": {
        "json": {"ability": "looking up values", "source": 0.9, "bundle": 0.5, "loss_interval": [0.3, 0.5]},
        "code": {"ability": HOSTILE, "source": 0.0, "bundle": None, "loss_interval": None},
        "chains": {"ability": {"not": "text"}, "source": 0.5, "bundle": 0.5},
        HOSTILE: 3,
    },
}


class Page(HTMLParser):
    """What a page consists of."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.ids = [], [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attributes]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag == "svg":
            assert dict(attributes)["role"] == "img"
            assert len(dict(attributes)["aria-label"]) > 20

    def handle_data(self, data):
        self.text.append(data)


def check(html):
    """A page that is safe to open: gives it parsed."""
    page = Page(html)
    assert not {"script", "iframe", "object", "embed", "form", "base", "img"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            assert value.startswith(("#", "data:")), (tag, name, value)
        if name in ("style", "clip-path", "fill", "filter"):
            assert not re.search(r"url\((?!#)", value), value
    assert not re.search(r"@import|url\(", re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1])
    assert len(page.ids) == len(set(page.ids))
    referred = {value[1:] for _, name, value in page.attributes if name.endswith("href") and value.startswith("#")}
    referred |= set(re.findall(r"url\(#([^)]+)\)", html))
    referred |= {value for _, name, value in page.attributes if name == "aria-labelledby"}
    assert referred <= set(page.ids)
    return page


def opened(tmp_path, **changes):
    write_tiny_bundle(tmp_path / "bundle")
    bundle = open_bundle(tmp_path / "bundle")
    return replace(bundle, manifest=searched_manifest().model_copy(update=changes))


def sample(layers=2, tokens=200):
    keys = {i: torch.randn(2, tokens, 16, generator=torch.Generator().manual_seed(i)) for i in range(layers)}
    ranges = {i: torch.rand(3, 2, generator=torch.Generator().manual_seed(i)) for i in range(layers)}
    return KeySample(keys, ranges, HOSTILE, False, HOSTILE)


@pytest.fixture
def no_pictures(monkeypatch):
    """Figures are made, and not drawn, which takes most of the time of a page."""
    monkeypatch.setattr(figures, "svg", lambda figure, name, title: f'<svg role="img" aria-label="{title}"></svg>')
    monkeypatch.setattr(figures, "png", lambda figure: b"")
    monkeypatch.setattr(figures.Figure, "set_layout_engine", lambda *engine, **options: None)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    manifest = searched_manifest()
    allocation = manifest.allocation
    name = {"K2g128s8": HOSTILE}
    layers = [
        layer.model_copy(
            update={
                "keys": name.get(layer.keys, layer.keys),
                "kl": {name.get(key, key): kl for key, kl in layer.kl.items()},
            }
        )
        for layer in allocation.layers
    ]
    candidates = {name.get(key, key): fields for key, fields in allocation.candidates.items()}
    changes = {
        "source": manifest.source.model_copy(update={"id": HOSTILE, "licence": HOSTILE, "revision": HOSTILE}),
        "data": manifest.data.model_copy(update={"source": HOSTILE}),
        "recipe": manifest.recipe | {"name": HOSTILE},
        "transforms": [HOSTILE],
        "kvconvert_version": HOSTILE,
        "layers": [manifest.layers[0].model_copy(update={"reason": HOSTILE}), *manifest.layers[1:]],
        "modules": [
            module.model_copy(update={"name": f"a.{HOSTILE}", "reason": HOSTILE}) for module in manifest.modules
        ],
        "allocation": allocation.model_copy(
            update={
                "layers": layers,
                "candidates": candidates,
                "dtype": HOSTILE,
                "data": allocation.data.model_copy(update={"source": HOSTILE}),
            }
        ),
        "fidelity": Fidelity(measured_on="0" * 64, report=REPORT, limits={}, missed=[HOSTILE]),
    }
    bundle = opened(tmp_path_factory.mktemp("hostile"), **changes)
    return render(bundle, config(), REPORT, [HOSTILE], sample())


def test_nothing_of_a_bundle_is_markup(hostile):
    html, images = hostile
    page = check(html)
    text = "".join(page.text)
    assert '<script>alert("1")</script>' in text  # shown, not run
    assert 'Fit for <script>alert("1")</script>' in text
    assert "looking up values90%50%loses 30 to 50 points" in text
    assert not {"\x1b", "\u2028", "\r"} & set(html)
    assert sorted(images) == [
        "fidelity.png", "frontier.png", "keys.png", "memory.png", "norms.png", "plan.png", "ranges.png",
        "sensitivity.png", "weights.png",
    ]  # fmt: skip
    assert all(content.startswith(b"\x89PNG") for content in images.values())
    assert page.tags.count("svg") == len(images)
    # The colour of ink is the page's; no figure brings one that is invisible in the dark.
    assert "#1f2429" not in html.split("</style>")[1]
    assert "currentColor" in html


@pytest.mark.parametrize("divergence", [0.0, 0.01])
def test_white_fields_are_explained_where_a_map_has_some_and_why_keys_are_rotated(tmp_path, no_pictures, divergence):
    allocation = searched_manifest().allocation
    layers = [
        layer.model_copy(
            update={"kl": {name: max(kl, divergence) for name, kl in layer.kl.items()} | {"K4g128": divergence}}
        )
        for layer in allocation.layers
    ]
    bundle = opened(tmp_path, allocation=allocation.model_copy(update={"layers": layers}))
    text = "".join(check(render(bundle, config(), None, [], sample())[0]).text)
    assert ("White fields have no divergence" in text) == (divergence == 0)
    assert "One rotates even where that alone raises them, because" in text


def test_what_cannot_be_drawn_is_said(tmp_path, no_pictures):
    html, images = render(opened(tmp_path, allocation=None), config())
    text = "".join(check(html).text)
    assert set(images) == {"memory.png", "plan.png", "weights.png"}
    for title in ("Fidelity", "Sensitivity of the layers", "Tau surface", "Token norms", "Budgets of the layers"):
        assert title in text[text.index("Not shown") :]
    assert "--model" in text


def test_the_first_figures_are_what_is_saved_and_whether_the_loss_is_known(tmp_path, no_pictures):
    bundle = opened(tmp_path)
    saved = re.search(r"its cache is \*\*(.+) smaller\*\*", model_card(bundle.manifest))[1]
    for fidelity, loss in ((None, "<b>not measured</b>"), (REPORT, "<b>0.03</b>")):
        tiles = re.search(r'<ul class="tiles">.*?</ul>', render(bundle, config(), fidelity)[0])[0]
        assert f"<b>{saved}</b><span>smaller cache at 1,000 tokens: " in tiles
        assert loss in tiles
        assert ("not measured" in tiles) == (fidelity is None)


def test_the_bundle_stays_as_it_is_and_an_earlier_report_is_replaced(tmp_path):
    bundle = tmp_path / "bundle"
    manifest = write_tiny_bundle(bundle)
    before = {path: path.read_bytes() for path in sorted(bundle.rglob("*")) if path.is_file()}
    (tmp_path / "bundle-report").mkdir()
    (tmp_path / "bundle-report" / "tau.png").write_text("old")
    (tmp_path / "bundle-report" / "mine.txt").write_text("kept")
    measured = tmp_path / "eval.json"
    measured.write_text(json.dumps(REPORT | {"files_digest": manifest.files_digest()}))
    result = CliRunner().invoke(cli, ["report", str(bundle), "--fidelity", str(measured)])
    assert result.exit_code == 0, result.output
    written = tmp_path / "bundle-report"
    assert result.output == f"Wrote {written / 'report.html'}\n"
    names = {path.name for path in written.iterdir()}
    assert names == {"report.html", "fidelity.png", "memory.png", "weights.png", "mine.txt"}
    assert "20.40" in "".join(check((written / "report.html").read_text()).text)
    assert {path: path.read_bytes() for path in sorted(bundle.rglob("*")) if path.is_file()} == before


def test_what_is_refused(tmp_path, monkeypatch):
    bundle = tmp_path / "bundle"
    write_tiny_bundle(bundle)
    with pytest.raises(UsageError, match="stays as it was sealed"):
        write_report(bundle, bundle / "figures")
    with pytest.raises(UsageError, match=r"x\.html, and a report is a directory of"):
        write_report(bundle, tmp_path / "x.html")
    assert not (tmp_path / "x.html").exists()
    (tmp_path / "figures" / "report.html").mkdir(parents=True)
    with pytest.raises(MissingError, match=r"cannot be written to \S+/figures \(Is a directory\); make room"):
        write_report(bundle, tmp_path / "figures")
    other = tmp_path / "eval.json"
    for content in (json.dumps(REPORT), "[]", "{"):
        other.write_text(content)
        with pytest.raises(UsageError, match=r"kvconvert eval"):
            write_report(bundle, fidelity=other)
    with pytest.raises(UsageError) as refused:
        write_report(bundle, fidelity=other)
    assert str(refused.value).count(";") == 1, "one thing to do"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(cli, ["report", str(bundle)])
    assert result.exit_code == 1
    assert "pip install '.[report]'" in result.output
    assert not (tmp_path / "bundle-report").exists()


def test_keys_are_those_that_attention_computes_on(tmp_path):
    write_tiny_bundle(tmp_path / "bundle")
    manifest = searched_manifest()
    source = write_tiny_llama(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    own = model.config
    layers = [
        manifest.layers[0].model_copy(
            update={"index": i, "head_dim": own.head_dim, "num_key_value_heads": own.num_key_value_heads}
        )
        for i in range(own.num_hidden_layers)
    ]
    manifest = manifest.model_copy(update={"layers": layers})
    found = sample_keys(str(source), manifest, tokens=40)
    from kvconvert.data.sources import EVALUATION
    from kvconvert.data.text import load_token_samples
    from kvconvert.models.processors import load_tokenizer

    ids = load_token_samples(EVALUATION, load_tokenizer(source), 1, 40, 0).ids
    cache = model(ids, use_cache=True).past_key_values
    for index, keys in found.keys.items():
        torch.testing.assert_close(keys.float(), cache.layers[index].keys[0].float(), rtol=1e-3, atol=1e-3)
    assert len(found.keys) == own.num_hidden_layers
    with pytest.raises(UsageError, match="layers"):
        sample_keys(str(source), manifest.model_copy(update={"layers": layers[:1]}), tokens=40)


# Of a model of 5 million parameters.
FIDELITY_ROWS = (
    '<tr><th>KL, 99% and 99.9% of tokens below<td class="n">0<td class="n">0.05593, 0.1023<td>'
    '<tr><th>weights, bytes<td class="n">11,540,992<td class="n">4,831,744<td>6.70 bits of attended tokens'
)


@pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
def test_a_browser_has_nothing_to_complain_of(hostile, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(hostile[0], encoding="utf8")
    with chromium(tmp_path / "profile") as browser:
        colours = {}
        for width, scheme in ((390, "light"), (390, "dark"), (1200, "light")):
            browser.open(page, width, scheme)
            assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
            bundle = "document.querySelector('section[aria-labelledby=fidelity] tr td:nth-child(3)')"
            assert browser.evaluate(f"{bundle}.getBoundingClientRect().right") <= width
            assert browser.evaluate("document.querySelectorAll('svg').length") == len(hostile[1])
            ink = "getComputedStyle(document.querySelector('svg text')).fill"
            colours[scheme] = browser.evaluate(ink), browser.evaluate("getComputedStyle(document.body).backgroundColor")
        browser.open(page, 420)
        table = "document.querySelector('section[aria-labelledby=fidelity] .table')"
        browser.evaluate(f"{table}.querySelector('tbody').innerHTML = {json.dumps(FIDELITY_ROWS)}")
        assert browser.evaluate(f"{table}.scrollWidth - {table}.clientWidth") == 0
        assert colours["light"][0] != colours["dark"][0]
        assert colours["light"][1] != colours["dark"][1]
        assert browser.console == []
        assert {url.partition(":")[0] for url in browser.requests} <= {"file", "data"}
        assert {url for url in browser.requests if url.startswith("file")} == {page.resolve().as_uri()}
