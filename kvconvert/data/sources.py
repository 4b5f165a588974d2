"""A SOURCE of calibration data (local files of one kind, source code, or a Hub data set), and its rows: JSON,
CSV, and text are read row by row, Parquet in a process with limits.

`datasets` finds the files of a Hub data set and reads none: it reads JSON through a table with every name that occurs
in any row, so that 0.7 MB with 20,000 names become 3 GB, and values nested by the thousand end the process. Here a row
costs what its own text does.

What looks like text and is conversations spelled as JSON or Python is refused.
"""

from __future__ import annotations

import importlib.resources
import itertools
import os
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from kvconvert.data.rows import MOST_AT_ONCE, CsvRows, ParquetRows
from kvconvert.errors import DataError, HubError, KvconvertError, UsageError, first_line, listed, printable
from kvconvert.io.hub import ask_hub, missing_below
from kvconvert.io.json_text import MAX_DEPTH, parse_json
from kvconvert.io.regular import files_below

_MARK = b"\xef\xbb\xbf"  # with which some programs begin UTF-8


@dataclass(frozen=True)
class JsonRows:
    """Rows of files that hold an object in each line, a list of objects or of texts, or one object of columns.

    Texts become rows with the column `text`. One object is a row of its own where its lists are not columns: of
    different lengths, a conversation, or token ids. Iterating raises DataError, naming the file, and the line where
    rows are lines.

    Attributes:
        files: paths or addresses.
        open: opens one of them.
        field: the name under which each file's object holds the rows; None where it is they.
    """

    files: Sequence[Path | str]
    open: Callable[[Any, str], Any] = open
    field: str | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for file in self.files:
            try:
                with self.open(file, "rb") as stream:
                    yield from _rows(file, stream, self.field)
            except OSError as error:
                reason = error.strerror or first_line(error)
                raise DataError(f"Data file {file} cannot be read ({reason}); check the file.") from error


@dataclass(frozen=True)
class LineRows:
    """Rows of text files, each of a line, with the column `text` (DataError, naming the file and the line).

    Attributes:
        files: paths or addresses.
        open: opens one of them.
    """

    files: Sequence[Path | str]
    open: Callable[[Any, str], Any]

    def __iter__(self) -> Iterator[dict[str, str]]:
        for file in self.files:
            with self.open(file, "rb") as stream:
                for number, line in enumerate(_lines(file, stream), 1):
                    try:
                        yield {"text": line.removeprefix(_MARK).decode().rstrip("\r")}
                    except UnicodeDecodeError as error:
                        raise _unreadable(file, f"line {number} is not UTF-8 text") from error


Rows = JsonRows | CsvRows | ParquetRows | LineRows


def _lines(file: Path | str, stream: BinaryIO) -> Iterator[bytes]:
    """Lines of a stream, whatever it is: those of the Hub read a line without a limit."""
    rest = bytearray()
    while chunk := stream.read(2**20):
        first, *further = chunk.split(b"\n")
        rest += first
        for line in further:
            yield bytes(rest)
            rest = bytearray(line)
        if len(rest) > MOST_AT_ONCE:
            raise _unreadable(file, f"a line has more than {MOST_AT_ONCE:,} bytes")
    if rest:
        yield bytes(rest)


def _rows(file: Path | str, stream: BinaryIO, field: str | None) -> Iterator[dict[str, Any]]:
    lines = enumerate(_lines(file, stream), 1)
    start, first = next(((number, text) for number, line in lines if (text := _text(line))), (0, b""))
    if not first:
        raise DataError(f"Data file {file} is empty; give a file with rows.")
    try:
        row = parse_json(first)
    except ValueError:
        row = None
    following = next((line for line in lines if _text(line[1])), None)
    if not isinstance(row, dict) or field is not None or (following is None and _is_columns(row)):
        stream.seek(0)
        content = bytearray()
        while chunk := stream.read(2**20):
            content += chunk
            if len(content) > MOST_AT_ONCE:
                raise _unreadable(file, f"a JSON document has more than {MOST_AT_ONCE:,} bytes")
        yield from _document_rows(file, bytes(content).removeprefix(_MARK), field)
        return
    for number, line in chain([(start, first)], [] if following is None else [following], lines):
        if text := _text(line):
            try:
                row = parse_json(text)
            except ValueError as error:
                raise _unreadable(file, f"line {number}: {error}") from error
            if not isinstance(row, dict):
                raise _unreadable(file, f"line {number} is no object")
            yield row


