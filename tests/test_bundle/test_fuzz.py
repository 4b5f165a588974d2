"""Whatever a hostile bundle says, it is read or refused in one sentence: no crash, no hang, no file elsewhere."""

import json
import os
import resource
import shutil
import sys

import fuzzing
import pytest

from kvconvert.bundle.card import fidelity_section, model_card
from kvconvert.bundle.describe import manifest_text, summary
from kvconvert.bundle.files import own_files
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.errors import KvconvertError
from kvconvert.models.configuration import read_config, sliding_windows
from kvconvert.report import render

MOST_MEMORY = 300 * 2**20


def peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def shown(bundle: Bundle, drawn: bool) -> None:
    """All that commands print of a bundle; with `drawn` its report, too, which takes longer."""
    config = read_config(bundle.directory, bundle.config)
    windows = sliding_windows(config)
    manifest_text(bundle.manifest, windows=windows)
    summary(bundle.manifest, windows)
    model_card(bundle.manifest, windows).encode()
    fidelity_section(bundle.manifest)
    json.dumps(bundle.manifest.model_dump(mode="json"))
    if drawn:
        fidelity = bundle.manifest.fidelity
        render(bundle, config, *((fidelity.report, fidelity.missed) if fidelity is not None else ()))


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
                    bundle = open_bundle(fuzzer.directory, verify="full" if number % 8 == 0 else "headers")
                    shown(bundle, drawn="_measured" in done and number % 8 == 1)
                accepted += 1
                check_accepted(fuzzer, bundle, number, done)
            except KvconvertError as error:
                message = str(error)
            except BaseException as error:
                raise AssertionError(f"case {number} ({done}): {type(error).__name__}: {error}") from error
        assert "\n" not in message, (number, done, message)
        # Libraries read files of their own while a report is drawn.
        own = os.path.realpath(fuzzer.outside.parent) + os.sep
        outside = [
            path for path, wrote in opened if path.startswith(own) and (wrote or not path.startswith(here + os.sep))
        ]
        assert not outside, (number, done, outside)
    fuzzer.restore()
    assert sorted(os.listdir(here)) == fuzzer.listing, "the directory is as it was"
    assert peak_bytes() - before < MOST_MEMORY
    return accepted


def check_accepted(fuzzer, bundle, number, done):
    """What loaders read is listed with its hash, and nothing is uploaded that is a link."""
    listed = bundle.manifest.files
    unlisted = [name for name in fuzzing.LOADED if (fuzzer.directory / name).exists() and name not in listed]
    assert not unlisted, (number, done, unlisted)
    uploaded = own_files(bundle.manifest) & {*bundle.files.names}
    links = [name for name in uploaded if (fuzzer.directory / name).is_symlink()]
    assert not links, (number, done, links)


@pytest.fixture
def fuzzer(bundle):
    shown(open_bundle(bundle), drawn=True)  # imports take longer than a case may
    made = fuzzing.Fuzzer(bundle, 1, fuzzing.MEASURED)
    made.listing = sorted(os.listdir(bundle))
    return made


@pytest.mark.parametrize("count", [25, pytest.param(1000, marks=pytest.mark.full)])
def test_many_hostile_bundles(fuzzer, count):
    accepted = read_cases(fuzzer, range(count))
    assert 0 < accepted < 0.4 * count  # some changes are harmless, and most are not


@pytest.mark.full
@pytest.mark.parametrize("part", range(10))
def test_twenty_thousand_hostile_bundles(fuzzer, part):
    read_cases(fuzzer, range(1000 + 2000 * part, 3000 + 2000 * part))


def test_the_same_seed_gives_the_same_cases(bundle, tmp_path):
    (tmp_path / "second").mkdir()
    other = shutil.copytree(bundle, tmp_path / "second" / "other")
    fuzzers = [fuzzing.Fuzzer(directory, seed=1) for directory in (bundle, other)]
    for number in (3, 77):
        first, second = (each.case(number) for each in fuzzers)
        assert first == second
    assert all((other / path.name).read_bytes() == path.read_bytes() for path in bundle.iterdir() if path.is_file())
