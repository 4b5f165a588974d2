"""The page at `/` of `kvconvert serve`: it talks to its own server alone, and says what the bundle is."""

import base64
import contextlib
import hashlib
import re
import threading

import pytest
import torch
from fake_model import FakeModel
from serving import Letters, serving, wait_for
from test_report.chromium import EXECUTABLE, chromium
from test_serve_tools import Scripted, Templated

from kvconvert import load
from kvconvert.serve.access import Hosts
from kvconvert.serve.page import BundleFacts
from kvconvert.serve.requests import Limits


@pytest.fixture(scope="module")
def bundle(converted):
    return converted / "bundle"


@pytest.fixture(scope="module")
def here(bundle):
    model, tokenizer = load(bundle, dtype=torch.float32)
    facts = BundleFacts.of(str(bundle), model.config)
    with serving(model, tokenizer, of_service={"facts": facts}) as here:
        yield here


def opened(here, path="/", headers=None):
    connection, response = here.open(path, headers=headers)
    with contextlib.closing(connection):
        return response.status, response.headers, response.read().decode()


def test_the_page_may_do_nothing_but_talk_to_its_server(here):
    status, headers, text = opened(here)
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        (content,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert not re.findall(r"https?://|innerHTML|\bstyle=|\bon\w+=|<(?:script|link|img)[^>]* src", text)


def test_it_is_told_what_the_bundle_is_and_what_its_cache_takes(here):
    status, _, told = here.ask("/v1/bundle?tokens=1000")
    assert status == 200
    assert told["chat"] is False
    facts = dict(map(tuple, told["facts"]))
    assert {"source", "weights", "cache"} <= set(facts)
    assert 2 < told["cache"]["plain_bytes"] / told["cache"]["bytes"] < 16
    assert here.ask("/v1/bundle")[2]["cache"] is None
    for wrong in ("x", "-1", "9" * 30, "%C2%B2"):
        assert here.ask(f"/v1/bundle?tokens={wrong}")[0] == 400


def test_the_servers_own_page_may_ask_and_no_other(here):
    own = {"Origin": f"http://127.0.0.1:{here.port}"}
    assert here.ask(body={"prompt": "x", "max_tokens": 1}, headers=own)[0] == 200
    for origin in ("http://127.0.0.1:1", "http://evil.example", "null"):
        assert here.ask(body={"prompt": "x", "max_tokens": 1}, headers={"Origin": origin})[0] == 403
    # Where any name is allowed, another site's page may have made its name this server's.
    with serving(FakeModel(), Letters(), of_service={"hosts": Hosts(frozenset({"*"}))}) as any_name:
        other = {"Host": "evil.example", "Origin": "http://evil.example"}
        assert any_name.ask(body={"prompt": "x"}, headers=other)[0] == 403


def test_a_server_may_have_no_page():
    with serving(FakeModel(), Letters()) as bare:
        assert opened(bare)[0] == opened(bare, "/v1/bundle")[0] == 404


def test_with_keys_the_page_is_shown_and_tells_nothing(bundle):
    with serving(FakeModel(), Letters(), keys=["secret"], of_service={"facts": BundleFacts()}) as keyed:
        assert opened(keyed)[0] == 200
        assert opened(keyed, "/v1/bundle")[0] == 401
        assert opened(keyed, "/v1/bundle", {"Authorization": "Bearer secret"})[0] == 200


def shown(browser, condition):
    """Wait until a JavaScript expression is true."""
    wait_for(lambda: browser.evaluate(condition))


@pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
def test_the_page_continues_a_text_where_the_server_generates_few_tokens(tmp_path):
    with (
        serving(FakeModel(), Letters(), limits=Limits(new_tokens=5), of_service={"facts": BundleFacts()}) as few,
        chromium(tmp_path / "profile") as browser,
    ):
        browser.open(f"http://127.0.0.1:{few.port}/", 1400, "light")
        browser.call("Input.insertText", text="hello")
        browser.press("Enter")
        shown(browser, "document.querySelector('.turn.assistant')?.textContent.trim().length >= 4")


@pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
def test_the_page_asks_a_person_for_the_key(tmp_path):
    with (
        serving(FakeModel(), Letters(), keys=["secret"], of_service={"facts": BundleFacts()}) as keyed,
        chromium(tmp_path / "profile") as browser,
    ):
        browser.open(f"http://127.0.0.1:{keyed.port}/", 420, "light")
        wrong = "[...document.querySelectorAll('.wrong')].map(turn => turn.textContent).join()"
        shown(browser, f"{wrong} == 'This server asks for an API key: enter it below.'")
        for typed, told in (("secre", "The server does not accept this key."), ("t", "")):
            assert browser.evaluate("document.activeElement.id") == "key"
            browser.call("Input.insertText", text=typed)
            browser.press("Enter")
            shown(browser, f"{wrong} == {told!r}")
        shown(browser, "document.getElementById('key-form').hidden")
        assert browser.evaluate("document.activeElement.id") == "text"


@pytest.mark.skipif(EXECUTABLE is None, reason="Chromium is not installed")
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (420, "dark")])
def test_a_browser_holds_a_conversation_by_keyboard(bundle, tmp_path, width, scheme):
    model = Scripted(max_positions=10_000)
    model.says = "<think>I count.</think>" + "Some words. " * 30
    facts, limits = BundleFacts.of(str(bundle), load(bundle)[0].config), Limits(new_tokens=500)
    with (
        serving(model, Templated(), limits=limits, of_service={"facts": facts}) as here,
        chromium(tmp_path / "profile") as browser,
    ):
        address = f"http://127.0.0.1:{here.port}/"
        browser.open(address, width, scheme)
        shown(browser, "document.getElementById('facts').children.length > 4")
        assert browser.evaluate("document.activeElement.id") == "text"
        assert browser.evaluate("document.getElementById('cache').textContent") == "No tokens yet."
        browser.call("Input.insertText", text="Hello")
        browser.press("Enter")
        shown(browser, "document.getElementById('cache').textContent.includes('16 bits would take')")
        shown(browser, "document.getElementById('stop').hidden")
        turns = "[...document.querySelectorAll('.turn')].map(turn => turn.textContent.trim())"
        assert browser.evaluate(turns) == ["Hello", "I count.", ("Some words. " * 30).strip()]
        assert "tokens per second" in browser.evaluate("document.getElementById('speed').textContent")
        # Escape ends an answer, and the model with it.
        gate = threading.Event()
        model.before_pass = lambda: gate.wait(0.1) and None
        browser.call("Input.insertText", text="Again")
        browser.press("Enter")
        shown(browser, "document.querySelectorAll('.turn.assistant').length == 2")
        # What the cache takes is told while an answer comes, and of one that was stopped.
        cache = "document.getElementById('cache').textContent"
        for _ in range(2):
            before = browser.evaluate(cache)
            shown(browser, f"{cache} != {before!r}")
            assert not browser.evaluate("document.getElementById('stop').hidden")
        browser.press("Escape")
        shown(browser, "document.getElementById('stop').hidden")
        assert "16 bits would take" in browser.evaluate(cache)
        gate.set()
        wait_for(lambda: here.service.metrics.gone == 1)
        here.idle()
        # An answer belongs to its own conversation, also where another one is begun before it is over.
        kept = "JSON.parse(localStorage.getItem('kvconvert-conversations')).map(each => each.turns.map(t => t.role))"
        assert browser.evaluate(kept) == [["user", "assistant"] * 2]
        gate.clear()
        browser.call("Input.insertText", text="More")
        browser.press("Enter")
        shown(browser, "document.querySelectorAll('.turn.assistant').length == 3")
        browser.evaluate("document.getElementById('new').click()")
        shown(browser, "document.getElementById('stop').hidden")
        gate.set()
        assert browser.evaluate(kept) == [["user", "assistant"] * 3]
        assert browser.evaluate(turns) == []
        assert browser.evaluate(cache) == "No tokens yet."
        wait_for(lambda: here.service.metrics.gone == 2)
        # An answer that is cut says so.
        model.says = "x" * 600
        browser.call("Input.insertText", text="Long")
        browser.press("Enter")
        shown(browser, f"({turns}).at(-1) == 'Ended at 500 tokens, the most that an answer may have.'")
        # All of it is in the history, also after loading the page again.
        browser.open(address, width, scheme)
        shown(browser, "document.getElementById('history').options.length == 3")
        assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
        dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"
        assert dark == (scheme == "dark")
        assert browser.console == []
        assert {url.partition("//")[2].partition("/")[0] for url in browser.requests} == {f"127.0.0.1:{here.port}"}