def _text(line: bytes) -> bytes:
    return line.removeprefix(_MARK).strip()


def _document_rows(file: Path | str, content: bytes, field: str | None) -> Iterator[dict[str, Any]]:
    try:
        found = parse_json(content)
    except ValueError as error:
        raise _unreadable(file, str(error)) from error
    if field is not None:
        if not isinstance(found, dict) or field not in found:
            raise _unreadable(file, f"it has no field {printable(field)[:80]}")
        found = found[field]
    if isinstance(found, dict) and _is_columns(found):
        found = [dict(zip(found, entries, strict=True)) for entries in zip(*found.values(), strict=True)]
    for index, entry in enumerate(found if isinstance(found, list) else [found]):
        row = {"text": entry} if isinstance(entry, str) else entry
        if not isinstance(row, dict):
            raise _unreadable(file, f"entry {index} is neither an object nor text")
        yield row


def _is_columns(found: dict[str, Any]) -> bool:
    """Whether an object is a table by its columns, and not a single row, whose lists are a conversation or numbers."""
    columns = list(found.values())
    if not all(isinstance(column, list) for column in columns) or len(set(map(len, columns))) > 1:
        return False
    entries = list(chain(*columns))
    messages = any(isinstance(entry, dict) and not entry.keys().isdisjoint(("role", "from")) for entry in entries)
    return not messages and any(isinstance(entry, str | list | dict) for entry in entries)


def _unreadable(file: Path | str, reason: str) -> DataError:
    return DataError(f"Data file {file} cannot be read ({reason.rstrip('.')}); check the file.")


Sources = str | Sequence[str] | None
Data = Annotated[str | Path | Sequence[str], "a source, or a list of sources"]
SHIPPED = "kvconvert:"  # begins the SOURCE of a text that ships with kvconvert
CONVERSATIONS = f"{SHIPPED}chat-calib.jsonl"  # for models that have a template for them
CALIBRATION = (f"{SHIPPED}books-calib.txt", f"{SHIPPED}code-calib.txt", CONVERSATIONS)  # why: benchmarks/WEIGHTS.md
EVALUATION = f"{SHIPPED}books-val.txt"
_WEIGHTED = re.compile(r"(.+)=(\d+(?:\.\d+)?)")
LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# In a directory beside other data these are about it, as captions and settings are.
BESIDE_DATA = (".json", ".csv")
MARKDOWN = (".md", ".rst")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs"),
    *(".rb", ".php", ".swift", ".kt", ".scala", ".cs", ".sh", ".sql", ".lua", ".jl", ".r", ".html", ".css", ".toml"),
    *(".yaml", ".yml", ".tex"),
)
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_DATA_SUFFIXES = (".txt", *LOADERS)
SUFFIXES = (*_DATA_SUFFIXES, *MARKDOWN, *CODE)


def suffix(path: Path) -> str:
    """What tells the kind of a file, in small letters: `.JSONL`, as some systems write it, is `.jsonl`."""
    return path.suffix.lower()


@dataclass(frozen=True)
class HubSource:
    """A Hub data set id taken apart: `name[:config[:split[:column]]]`, empty parts meaning the default."""

    name: str
    config: str | None = None
    split: str = "train"
    column: str | None = None

    @classmethod
    def parse(cls, source: str) -> HubSource:
        """Take a SOURCE that is not a path apart; raises DataError where it cannot be a data set id."""
        if "://" in source:
            raise DataError(f"Data source {source!r} is an address, which is not fetched; give the path of a copy.")
        parts = source.split(":")
        name = parts[0]
        wellformed = all(re.fullmatch(r"[\w.-]+", part) for part in name.split("/"))
        if len(parts) > 4 or name.count("/") > 1 or not wellformed:
            raise DataError(
                f"Data source {source!r} is neither a file or directory that exists nor a Hub data set id of the form "
                "name:config:split:column; check the spelling."
            )
        parts += [""] * (4 - len(parts))
        return cls(name, parts[1] or None, parts[2] or "train", parts[3] or None)


@dataclass(frozen=True)
class WeightedSource:
    """A SOURCE of `kvconvert.data.text` and its share."""

    source: str
    weight: float = 1.0


