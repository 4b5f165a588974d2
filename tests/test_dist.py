"""What `make dist` builds: the files that git has, and no others; README's lines run with it in `make test-readme`."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet

import kvconvert

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kvconvert", "calibration", "kernels", "runtime")
REPOSITORY = "https://code.example/somebody/kvconvert"


def tracked(*paths):
    listed = subprocess.run(["git", "ls-files", "-z", "--", *paths], cwd=ROOT, check=True, capture_output=True)
    return [name for name in listed.stdout.decode().split("\0") if name and os.path.lexists(ROOT / name)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The names in the source distribution and in the wheel, and the wheel's metadata."""
    checkout, out = (tmp_path_factory.mktemp(name) for name in ("checkout", "out"))
    for name in tracked(*ROOMS, "src", "*.toml", "*.in", "*.md", "LICENSE", "setup.py", "tests/test_dist.py"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, checkout / name, follow_symlinks=False)
    code = f"from setuptools import build_meta as b; b.build_sdist({str(out)!r}); b.build_wheel({str(out)!r})"
    environment = {**os.environ, "KVCONVERT_REPOSITORY": REPOSITORY}
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (source,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    with tarfile.open(source) as archive:
        sources = {member.name.partition("/")[2] for member in archive if not member.isdir()}
        assert not [member.name for member in archive if member.issym() or member.islnk()]
    with zipfile.ZipFile(wheel) as archive:
        names = {*archive.namelist()}
        (metadata,) = (archive.read(name) for name in names if name.endswith(".dist-info/METADATA"))
    return sources, names, message_from_bytes(metadata)


def test_the_wheel_holds_every_file_of_the_four_rooms_and_nothing_else(built):
    _, names, _ = built
    files = [name for name in tracked(*ROOMS) if not (ROOT / name).is_symlink()]
    expected = {name if name.startswith("kvconvert/") else f"kvconvert/{name}" for name in files}
    assert {"kvconvert/kernels/__init__.py", "kvconvert/py.typed", "kvconvert/serve/page.html"} <= expected
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert [name for name in names if name.endswith("/licenses/LICENSE")]
    assert [name for name in names if name.endswith("/entry_points.txt")]


def test_the_source_distribution_holds_the_package_and_no_tests(built):
    sources, names, _ = built
    package = {name.removeprefix("src/") for name in sources if name.startswith("src/kvconvert/")}
    assert package == {name for name in names if ".dist-info/" not in name}
    assert not [name for name in sources if name.startswith("tests/")]


def test_a_package_index_shows_readme_with_links_into_the_repository(built):
    _, _, metadata = built
    assert metadata["Version"] == kvconvert.__version__
    page, tag = metadata.get_payload(), f"v{kvconvert.__version__}"
    assert page.startswith("# kvconvert")
    assert f"]({REPOSITORY}/blob/{tag}/docs/quickstart.md)" in page
    assert f'src="{REPOSITORY}/raw/{tag}/docs/overview-light.svg"' in page
    assert "](docs/" not in page
    assert f"Repository, {REPOSITORY}" in metadata.get_all("Project-URL")


def test_the_workflow_tests_every_python_that_may_install_kvconvert():
    allowed = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["requires-python"])
    job = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text("utf8"))["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed]
