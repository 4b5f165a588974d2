"""A bar on a terminal, one line for each stage anywhere else."""

import io
import re
import sys
import types

import pytest
from transformers.utils import logging

from kvconvert.io import progress
from kvconvert.io.progress import WITHOUT_RATE, loading_bars, progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


ANYWHERE = pytest.mark.parametrize("kind", [Terminal, io.StringIO], ids=["terminal", "file"])


@pytest.fixture
def replaced(monkeypatch):
    """Puts a stream in the place of stderr, which pytest replaces before each test."""

    def replace(kind):
        monkeypatch.setattr(sys, "stderr", kind())
        return sys.stderr

    return replace


@ANYWHERE
def test_a_log_has_one_line_for_a_stage_and_a_terminal_a_rate_with_its_unit(kind, replaced):
    stderr = replaced(kind)
    items = list(range(40))
    assert list(progress_bar(items, desc="layers", unit="layer", shown=True, mininterval=0)) == items
    if stderr.isatty():
        assert "layer/s" in stderr.getvalue()
    else:
        assert stderr.getvalue() == "layers: 40 layers\n"


def test_a_log_says_now_and_then_how_far_a_long_stage_is(replaced, monkeypatch):
    stderr = replaced(io.StringIO)
    now = iter(range(0, 10_000, 10))  # seconds: three looks of which one is late enough
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(perf_counter=lambda: next(now)))
    with progress_bar(total=28, desc="layers", unit="layer", shown=True, initial=8) as bar:
        for _ in range(12):
            bar.update()
            bar.refresh()
    first, *others = stderr.getvalue().splitlines()
    assert first == "layers: 28 layers"
    assert [re.sub(r"\d\d:\d\d", "TIME", line) for line in others] == [
        f"layers: {number} of 28, about TIME left" for number in (11, 14, 17, 20)
    ]


@ANYWHERE
def test_what_is_done_of_an_item_is_shown_before_a_time_can_be_estimated(kind, replaced):
    stderr = replaced(kind)
    with progress_bar(total=28, desc="layers", unit="layer", shown=True, initial=8, mininterval=0) as bar:
        for stage in ("layer 8: reading", "layer 8: awq"):
            bar.set_postfix_str(stage)
            assert stage in stderr.getvalue()
        bar.update()
        bar.set_postfix_str("layer 9: reading")
    assert ("layer 9" in stderr.getvalue()) == stderr.isatty()
    progress_bar(total=28, desc="layers", unit="layer", shown=False).set_postfix_str("layer 0: reading")


@ANYWHERE
def test_checksums_have_a_size_and_no_rate(kind, replaced):
    stderr = replaced(kind)
    with progress_bar(
        total=3 * 10**9, desc="checksums", unit="B", unit_scale=True, shown=True, bar_format=WITHOUT_RATE
    ) as bar:
        bar.update(3 * 10**9)
    assert "3.00G" in stderr.getvalue()
    assert "B/s" not in stderr.getvalue()


@ANYWHERE
def test_what_is_not_to_be_shown_prints_nothing(kind, replaced):
    stderr = replaced(kind)
    assert list(progress_bar([1], desc="layers", unit="layer", shown=False)) == [1]
    assert stderr.getvalue() == ""


@ANYWHERE
@pytest.mark.parametrize("shown", [True, False])
def test_transformers_bars_are_shown_on_a_terminal_alone(kind, replaced, shown):
    bars = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    stderr = replaced(kind)
    with loading_bars(shown):
        assert logging.is_progress_bar_enabled() == (shown and stderr.isatty())
    assert logging.is_progress_bar_enabled()
    if not bars:
        logging.disable_progress_bar()