def weighted_sources(data: Sources) -> list[WeightedSource]:
    """Sources with their weights, 1 where none is given; a path that exists is one, whatever its name looks like.

    None stands for `CALIBRATION`.

    Raises:
        UsageError: a weight that is no positive number, or an empty list.
    """
    if data is None:
        return [WeightedSource(source) for source in CALIBRATION]
    given = [data] if isinstance(data, str) else data
    if not given:
        raise UsageError("`data` is an empty list; name a source, or leave it out.")
    found = []
    for text in given:
        match = None if _exists(text) else _WEIGHTED.fullmatch(text)
        source, weight = (text, 1.0) if match is None else (match[1], float(match[2]))
        before, equals, after = text.rpartition("=")
        if not weight or (match is None and equals and _exists(before) and not _exists(text)):
            raise UsageError(f"`data` gives {before} the weight {after}; leave it out, or give it a positive number.")
        found.append(WeightedSource(source, weight))
    return found


def source_name(source: str) -> str:
    """The source's name in the manifest: the last part of a local path, because bundles are shared, paths private."""
    place, column = named_column(source)
    path = Path(os.path.expanduser(place))
    return printable(path.resolve().name) + (f"::{column}" if column else "") if _exists(place) else source


def _exists(path: str) -> bool:
    """Whether there is something at a path; no text is too odd to ask."""
    return os.path.exists(os.path.expanduser(path))


def named_column(source: str) -> tuple[str, str | None]:
    """A local path and the column that `path::column` names; any other SOURCE as it is, and None."""
    place, _, column = source.rpartition("::")
    if place and column and not _exists(source) and _exists(place):
        return place, column
    return source, None


def local_files(source: str) -> list[Path] | None:
    """The files a local SOURCE stands for, all of one kind, sorted; None if it has to be a Hub id."""
    if not source.strip():
        raise DataError(
            "The data source is empty text; name a file, a directory or a Hub data set id, or leave it out."
        )
    if source.startswith(SHIPPED):
        return [_shipped(source)]
    source, column = named_column(source)
    path = Path(os.path.expanduser(source))
    files = _files(path)
    if files is not None and column is not None and is_plain_text(files):
        raise DataError(f"Data source {source} is plain text, which has no column {column!r}; leave it out.")
    if files is not None:
        return files
    head = source.partition(":")[0]
    if _exists(head):
        raise DataError(
            f"Data source {source} adds :config:split:column to a local path; only Hub data sets take that, and a "
            "column of local files is named as in file.jsonl::column."
        )
    if head.startswith(("/", ".", "~")) or head.count("/") > 1 or suffix(Path(head)) in SUFFIXES:
        raise DataError(f"Data source {source} does not exist; check the path.")
    if "/" in head and (owner := missing_below(head)) is not None:
        raise DataError(
            f"Data source {source} does not exist, and as {owner} is a directory here, the Hub was not asked; check "
            "the path, or run from another directory if you mean a data set of the Hub."
        )
    return None


def _shipped(source: str) -> Path:
    file = Path(str(importlib.resources.files("kvconvert.data.texts"))) / source.removeprefix(SHIPPED)
    known = (*CALIBRATION, EVALUATION)
    if source not in known:
        raise DataError(f"Data source {source} does not ship with kvconvert; name {listed(known, 'or')}.")
    return file


def check_sources(data: Sources) -> None:
    """Refuse a file that cannot be read, and what is no path and no data set of the Hub (DataError, UsageError).

    Commands ask this before they import torch.
    """
    for source in weighted_sources(data):
        path = Path(os.path.expanduser(named_column(source.source)[0]))
        if path.is_dir() and any(suffix(file) in IMAGE_SUFFIXES for file in files_below(path)):
            continue
        files = local_files(source.source)
        if files is None:
            hub = HubSource.parse(source.source)
            with _readable(source.source, local=False):
                _hub_rows(hub)
        elif not is_plain_text(files):
            SourceTable.open(source.source, files).check_columns()
        elif path.is_file():
            read_text(path)


