"""`make site`: every page is found from every other, the reference has every public name, and browsers show it."""

import functools
import http.server
import inspect
import re
import subprocess
import threading
from pathlib import Path

import pytest
import site_docs
import yaml
from test_documents_run import DOCUMENTS
from test_report.chromium import EXECUTABLE, chromium

import kvconvert
import kvconvert.runtime

ROOT = Path(__file__).resolve().parent.parent
SHOWN = ("", "docs/quickstart/", "docs/choosing/", "docs/bundle/", "reference/kvconvert/", "benchmarks/RESULTS/")


def pages(nav):
    for entry in nav:
        for what in entry.values() if isinstance(entry, dict) else [entry]:
            yield from pages(what) if isinstance(what, list) else [what]


def test_every_page_is_in_the_navigation_once():
    nav = [*pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf8"))["nav"])]
    files = {path.relative_to(ROOT).as_posix() for pattern in site_docs.PAGES for path in ROOT.glob(pattern)}
    assert {*DOCUMENTS} <= files
    assert sorted(nav) == sorted([*files, *site_docs.REFERENCE])


def test_the_overviews_picture_is_of_the_sites_color_scheme_not_of_the_systems():
    (picture,) = site_docs.PICTURE.findall((ROOT / "README.md").read_text("utf8"))
    shown = site_docs.on_page_content(picture)
    assert "prefers-color-scheme" in picture
    assert "prefers-color-scheme" not in shown
    for scheme in ("light", "dark"):
        wide, narrow = f"docs/overview-{scheme}.svg", f"docs/overview-narrow-{scheme}.svg"
        assert re.findall(rf'"(\S+)#only-{scheme}"', shown) == [narrow, wide]
        assert re.search(rf'<img[^>]* src="{wide}#only-{scheme}">', shown)


@pytest.mark.parametrize("package", [kvconvert, kvconvert.runtime], ids=lambda package: package.__name__)
def test_the_reference_has_every_public_name_and_its_arguments(package):
    (file,) = (file for name, file in site_docs.REFERENCE.values() if name == package.__name__)
    names = site_docs.public_names(file)
    assert names == [name for name in package.__all__ if not name.startswith("_")]
    assert all(f"::: {package.__name__}.{name}\n" in site_docs.reference(package.__name__, file) for name in names)
    for name in names:
        shown = getattr(package, name)
        described = re.search(r"^ *Args:\n((?: +.*\n|\n)*?)(?=^ *[A-Z]\w+:\n|\Z)", shown.__doc__ + "\n", re.MULTILINE)
        if described is None:
            continue
        indent = re.match(" +", described[1])[0]
        arguments = re.findall(rf"^{indent}(\S.*?):", described[1], re.MULTILINE)
        given = inspect.signature(shown.__init__ if inspect.isclass(shown) else shown).parameters
        assert {*arguments} <= {*given}, name


@pytest.mark.full
@pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium here")
def test_the_site_is_built_strictly_and_shown_without_errors_or_other_hosts(tmp_path):
    built = subprocess.run(["make", "site"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=ROOT / "build" / "site")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium(tmp_path) as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        for page in SHOWN:
            for width in (1400, 420):
                browser.open(address + page, width)
                assert browser.evaluate("document.documentElement.scrollWidth") <= width, (page, width)
                assert browser.evaluate("document.querySelectorAll('nav a').length") > 20
        server.shutdown()
    assert not browser.console
    assert not [url for url in browser.requests if not url.startswith((address, "data:"))]
