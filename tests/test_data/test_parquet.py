"""Parquet files: rows as the file has them, and limits of what a file may unpack into."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kvconvert.data import rows, sources
from kvconvert.data.rows import ParquetRows
from kvconvert.data.sources import SourceTable
from kvconvert.errors import DataError
from kvconvert.models.templates import shared_renderer


def written(directory, table, **options):
    file = directory / "x.parquet"
    pyarrow.parquet.write_table(table, file, compression="zstd", **options)
    return file


def workers():
    """Ids of the processes that the one which forks has made."""
    process = shared_renderer()._process.pid
    return Path(f"/proc/{process}/task/{process}/children").read_text(encoding="ascii").split()


@pytest.fixture
def started():
    """Ids of those that were made since the test began: chat templates of other tests may keep theirs."""
    shared_renderer().start()
    before = {*workers()}
    return lambda: {*workers()} - before


def until(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def one_row(values):
    return pyarrow.ListArray.from_arrays([0, len(values)], values)


def repeated(text, rows):
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, pyarrow.int32()), pyarrow.array([text]))


def many_messages():
    texts = pyarrow.nulls(2_000_000, pyarrow.string())
    return pyarrow.table({"messages": one_row(pyarrow.StructArray.from_arrays([texts, texts], ["role", "content"]))})


@pytest.mark.quick("messages", "values", "texts")
@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (many_messages, "one of its rows unpacks into more than 64 MiB"),
        (lambda: pyarrow.table({"text": one_row(pyarrow.nulls(20_000_000, pyarrow.int64()))}), "one of its rows"),
        (lambda: pyarrow.table({"text": pyarrow.nulls(18_000_000, pyarrow.string())}), "it unpacks into more than"),
        (lambda: pyarrow.table({"text": repeated("w1 " * 17_000_000, 1000)}), "too much memory|seconds or"),
        (lambda: pyarrow.table({"text": repeated("w1 " * 10_000_000, 4)}), "it unpacks into more than"),
    ],
    ids=["messages", "values", "rows", "texts", "texts of one message"],
)
def test_a_small_file_that_unpacks_into_much_is_one_sentence(tmp_path, started, made, reason):
    file = written(tmp_path, made(), store_schema=False, dictionary_pagesize_limit=2**30)
    assert file.stat().st_size < 200_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=f"x.parquet cannot be read .*({reason}).*; check the file") as caught:
        list(SourceTable.open(str(file), [file]).shuffled(0))
    assert str(caught.value).count("\n") == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10  # KiB
    until(lambda: not started())


def test_the_first_rows_of_a_file_that_repeats_a_long_text_are_read(tmp_path):
    file = written(tmp_path, pyarrow.table({"text": repeated("w1 " * 30_000, 10_000)}), store_schema=False)
    rows = iter(ParquetRows([file]))
    assert next(rows)["text"] == "w1 " * 30_000
    with pytest.raises(DataError, match="it unpacks into more than 64 MiB"):
        list(rows)


def test_all_rows_together_take_no_more_of_a_processor_than_the_file_may(tmp_path, started, monkeypatch):
    monkeypatch.setattr(rows, "_SECONDS", 0.2)
    monkeypatch.setattr(rows, "MOST", 2**40)
    file = written(tmp_path, pyarrow.table({"text": pyarrow.nulls(20_000_000, pyarrow.string())}))
    with pytest.raises(DataError, match=r"it takes more than 0\.2 seconds or 1024 MiB of memory"):
        for _ in ParquetRows([file]):
            pass
    until(lambda: not started())


def test_rows_are_as_the_file_has_them(tmp_path):
    messages = [{"role": "user", "content": [{"type": "text", "text": "é"}, {"type": "image", "text": None}]}]
    rows = [
        {
            "messages": messages * (index % 4),
            "image": {"bytes": os.urandom(100_000), "path": None},
            "text": "word " * (index % 7) if index % 5 else None,
            "scores": {"one": float(index)} if index % 3 else None,
        }
        for index in range(100)
    ]
    kinds = {"kind": pyarrow.array(["a", "b"] * 50).dictionary_encode()}
    kinds["view"] = pyarrow.array(["a", "x" * 100] * 50, pyarrow.string_view())
    kinds["pairs"] = pyarrow.array([[("a", 1)], None, [], [("b", 2), ("c", None)]] * 25, pyarrow.map_("string", "int8"))
    kinds["fixed"] = pyarrow.array([[1, 2], None] * 50, pyarrow.list_(pyarrow.int8(), 2))
    kinds["id"] = pyarrow.array([bytes(range(16))] * 100, pyarrow.uuid())
    table = pyarrow.Table.from_pylist(rows)
    for name, column in kinds.items():
        table = table.append_column(name, column)
    file = written(tmp_path, table)
    expected = table.to_pylist()
    assert list(ParquetRows([file, file])) == expected * 2
    assert ParquetRows([file], ["kind"]).names() == table.column_names
    assert list(ParquetRows([file], ["kind"])) == [{"kind": row["kind"]} for row in expected]


def test_a_read_that_is_interrupted_leaves_no_process(tmp_path, started):
    file = written(tmp_path, pyarrow.table({"text": ["word " * 20_000] * 500}), use_dictionary=False)
    rows = iter(ParquetRows([file]))
    next(rows)
    assert len(started()) == 1
    rows.close()
    until(lambda: not started())


@pytest.mark.quick("9")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_program_that_is_ended_leaves_no_process(tmp_path, how):
    file = written(tmp_path, pyarrow.table({"text": ["word " * 20_000] * 500}), use_dictionary=False)
    code = (
        # A shell ignores interrupts of what it runs in the background, and children inherit that.
        "import signal, sys, time; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from pathlib import Path; from kvconvert.data.rows import ParquetRows\n"
        "from kvconvert.models.templates import shared_renderer\n"
        "rows = iter(ParquetRows([Path(sys.argv[1])])); next(rows)\n"
        "print(shared_renderer()._process.pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        group = int(process.stdout.readline())
        os.killpg(group, 0)
        process.send_signal(how)
        process.wait(30)

    def is_gone():
        return not any(
            stat.split()[2] == str(group) and stat.split()[0] != "Z"
            for entry in os.listdir("/proc")
            if entry.isdigit() and (stat := stat_of(entry))
        )

    until(is_gone)


def stat_of(process):
    """State, parent, group and so on of a process; nothing if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(") ")[2]
    except OSError:
        return ""


def test_rows_that_are_looked_at_first_are_few_if_they_are_long(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SHUFFLE_BYTES", 1000)
    file = written(tmp_path, pyarrow.table({"text": ["x" * 300] * 50}))
    assert len(SourceTable.open(str(file), [file]).first(20)) == 3
    file = written(tmp_path, pyarrow.table({"messages": [[{"role": "user", "content": None}] * 20] * 50}))
    assert len(SourceTable.open(str(file), [file]).first(20)) == 1
