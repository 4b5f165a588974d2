"""The processes in which chat templates are rendered, text is tokenized, grammars are tried, and Parquet files are
decoded: run as a script, with a socket as its standard input.

Templates and tokenizers come with the model, grammars from clients, tables from anybody. A template is a program, a
tokenizer has regular expressions and replacements, a grammar may have more states than there is memory, a table may
unpack into a million times its size, and each of them may run for ever. This process loads what its workers need, and
forks one for each socket that it receives; a worker that takes more than it may is ended by the system. Each message is
JSON after its length in eight bytes. The first one that a worker sends is empty; each one that it receives asks for
something, and is answered with `text`, `ids`, `names`, or `error`, or with nothing but the rows that follow it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LENGTH = 8
# What is asked of the process that forks: a worker, for the socket that comes with it, or to be ready for templates, of
# which one follows, or for tables.
WORKER, TEMPLATES, TABLES = b"w", b"t", b"p"
# Characters of each text with which a tokenizer is tried, how many texts, and tokens or characters that may become of
# each character.
_PROBE, _PROBES, _GROWTH = 1024, 200, 64
_REPEATS = re.compile(r"[*+?{(]")  # in a regular expression, what can make it slow
# Rows of a table that are decoded at a time, bytes that its file says they have, and bytes that are sent together; each
# value, and each row or object, counts as that many besides its own bytes, because empty ones take memory, too.
_FEWEST_ROWS, _MOST_ROWS, _STATED, _TOGETHER, _VALUE, _ROW = 16, 1024, 2**18, 2**20, 64, 256


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message."""
    send_bytes(connection, json.dumps(message, default=str).encode())


def send_bytes(connection: socket.socket, content: bytes | memoryview) -> None:
    """Send what is no JSON."""
    connection.sendall(len(content).to_bytes(LENGTH, "big"))
    connection.sendall(content)


def receive(connection: socket.socket) -> dict[str, Any]:
    """Wait for one message, and say how many bytes it had; EOFError if the other side is gone."""
    content = receive_bytes(connection)
    return {"bytes": len(content)} | json.loads(content)


def receive_bytes(connection: socket.socket) -> bytearray:
    """Wait for what is no JSON; EOFError if the other side is gone."""
    return _read(connection, int.from_bytes(_read(connection, LENGTH), "big"))


def _read(connection: socket.socket, size: int) -> bytearray:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 2**20))
        if not part:
            raise EOFError
        content += part
    return content


def answer(asked: dict[str, Any], template: str, tokenizer: Any, table: Any) -> dict[str, Any]:
    """The result, or the reason why there is none."""
    try:
        if "messages" in asked:
            return {"text": _rendered(asked, template)}
        if "compile" in asked:
            return {"text": _compile(asked["compile"])}
        if "grammar" in asked:
            return {"text": _try_grammar(asked["grammar"], asked["limits"])}
        if "probe" in asked:
            return {"text": _try_tokenizer(asked["probe"])}
        if "table" in asked:
            return {"names": table.open(**asked["table"])}
        if "rows" in asked:
            return {"rows": table.next()}
        return {"ids": tokenizer.encode(asked["encode"], add_special_tokens=asked["special"]).ids}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "nested too deeply"}
    except BaseException as error:  # templates raise errors of their own making, tokenizers panic
        return {"error": " ".join(str(error).split()).rstrip(".")[:500] or type(error).__name__}