def _files(path: Path) -> list[Path] | None:
    """The data files at a path, all of one kind, sorted; None if there is nothing."""
    if os.path.isfile(path):  # which takes any name, however long
        if suffix(path) not in SUFFIXES:
            raise DataError(f"Data file {path} is not of a known kind; convert it to {listed(_DATA_SUFFIXES, 'or')}.")
        if path.stat().st_size == 0:
            raise DataError(f"Data file {path} is empty; give a file with text.")
        return [path]
    if os.path.isdir(path):
        found = [p for p in files_below(path) if suffix(p) in SUFFIXES and p.is_file()]
        files = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if any(suffix(p) in {*_DATA_SUFFIXES, *CODE} - {*BESIDE_DATA} for p in files):
            files = [p for p in files if suffix(p) not in BESIDE_DATA]
        if not files:
            raise DataError(
                f"Data directory {path} holds no {listed(_DATA_SUFFIXES, 'or')} file and no code; name the directory "
                "that does."
            )
        return _of_one_kind(path, files)
    if os.path.exists(path):
        raise DataError(f"Data source {path} is neither a file nor a directory; write what it gives to a file.")
    return None


def _of_one_kind(directory: Path, files: list[Path]) -> list[Path]:
    """Tables or .txt files if there are some; with code everything that is plain text; else Markdown.

    So a README.md beside data is not data, and a requirements.txt beside code is not all that is read.
    """
    kinds = {suffix(file) for file in files}
    if kinds & {*LOADERS}:
        files = [file for file in files if suffix(file) in _DATA_SUFFIXES]
    elif ".txt" in kinds and not kinds & {*CODE}:
        files = [file for file in files if suffix(file) == ".txt"]
    mixed = sorted({suffix(file) for file in files} & {*_DATA_SUFFIXES})
    if len(mixed) > 1:
        raise DataError(f"Data directory {directory} mixes {listed(mixed, 'and')} files; keep one kind in it.")
    return files


def is_plain_text(files: list[Path] | None) -> bool:
    """Whether local files are documents, each of one text, and not tables."""
    return files is not None and suffix(files[0]) not in LOADERS


def read_text(file: Path) -> str:
    """A file's text (DataError where it is none, or empty)."""
    try:
        if (size := file.stat().st_size) > MOST_AT_ONCE:
            raise DataError(f"Data file {file} has {size:,} bytes, more than {MOST_AT_ONCE:,}; split it.")
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"Data file {file} is not UTF-8 text (byte {error.start}); convert it to UTF-8.") from error
    except OSError as error:
        raise DataError(f"Data file {file} cannot be read ({error.strerror}); check it and its permissions.") from error
    if not text.strip():
        raise DataError(f"Data file {file} holds no text; give a file with text.")
    if text.count("\0") > len(text) // _RARE:  # as in UTF-16, whose letters of English UTF-8 reads as well
        raise DataError(f"Data file {file} is not UTF-8 text (it has NULs between letters); convert it to UTF-8.")
    if suffix(file) in (".txt", *MARKDOWN):
        refuse_table(text, file)
    return text


MESSAGES = "messages"
TEXT_COLUMNS = ("text", "content", "document", "article", "passage", "body", "raw_content", "markdown", "code")
ASKED_COLUMNS = ("instruction", "prompt", "question", "query", "input", "inputs")
ANSWER_COLUMNS = ("output", "response", "answer", "answers", "completion", "chosen", "target", "targets", "outputs")
IMAGE_COLUMNS = ("image", "images", "image_path", "file_name", "image_file", "picture", "photo", "img", "jpg", "png")
CAPTION_COLUMNS = ("caption", "captions", "text", "description", "content")
KNOWN_COLUMNS = frozenset(
    {"messages", *TEXT_COLUMNS, *IMAGE_COLUMNS, *CAPTION_COLUMNS, *ASKED_COLUMNS, *ANSWER_COLUMNS}
)
MOST_COLUMNS = 100
SHUFFLE_BUFFER = 1_000
SHUFFLE_BYTES = 2**28  # of all that they hold


def holds_conversations(source: str) -> bool:
    """Whether a SOURCE is a table of messages."""
    files = local_files(source)
    if is_plain_text(files):
        return False
    table = SourceTable.open(source, files)
    return table.text_column == MESSAGES


