"""Whatever a hostile bundle says, it is read or refused in one sentence: no crash, no hang, no file elsewhere."""

import os
import resource
import shutil
import sys

import fuzzing
import pytest

from kvconvert.bundle.card import model_card
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.text import manifest_text
from kvconvert.errors import KvconvertError

MOST_MEMORY = 300 * 2**20


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def read_cases(fuzzer, numbers):
    """Read each case as the commands do; returns how many were accepted."""
    accepted = 0
    here = os.path.realpath(fuzzer.directory)
    before = peak_bytes()
    for number in numbers:
        done = fuzzer.case(number)
        message = ""
        with fuzzing.opened_files() as opened:
            try:
                with fuzzing.time_limit():
                    manifest = open_bundle(fuzzer.directory, verify="full" if number % 8 == 0 else "headers").manifest
                    manifest_text(manifest)
                    model_card(manifest).encode()
                accepted += 1
            except KvconvertError as error:
                message = str(error)
            except BaseException as error:
                raise AssertionError(f"case {number} ({done}): {type(error).__name__}: {error}") from error
        assert "\n" not in message, (number, done, message)
        assert all(path.startswith(here + os.sep) and not wrote for path, wrote in opened), (number, done, opened)
    assert sorted(os.listdir(here)) == fuzzer.listing, "the directory is as it was"
    assert peak_bytes() - before < MOST_MEMORY
    return accepted


@pytest.fixture
def fuzzer(bundle):
    made = fuzzing.Fuzzer(bundle, seed=1)
    made.listing = sorted(os.listdir(bundle))
    return made


@pytest.mark.parametrize("count", [400, pytest.param(1000, marks=pytest.mark.full)])
def test_hundreds_of_hostile_bundles(fuzzer, count):
    accepted = read_cases(fuzzer, range(count))
    assert 0 < accepted < 0.4 * count  # some changes are harmless, and most are not


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_twenty_thousand_hostile_bundles(fuzzer, part):
    read_cases(fuzzer, range(1000 + 2000 * part, 3000 + 2000 * part))


def test_the_same_seed_gives_the_same_cases(bundle, tmp_path):
    other = shutil.copytree(bundle, tmp_path / "other")
    for number in (3, 77):
        first, second = (fuzzing.Fuzzer(directory, seed=1).case(number) for directory in (bundle, other))
        assert first == second
    assert all((other / path.name).read_bytes() == path.read_bytes() for path in bundle.iterdir() if path.is_file())