def _rendered(asked: dict[str, Any], template: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = {"add_generation_prompt": True} | asked["variables"]
    (text,), _ = render_jinja_template([asked["messages"]], chat_template=template, **variables)
    most = asked["further_bytes"] + 4 * asked["bytes"]
    if len(text) > most:
        raise ValueError(f"its text has more than {most:,} characters")
    return text


def _compile(template: str) -> str:
    """Have transformers keep a template compiled, for this process and all that it forks."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    _compile_jinja_template(template)
    return ""


def _try_grammar(grammar: str, limits: dict[str, int]) -> str:
    """Compile a grammar over bytes; why it is refused, or nothing."""
    import llguidance

    bounds = llguidance.LLParserLimits(**limits, verbose_errors=False)
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0, limits=bounds).get_error()


def _try_tokenizer(path: str) -> str:
    """Apply all of a tokenizer.json but the vocabulary to texts that show what grows or never ends; why it is refused,
    or nothing.
    """
    from tokenizers import Tokenizer

    try:
        stated = json.loads(Path(path).read_bytes())
        if reason := _decoded_unbounded(stated):
            return reason
        if stated["model"].get("type", "BPE") == "BPE":  # whose vocabulary is large and whose merges take linear time
            if _cuts_merges(stated["model"]):
                return "its merges lack the prefix that they are said to have"
            stated["model"] |= {"type": "BPE", "vocab": {}, "merges": [], "unk_token": None}
        tokenizer = Tokenizer.from_str(json.dumps(stated))
    except MemoryError:
        raise
    except Exception:  # that it is none is said where it is loaded
        return ""
    for text in _probes({key: stated.get(key) for key in ("normalizer", "pre_tokenizer", "decoder")}):
        for special in (False, True):
            if len(tokenizer.encode(text, add_special_tokens=special).ids) > _GROWTH * _PROBE:
                return f"{len(text):,} characters become more than {_GROWTH * _PROBE:,} tokens"
        if tokenizer.decoder is not None and len(tokenizer.decoder.decode([text])) > _GROWTH * _PROBE:
            return f"a token of {len(text):,} characters becomes more than {_GROWTH * _PROBE:,}"
    return ""


def _decoded_unbounded(stated: dict[str, Any]) -> str:
    """Why tokens must not be decoded, or nothing: that is done for each one as it comes, in the process of the server.

    tokenizers panics where a decoder cuts more off the end of a token than it has, and texts that a pattern is slow
    with are made of any tokens, one after another.
    """
    for step in _objects(stated.get("decoder")):
        if isinstance(stop := step.get("stop"), int) and stop > 0:
            return "its decoder cuts letters off the ends of tokens, which ends the process where a token has fewer"
        if _REPEATS.search(str(step.get("Regex", ""))):
            return "its decoder has a regular expression that repeats a part, which no limit of time holds for"
    vocabulary = stated["model"].get("vocab") or ()
    names = vocabulary if isinstance(vocabulary, dict) else [entry[0] for entry in vocabulary]
    added = [token["content"] for token in stated.get("added_tokens") or ()]
    longest = max(map(len, (*names, *added)), default=0)
    return f"a token has {longest:,} characters, more than {_GROWTH * _PROBE:,}" if longest > _GROWTH * _PROBE else ""


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(entry)


def _cuts_merges(model: dict[str, Any]) -> bool:
    """Whether the second part of a merge does not begin with the prefix of parts within a word.

    tokenizers cuts as many bytes off it as the prefix has, whatever they are: it panics, or ends the process where it
    makes a text of half a letter.
    """
    prefix = model.get("continuing_subword_prefix") or ""
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ())
    return bool(prefix) and not all(merge[-1].startswith(prefix) for merge in merges)


def _probes(steps: dict[str, Any]) -> Iterator[str]:
    """Texts that repeat what patterns are about, and end otherwise, with all that a pattern may look for first."""
    patterns = [text for text in _strings(steps) if text]
    letters = dict.fromkeys([*" \na0A.é中<", *(letter for text in patterns for letter in text)])
    end = "!" + "".join(letters)[:_PROBES]
    words = dict.fromkeys(word for text in patterns for word in (text, *re.findall(r"[^\W_]{2,}", text)))
    for part in [*letters, *words][:_PROBES]:
        text = (part * _PROBE)[:_PROBE]
        yield text + end
        yield " ".join([text[: _PROBE // 2], text[: _PROBE // 2]])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _strings(entry)


class FileElsewhere(io.RawIOBase):
    """A file that the other side reads, which takes none of the time that this process may.

    Args:
        connection: on which `part` is asked for, its first byte and its length, and bytes are the answer.
        size: bytes of the file.
    """

    def __init__(self, connection: socket.socket, size: int) -> None:
        self._connection, self._size, self._at = connection, size, 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Where the next byte is read."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go there."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer, as far as there are bytes; how many there were."""
        size = min(len(buffer), max(self._size - self._at, 0))
        left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
        send(self._connection, {"part": [self._at, size]})
        content = receive_bytes(self._connection)
        signal.setitimer(signal.ITIMER_REAL, left)
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class Table:
    """A Parquet file that is read once, from its beginning to its end.

    Args:
        connection: to who reads the file.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parts: Iterator[tuple[Any, int]] = iter(())

    def open(self, size: int, columns: list[str] | None, most: int, most_of_row: int) -> list[str]:
        """Open the file; the names of all its columns.

        Args:
            size: bytes of the file.
            columns: that are read; None for all.
            most, most_of_row: bytes that the file, and one of its rows, may unpack into.
        """
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(FileElsewhere(self._connection, size), buffer_size=2**20)
        stated = file.metadata
        unpacked = sum(stated.row_group(index).total_byte_size for index in range(stated.num_row_groups))
        rows = min(max(_STATED * stated.num_rows // max(unpacked, 1), _FEWEST_ROWS), _MOST_ROWS)
        self._parts = _bounded(file.iter_batches(rows, columns=columns, use_threads=False), most, most_of_row)
        return file.schema_arrow.names

    def next(self) -> memoryview:
        """The next rows, as a stream of Arrow's; nothing at the end."""
        import pyarrow

        parts, size = [], 0
        while size < _TOGETHER and (found := next(self._parts, None)):
            parts.append(found[0])
            size += found[1]
        sink = pyarrow.BufferOutputStream()
        if parts:
            with pyarrow.ipc.new_stream(sink, parts[0].schema) as stream:
                for part in parts:
                    stream.write_batch(part)
        return memoryview(sink.getvalue())


def _bounded(batches: Iterator[Any], most: int, most_of_row: int) -> Iterator[tuple[Any, int]]:
    """Parts of a table that are a few rows, or a single large one, and the bytes of each (ValueError: too many)."""
    whole = 0
    for batch in batches:
        rows = batch.to_struct_array()
        step = 1 if _unpacked(rows) > _TOGETHER else max(len(rows), 1)
        for start in range(0, len(rows), step):
            size = _unpacked(rows.slice(start, step))
            whole += size
            if step == 1 and size > most_of_row:
                raise ValueError(f"one of its rows unpacks into more than {most_of_row >> 20} MiB")
            if whole > most:
                raise ValueError(f"it unpacks into more than {most >> 20} MiB")
            yield batch.slice(start, step), size


def _unpacked(values: Any) -> int:
    """Bytes of memory that an array of Arrow's takes as Python's values, roughly."""
    import pyarrow
    from pyarrow import types

    kind, own = values.type, _VALUE * len(values)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _unpacked(values.storage)
    if types.is_dictionary(kind):
        return _unpacked(values.dictionary_decode())
    if types.is_string_view(kind) or types.is_binary_view(kind):  # which may share their bytes
        return _unpacked(values.cast(pyarrow.large_string() if types.is_string_view(kind) else pyarrow.large_binary()))
    if types.is_union(kind) or types.is_run_end_encoded(kind):
        raise TypeError(f"columns of type {kind} are not read")
    if types.is_struct(kind):
        return _ROW * len(values) + sum(_unpacked(field) for field in values.flatten())
    if types.is_map(kind):
        first, last = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return own + sum(_unpacked(part.slice(first, last - first)) for part in (values.keys, values.items))
    return own + (_unpacked(values.flatten()) if types.is_nested(kind) else values.nbytes)


def main(memory: int, tokenizer_file: int) -> None:
    """Fork workers until the other side is gone.

    Args:
        memory: bytes that a worker may take.
        tokenizer_file: descriptor of the tokenizer's JSON; 0 where there is none.
    """
    control, tokenizer = socket.socket(fileno=0), None
    if tokenizer_file:
        from tokenizers import Tokenizer

        with os.fdopen(tokenizer_file, "rb") as file:
            tokenizer = Tokenizer.from_str(file.read().decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    _limit(resource.RLIMIT_CORE, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of workers that end
    while True:
        wanted, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if wanted == TEMPLATES:
            from transformers.utils import chat_template_utils  # noqa: F401, so that no worker has to import it

            send(control, {})
            asked, before = receive(control), resource.getrlimit(resource.RLIMIT_AS)
            _allow_memory(memory)
            _allow(asked["seconds"])
            found = answer(asked, "", None, None)
            _allow(0)
            resource.setrlimit(resource.RLIMIT_AS, before)
            send(control, found)
        elif wanted == TABLES:
            import pyarrow.parquet  # noqa: F401, likewise
        elif not descriptors:
            return
        else:
            with socket.socket(fileno=descriptors[0]) as connection:
                if os.fork():
                    continue
                control.close()
                try:
                    _work(connection, memory, tokenizer)
                finally:
                    os._exit(0)


def _work(connection: socket.socket, memory: int, tokenizer: Any) -> None:
    """Answer until the other side is gone."""
    _allow_memory(memory)
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    with open(os.devnull, "w", encoding="ascii") as nothing:
        os.dup2(nothing.fileno(), 2)  # where tokenizers say at length why they panic
    send(connection, {})
    template, table = "", Table(connection)
    while True:
        try:
            asked = receive(connection)
        except EOFError:
            return
        template = asked.get("template", template)
        if "messages" in asked:
            from transformers.utils import chat_template_utils  # noqa: F401, which takes longer than most templates
        if "grammar" in asked:
            import llguidance  # noqa: F401, likewise
        if "memory" in asked:
            _allow_memory(asked["memory"])
        # What a table may take is for all its rows together.
        seconds = asked["seconds"] - (time.process_time() if "rows" in asked else 0)
        if seconds <= 0:
            return
        _allow(seconds)
        found = answer(asked, template, tokenizer, table)
        _allow(0)
        if "grammar" in asked:  # which have less
            _limit(resource.RLIMIT_AS, most)
        rows = found.pop("rows", None)
        send(connection, found)
        if rows is not None:
            send_bytes(connection, rows)


def _allow_memory(size: int) -> None:
    """Let this process take that many more bytes than it has."""
    if sys.platform == "linux":  # elsewhere there is no such limit
        with open("/proc/self/statm", encoding="ascii") as file:
            _limit(resource.RLIMIT_AS, int(file.read().split()[0]) * resource.getpagesize() + size)


def _allow(seconds: float) -> None:
    """Have the system end this process after some seconds of a processor, or four times as many; 0 for no limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 4 * seconds)


def _limit(which: int, value: int) -> None:
    """Set a limit; the hard one stays, so that it can be raised again."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, EOFError):  # who started this process was killed, and nobody is told
        main(*map(int, sys.argv[1:]))