@dataclass(frozen=True)
class SourceTable:
    """Rows of local files that are no plain text, or of a Hub data set.

    Attributes:
        place: name of the source in error messages.
        columns: their names; of very many only those that are `KNOWN_COLUMNS`, or wanted.
        wanted: the column that the SOURCE names, or None.
        folder: to which paths in the rows of local files refer.
    """

    source: str
    place: str
    columns: list[str]
    wanted: str | None
    folder: Path | None
    _stream: Any

    @classmethod
    def open(cls, source: str, files: list[Path] | None) -> SourceTable:
        """Open a SOURCE: local files, or the id of a Hub data set where there are none (DataError)."""
        column = named_column(source)[1]
        if files:
            kind, folder = LOADERS[suffix(files[0])], files[0].parent
            rows = {"json": JsonRows, "csv": CsvRows, "parquet": ParquetRows}[kind](files)
            # Markdown beside them is not read, so that the message says what was.
            is_folder = os.path.isdir(os.path.expanduser(named_column(source)[0]))
            place = f"{source} (its {suffix(files[0])} files)" if is_folder else source
            return cls._of_rows(source, place, column, folder, rows)
        hub = HubSource.parse(source)
        with _readable(source, local=False):
            return cls._of_rows(source, hub.name, hub.column, None, _hub_rows(hub))

    @classmethod
    def _of_rows(cls, source: str, place: str, column: str | None, folder: Path | None, rows: Rows) -> SourceTable:
        if isinstance(rows, ParquetRows):
            columns = _known(rows.names(), column)
            return cls(source, place, columns, column, folder, replace(rows, columns=columns))
        names = dict.fromkeys(name for row in itertools.islice(rows, SHUFFLE_BUFFER) for name in row)
        return cls(source, place, _known(names, column), column, folder, rows)

    def first(self, count: int) -> list[dict[str, Any]]:
        """The first rows, fewer if they are long."""
        found, size = [], 0
        with _readable(self.source, self.folder is not None):
            for row in itertools.islice(self._rows(), count):
                found.append(row)
                size += size_of(row)
                if size > SHUFFLE_BYTES:
                    break
        return found

    def shuffled(self, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row after its name for error messages, in an order given by the seed."""
        with _readable(self.source, self.folder is not None):
            for index, row in enumerate(_shuffled(self._rows(), seed)):
                yield f"{self.place}, shuffled row {index}", row

    @property
    def text_column(self) -> str:
        """The column that holds the text: the requested one, `messages`, or the first known name (DataError).

        Where a row has what was asked and what was answered in columns of their own, both together are `messages`.
        """
        return MESSAGES if self._asked is not None else text_column_of(self.columns, self.wanted, self.place)

    def check_columns(self) -> None:
        """Refuse (DataError) a table without columns of text or images."""
        if not {*IMAGE_COLUMNS} & {*self.columns}:
            _ = self.text_column

    @property
    def read_columns(self) -> list[str]:
        """The columns whose texts are read, as `first` gives them."""
        return [self.text_column] if self._asked is None else [name for name in self._asked if name is not None]

    @property
    def _asked(self) -> tuple[str, str, str | None] | None:
        """The columns of question and answer, and of what the question is about; None where others hold the text."""
        if self.wanted is not None or {MESSAGES, *TEXT_COLUMNS, *IMAGE_COLUMNS} & {*self.columns}:
            return None
        asked, answered = (
            next((n for n in names if n in self.columns), None) for names in (ASKED_COLUMNS, ANSWER_COLUMNS)
        )
        about = "input" if asked == "instruction" and "input" in self.columns else None
        return None if asked is None or answered is None else (asked, answered, about)

    def _rows(self) -> Iterator[dict[str, Any]]:
        asked = self._asked
        for row in self._stream:
            yield {name: row.get(name) for name in self.columns} | (
                {} if asked is None else _turns(self.place, row, *asked)
            )


def _turns(place: str, row: dict[str, Any], asked: str, answered: str, about: str | None) -> dict[str, Any]:
    """The messages of a row with a question and an answer; a row that lacks one of them has none (DataError: what the
    question is about is no text).
    """
    question, answer, subject = row.get(asked), row.get(answered), row.get(about) if about else None
    if isinstance(subject, list | dict):
        kind = type(subject).__name__
        raise DataError(f"Data source {place}, column {about}: {kind} is no text; correct the rows.")
    if isinstance(answer, list) and answer:  # several, of which each is right
        answer = answer[0]
    if question is None or answer is None:
        return {MESSAGES: None}
    question = f"{question}\n\n{subject}" if subject else question
    return {MESSAGES: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


# Settings of a builder of `datasets` that say what it is of, how it works, or what types columns have.
_OF_BUILDER = {"name", "version", "data_dir", "data_files", "description", "features", "batch_size", "chunksize"}
_FOLLOWED = {"sep", "delimiter", "field"}  # those that are followed here


def _hub_rows(hub: HubSource) -> Rows:
    """Rows of a data set of the Hub.

    Raises:
        Exception: there is none, its files are of a kind that is not read, lie elsewhere, or are read in an odd way.
    """
    import datasets
    from datasets.utils.file_utils import xopen

    commit = _checked_commit(hub.name)
    with _own_files_alone(hub.name):
        builder = datasets.load_dataset_builder(hub.name, hub.config, revision=commit)
    kind, config = type(builder).__mro__[1].__name__, builder.config
    if kind not in ("Json", "Csv", "Parquet", "Text"):
        raise ValueError(f"its files are of the kind {kind}, and only JSON, CSV, Parquet, and text are read")
    plain = type(config)()
    for name in sorted(vars(plain).keys() - _OF_BUILDER - _FOLLOWED):
        if getattr(config, name) != getattr(plain, name):
            raise ValueError(f"its card sets {name} to {getattr(config, name)!r:.80}, which is not followed")
    if hub.split not in (found := config.data_files or {}):
        raise ValueError(f"there is no split {hub.split!r}; there are {listed(map(str, found))}")
    manager = datasets.StreamingDownloadManager(base_path=builder.base_path)
    extracted = manager.download_and_extract(list(found[hub.split]))
    files = [file for entry in extracted for file in manager.iter_files(entry)]
    if kind == "Parquet":
        return ParquetRows(files, open=xopen)
    if kind == "Csv":
        return CsvRows(files, xopen, config.delimiter or config.sep)
    return LineRows(files, xopen) if kind == "Text" else JsonRows(files, xopen, config.field)


@contextmanager
def _own_files_alone(name: str) -> Iterator[None]:
    """Refuse (ValueError), within the block, what a data set's card names outside of the data set: paths of this
    machine, addresses, and other data sets.

    Args:
        name: id of the data set on the Hub.
    """
    from datasets import data_files

    resolve = data_files.resolve_pattern
    root = os.path.abspath(name) if os.path.exists(name) else f"hf://datasets/{name}@"

    def resolved(pattern: str, base_path: str, *rest: Any, **options: Any) -> list[str]:
        if not f"{base_path}".startswith((root, name)) or ".." in f"{base_path}/{pattern}".split("/"):
            raise ValueError(f"its card names the folder {base_path:.80}, which is not its own")
        if "://" in pattern or "::" in pattern or pattern.startswith(("/", "~")):
            raise ValueError(f"its card names the files {pattern:.80}, which are not its own")
        return resolve(pattern, base_path, *rest, **options)

    data_files.resolve_pattern = resolved
    try:
        yield
    finally:
        data_files.resolve_pattern = resolve


def _checked_commit(name: str) -> str | None:
    """The commit of a data set that can be read, where the Hub can be asked.

    Raises:
        DataError: the Hub lacks or hides it, or cannot be reached: `datasets` would tell of five tries; or its card is
            more than `datasets` can read.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import validate_repo_id

    if constants.HF_HUB_OFFLINE or os.path.exists(name):
        return None
    validate_repo_id(name)
    api = HfApi(library_name="kvconvert")

    def cards(commit: str | None) -> list[Path]:
        found = list(api.get_paths_info(name, _CARDS, repo_type="dataset", revision=commit))
        if any(entry.size > _MOST_OF_CARD for entry in found):
            raise DataError(f"Data set {name} has a card of more than {_MOST_OF_CARD >> 20} MiB; use another.")
        return [Path(api.hf_hub_download(name, entry.path, repo_type="dataset", revision=commit)) for entry in found]

    try:
        commit = ask_hub(name, lambda: api.dataset_info(name, expand=["sha"])).sha
        for card in ask_hub(name, lambda: cards(commit)):
            check_card(card)
    except HubError as error:
        raise DataError(str(error)) from None
    return commit


_CARDS = ["README.md", ".huggingface.yaml", "dataset_infos.json"]
_MOST_OF_CARD = 2**22
_LONG_NUMBER, _MANY = re.compile(r"[\s\d_:+.-]{1000,}"), re.compile(r"\s*[-+]?\d[\s\w:]{6,}")  # of YAML, to any base


def check_card(card: Path) -> None:
    """Refuse (DataError) YAML in which entries stand for others, of which a few lines make terabytes of a message, or
    that takes quadratic time: nested by the thousand, or with thousands of digits of a number to base 60 (1:59:59); or
    with millions of classes, of which `datasets` makes a list.
    """
    import yaml
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    header = card.read_bytes().decode(errors="replace")  # with its ends of lines, as the Hub's own client reads it
    if card.suffix == ".md":
        found = REGEX_YAML_BLOCK.search(header)
        header = found[2] if found else ""
    parts: list[tuple[bool, str | None]] = [(False, None)]  # those that are open: maps, and the key whose value comes
    try:
        for event in yaml.parse(header, yaml.SafeLoader):
            is_map, key = parts[-1]
            if isinstance(event, yaml.AliasEvent):
                raise DataError(f"The card {card.name} of the data set refers to parts of itself (*name); use another.")
            if isinstance(event, yaml.CollectionEndEvent):
                parts.pop()
                parts[-1] = parts[-1][0], None
            elif isinstance(event, yaml.CollectionStartEvent):
                parts.append((isinstance(event, yaml.MappingStartEvent), None))
            elif isinstance(event, yaml.ScalarEvent):
                is_key = is_map and key is None
                is_class = parts[-2][1] == "names" if is_key else key == "num_classes"
                if _LONG_NUMBER.fullmatch(event.value) or (is_class and _MANY.fullmatch(event.value)):
                    raise DataError(f"The card {card.name} of the data set has too large a number; use another.")
                parts[-1] = is_map, event.value if is_key else None
            if len(parts) > MAX_DEPTH:
                raise DataError(f"The card {card.name} of the data set has more than {MAX_DEPTH} levels; use another.")
    except yaml.YAMLError as error:
        reason = first_line(error)
        raise DataError(f"The card {card.name} of the data set cannot be read ({reason}); use another.") from error


def _known(names: Iterable[str], wanted: str | None) -> list[str]:
    """The columns of a table that are read: a buffer of rows with thousands would fill the memory."""
    found = list(names)
    if len(found) <= MOST_COLUMNS:
        return found
    return [name for name in found if name in KNOWN_COLUMNS or name == wanted] or found[:MOST_COLUMNS]


@contextmanager
def _readable(source: str, local: bool) -> Iterator[None]:
    """Turn the errors of `datasets` into a DataError of one sentence."""
    try:
        yield
    except KvconvertError:
        raise
    except Exception as error:  # whatever tables may hold, above all in what they say of themselves
        remedy = "check the file" if local else "check the name, the configuration, the split and the network"
        raise DataError(
            f"Data source {source} cannot be read through datasets ({first_line(error)}); {remedy}."
        ) from error


def _shuffled(rows: Iterable[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Rows in an order that depends on the seed and the rows alone, not on the version of `datasets`."""
    chance, buffer, size = random.Random(seed), [], 0
    for row in rows:
        buffer.append(row)
        size += size_of(row)
        while len(buffer) > SHUFFLE_BUFFER or (size > SHUFFLE_BYTES and len(buffer) > 1):
            index = chance.randrange(len(buffer) - 1)
            taken, buffer[index] = buffer[index], buffer[-1]
            buffer.pop()
            size -= size_of(taken)
            yield taken
    chance.shuffle(buffer)
    yield from buffer


def size_of(value: Any) -> int:
    """Bytes of memory that a value takes, roughly: lists and objects with all that they hold."""
    own = 64  # an empty one takes memory, too
    if isinstance(value, str | bytes):
        return own + len(value)
    held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return own + sum(map(size_of, held))


def shown_columns(columns: list[str]) -> str:
    """The names of a table's columns, as many as a sentence takes."""
    names = [printable(name[:80]) for name in columns[:20]]
    return listed([*names, "others"] if len(columns) > len(names) else names, "and")


def text_column_of(columns: list[str], wanted: str | None, place: str) -> str:
    """The column that holds the text: the requested one, `messages`, or the first known name."""
    if not columns:
        raise DataError(f"Data source {place} holds no rows; give a source with text.")
    if wanted is not None:
        if wanted not in columns:
            raise DataError(
                f"Data source {place} has no column {wanted!r}; name one of its columns, {shown_columns(columns)}."
            )
        return wanted
    for name in (MESSAGES, *TEXT_COLUMNS):
        if name in columns:
            return name
    raise DataError(
        f"Data source {place} has none of the text columns messages, {listed(TEXT_COLUMNS, 'or')}, and no columns of "
        f"questions and answers; its columns are {shown_columns(columns)}; rename one, or name it: "
        "name:config:split:column, file::column."
    )


ROWS_INSPECTED = 64  # of a table, to tell what it holds
_LINES_INSPECTED = 8
_MOST_TRIED = 2**16  # characters of a row that may be JSON
_RARE = 10  # characters for each NUL that a text may have
# Names of lists of messages, and of the fields that a message has in one form or another.
_LISTS = ("messages", "conversations", "conversation", "dialog", "dialogue", "turns", "chosen")
_SPEAKERS, _SAID = {"role", "from", "speaker"}, {"content", "value", "text", "parts"}
# How they are written: by JSON, also twice over, and by Python, whose lists and arrays tables made by pandas hold.
_BEGINS = re.compile(r"[\s\ufeff]*(?:b?[\"']\s*)?(?:\w+\(\s*)?[\[({]")
_NAMES = [re.compile(rf"[\"'](?:{'|'.join(sorted(names))})\\*[\"']\s*:") for names in (_SPEAKERS, _SAID)]
_NEAR = 200  # characters of a text within which one of them stands


def is_conversation(value: Any) -> bool:
    """Whether a value of JSON is a list of messages, or an object with one."""
    if isinstance(value, dict):
        return any(is_conversation(value[name]) for name in _LISTS if name in value)
    turns = isinstance(value, list) and bool(value) and all(isinstance(turn, dict) for turn in value)
    return turns and all(_SPEAKERS & {*turn} and _SAID & {*turn} for turn in value)


def spells_conversation(text: str) -> bool:
    """Whether a text is a conversation, or several, as JSON or Python writes them.

    One of a message's fields is near the beginning then; prose may begin with a bracket and quote a message later.
    """
    if _BEGINS.match(text) is None:
        return False
    found = [names.search(text) for names in _NAMES]
    return all(found) and min(one.start() for one in found if one) < _NEAR


def refuse_spelled_conversations(values: Iterable[Any], place: str) -> None:
    """Refuse (DataError) a column most of whose texts are conversations as JSON or Python writes them."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    spelled = sum(map(spells_conversation, texts))
    if 2 * spelled > len(texts):
        raise DataError(
            f"Data source {place} holds conversations spelled as JSON or Python text, which would be read as prose; "
            "store them as lists of messages (json.loads of each), so that the chat template writes them."
        )


def spells_records(values: Iterable[Any]) -> bool:
    """Whether most texts of a column are JSON objects, or lists of them."""
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    return 2 * sum(len(text) <= _MOST_TRIED and _is_record(_json(text)) for text in texts) > len(texts)


def refuse_table(text: str, file: Path) -> None:
    """Refuse (DataError) a text most of whose first lines, or which as a whole, are JSON, or spell conversations."""
    lines = list(islice((line for line in text.splitlines() if line.strip()), _LINES_INSPECTED))
    found = [_json(line) for line in lines]
    if 2 * sum(isinstance(value, dict) for value in found) > len(lines):
        raise DataError(f"Data file {file} holds a JSON object a line, not prose; name it {file.stem}.jsonl.")
    if _json(text):
        raise DataError(f"Data file {file} holds a JSON document, not prose; name it {file.stem}.json.")
    if spells_conversation(text) or 2 * sum(map(spells_conversation, lines)) > len(lines):
        advice = f'write each to a line of {file.stem}.jsonl, as {{"messages": [...]}}'
        raise DataError(f"Data file {file} holds conversations spelled as JSON or Python text, not prose; {advice}.")
    if 2 * sum(map(_is_record, found)) > len(lines):
        raise DataError(
            f"Data file {file} holds a list of JSON objects a line, not prose; write each object to a line of "
            f"{file.stem}.jsonl."
        )


def _is_record(value: Any) -> bool:
    """Whether a value of JSON is an object, or a list of objects."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(value, dict) for value in values)


def _json(text: str) -> Any:
    """The JSON value that a text spells, or None."""
    if text.lstrip()[:1] not in ("[", "{"):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None
