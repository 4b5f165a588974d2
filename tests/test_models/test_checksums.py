"""Checksums that are computed beside other work."""

import hashlib
import os

import pytest

from kvconvert.errors import CheckpointError
from kvconvert.io import checksums


def test_checksums_begun_early_are_those_of_the_files(tmp_path):
    contents = {tmp_path / f"{size}.bin": bytes(range(256)) * size for size in (0, 1, 70_000)}
    for file, content in contents.items():
        file.write_bytes(content)
    checksums.begin(contents)
    for file, content in contents.items():
        counted = []
        assert checksums.sha256(file, counted.append) == hashlib.sha256(content).hexdigest()
        assert sum(counted) == len(content)


def test_a_file_that_changed_since_is_read_again(tmp_path):
    file = tmp_path / "file.bin"
    file.write_bytes(b"before")
    checksums.begin([file])
    file.write_bytes(b"and after")
    assert checksums.sha256(file) == hashlib.sha256(b"and after").hexdigest()


def test_a_file_is_read_again_each_time_it_is_asked_for(tmp_path):
    file = tmp_path / "file.bin"
    file.write_bytes(b"once")
    first = checksums.sha256(file)
    status = file.stat()
    file.write_bytes(b"more")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert checksums.sha256(file) != first


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    checksums.begin([tmp_path / "nothing", tmp_path])
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            checksums.sha256(path)


def test_a_remembered_checksum_counts_until_the_file_changes(tmp_path):
    file = tmp_path / "layer"
    file.write_bytes(b"written")
    checksums.remember(file, "as written")
    assert checksums.known_sha256([file]) == {file: "as written"}
    file.write_bytes(b"damaged since")
    assert checksums.known_sha256([file]) == {file: hashlib.sha256(b"damaged since").hexdigest()}
