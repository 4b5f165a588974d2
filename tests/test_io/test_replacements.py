"""Files that are replaced in a single step, also by two writers at once."""

import threading
from pathlib import Path

import pytest

from kvconvert.io.disk import Replacement, replace_bytes


def test_a_second_writer_of_a_file_waits_for_the_first(tmp_path):
    path = tmp_path / "file"
    first = Replacement(path)
    first.write(b"one")
    second = threading.Thread(target=replace_bytes, args=(path, b"2"))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    first.write(b" two")
    first.commit()
    assert path.read_bytes() == b"one two"
    first.discard()
    second.join(10)
    assert not second.is_alive()
    assert path.read_bytes() == b"2"
    assert [*tmp_path.iterdir()] == [path]


def test_many_writers_of_a_file_leave_what_one_of_them_wrote(tmp_path):
    path, failed = tmp_path / "file", []
    contents = [bytes([65 + writer]) * (1000 * writer + 1) for writer in range(4)]

    def write(content):
        try:
            for _ in range(25):
                replace_bytes(path, content)
        except OSError as error:
            failed.append(error)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert (failed, path.read_bytes() in contents, [*tmp_path.iterdir()]) == ([], True, [path])


def test_a_writer_that_gives_up_lets_the_next_one_write(tmp_path):
    path = tmp_path / "file"
    first = Replacement(path)
    second = threading.Thread(target=replace_bytes, args=(path, b"2"))
    second.start()
    first.discard()
    second.join(10)
    assert path.read_bytes() == b"2"


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    Path(tmp_path / ".file.partial").write_bytes(b"x" * 100)
    replace_bytes(tmp_path / "file", b"2")
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"2")]


def test_a_link_in_its_place_is_not_followed(tmp_path):
    (tmp_path / ".file.partial").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        replace_bytes(tmp_path / "file", b"2")
    assert not (tmp_path / "elsewhere").exists()
