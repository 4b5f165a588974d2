"""Memory that a command has freed is the system's again."""

import json
import platform
import subprocess
import sys

import pytest

# Blocks of 8 MiB, which glibc keeps by itself once one was freed, below one that holds the end of the heap in place.
PROGRAM = """
import ctypes, json, os
from kvconvert.io.process import anonymous_bytes, return_large_blocks
if {settled}:
    return_large_blocks()
c, size = ctypes.CDLL(None), 2**23
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
c.free(c.malloc(size))
before, blocks = anonymous_bytes(), [c.malloc(size) for _ in range(8)]
pins = [c.malloc(100_000) for _ in range(100)]
for block in blocks:
    ctypes.memset(block, 1, size)
for block in blocks:
    c.free(block)
print(json.dumps([anonymous_bytes() - before, os.environ.get("THP_MEM_ALLOC_ENABLE")]))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator has this setting")
def test_large_blocks_go_back_to_the_system_when_they_are_freed():
    kept, settled = (
        json.loads(subprocess.check_output([sys.executable, "-c", PROGRAM.format(settled=choice)]))
        for choice in (False, True)
    )
    assert kept[0] > 2**25
    assert settled[0] < 2**23
    assert settled[1] == "1"
