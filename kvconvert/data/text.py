"""Reads text and cuts it into token samples, for calibration and for measuring fidelity.

A SOURCE is a .txt, .jsonl, .json, .csv or .parquet file, a directory of one of these kinds, either of them with
optional `::column`, source code or Markdown (a file, or a directory with files of `CODE`), a Hub data set id with
optional `:config:split:column`, or nothing at all, which means the public-domain text that ships with kvconvert.
`kvconvert.data.mixture` takes several.

How samples are cut, always without overlap and padding, so that every sample has exactly the requested length:

- Plain text (.txt, code): each file is one document. All documents are tokenized and joined, the result is divided into
  windows, and the seed chooses which windows are taken; they keep their order in the text.
- Rows (of all others): rows are shuffled by the seed within a moving buffer of `SHUFFLE_BUFFER` rows, joined,
  and cut into consecutive windows until there are enough; a row may span windows and a window may hold several rows
  (what AutoAWQ does, and llm-compressor with `concatenate_data`). Only as many rows are read or downloaded as needed.

Documents are separated by the tokenizer's end-of-sequence token. Where the tokenizer itself begins a text with a
beginning-of-sequence token, every sample begins with one, because models trained so attend to it as a sink.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import logging
import random
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvconvert.bundle.locate import missing_below
from kvconvert.bundle.manifest import DataInfo
from kvconvert.errors import DataError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EMBEDDED = {"calibration": "books-calib.txt", "evaluation": "books-val.txt"}
LOADERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
# In a directory beside other data these are about it, as captions and settings are.
BESIDE_DATA = (".json", ".csv")
MARKDOWN = (".md", ".rst")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".jsx", ".ts", ".tsx", ".go", ".rs"),
    *(".rb", ".php", ".swift", ".kt", ".scala", ".cs", ".sh", ".sql", ".lua", ".jl", ".r", ".html", ".css", ".toml"),
    *(".yaml", ".yml", ".tex"),
)
_DATA_SUFFIXES = (".txt", *LOADERS)
SUFFIXES = (*_DATA_SUFFIXES, *MARKDOWN, *CODE)
TEXT_COLUMNS = ("text", "content", "document", "article", "passage", "body", "raw_content", "markdown", "code")
SHUFFLE_BUFFER = 1_000
PIECE_CHARACTERS = 1_000_000  # a long text is tokenized piece by piece: the peak of memory is then one piece's encoding


@dataclass(frozen=True)
class TokenData:
    """Token samples and where they come from.

    Attributes:
        ids: int64 [samples, length].
        info: source, sizes, seed and the sha256 of the ids (and pixels); no text.
        extras: for each sample the model's further inputs, as for a batch of that sample alone (pixel values, sizes,
            token types); empty for text.
        visual: which tokens stand for parts of images, bool [samples, length]; None for text.
        warnings: sentences on what in them is unlike the model, see `kvconvert.data.mixture`.
    """

    ids: torch.Tensor
    info: DataInfo
    extras: tuple[dict[str, torch.Tensor], ...] = ()
    visual: torch.Tensor | None = None
    warnings: tuple[str, ...] = ()

    def first(self, count: int) -> TokenData:
        """The first samples alone, under the fingerprint of all."""
        visual = None if self.visual is None else self.visual[:count]
        return TokenData(self.ids[:count], self.info.model_copy(update={"samples": count}), self.extras[:count], visual)


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


def load_token_samples(
    source: str | None,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    seed: int,
    default: Literal["calibration", "evaluation"] = "calibration",
) -> TokenData:
    """Read a SOURCE and cut it into samples; the same arguments and files give the same ids.

    Args:
        source: see the module's text; None takes the embedded text named by `default`.
        tokenizer: the model's own tokenizer, with a chat template if rows hold `messages`.
        samples: number of samples; more than the source holds are an error that says how many it has.
        length: tokens per sample.
        seed: chooses windows of plain text, and the order of rows.
        default: the embedded text that is used without a source.

    Raises:
        DataError: the source is missing, empty, undecodable, of an unknown kind, has no text column, or is too short.
        UsageError: samples or length is not positive.
    """
    if samples < 1 or length < 2:
        raise UsageError(
            f"{samples} samples of {length} tokens cannot be cut; request at least 1 sample of at least 2 tokens."
        )
    prefix = _prefix(tokenizer)
    window, name = length - len(prefix), source_name(source, EMBEDDED[default])
    ids, whole = _token_ids(source, tokenizer, seed, default, samples * window)
    available = len(ids) // window
    if available < samples:
        found = f"Data source {name} holds {len(ids)} tokens"
        if available == 0:
            raise DataError(f"{found}, but one sample needs {window}; give more text or a smaller sequence length.")
        raise DataError(
            f"{found}, which make {available} samples of {length}, but {samples} samples ({samples * window} tokens) "
            "are requested; give more text, or request fewer or shorter samples."
        )
    rows = [prefix + ids[i * window : (i + 1) * window] for i in _windows(available, samples, seed, whole)]
    return _token_data(rows, name, seed)


def load_held_out_samples(
    source: str | None,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    seed: int,
    apart_from: tuple[int, int],
) -> TokenData:
    """Samples of what `load_token_samples` leaves over, for choices that calibration's own samples must not decide.

    Args:
        source, tokenizer, seed: as of those samples; without a source, the calibration text that ships with kvconvert.
        samples: how many; fewer where the rest of the text has no more that are evenly spread. Consecutive text, or,
            where calibration left none that is long enough, what lies between its samples, joined.
        length: tokens per sample.
        apart_from: number and length of the samples that are left out.

    Raises:
        DataError: the rest of the text has not one sample; see also `load_token_samples`.
    """
    prefix = _prefix(tokenizer)
    window, taken = length - len(prefix), apart_from[1] - len(prefix)
    name = source_name(source, EMBEDDED["calibration"])
    used = apart_from[0] * taken
    ids, whole = _token_ids(source, tokenizer, seed, "calibration", used + samples * window)
    starts, rest, at = [], [], 0
    for index in [*_windows(len(ids) // taken, apart_from[0], seed, whole), None]:
        gap = len(ids) if index is None else index * taken
        starts += range(at, gap - window + 1, window)
        rest += ids[at:gap]
        at = gap + taken
    if not starts:  # nowhere so many in a row: what lies between the samples, joined
        ids, starts = rest, list(range(0, len(rest) - window + 1, window))
    if not starts:
        raise DataError(
            f"Data source {name} leaves {len(rest)} tokens outside of the {apart_from[0]} calibration samples, and "
            f"{window} are needed; give more text, or calibrate on fewer samples."
        )
    count = min(samples, len(starts))
    rows = [prefix + ids[at : at + window] for at in (starts[i * len(starts) // count] for i in range(count))]
    return _token_data(rows, name, seed)


def _token_ids(
    source: str | None,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    default: Literal["calibration", "evaluation"],
    enough: int,
) -> tuple[list[int], bool]:
    """All tokens of plain text, or `enough` of shuffled rows; and whether it is plain text."""
    if source is None:
        text = (importlib.resources.files("kvconvert.data.texts") / EMBEDDED[default]).read_text(encoding="utf-8")
        return _join([_encode(text, tokenizer)], tokenizer, None), True
    files = local_files(source)
    if is_plain_text(files):
        return _join((_encode(_read_text(file), tokenizer) for file in files), tokenizer, None), True
    return _join(_row_ids(source, files, tokenizer, seed), tokenizer, enough), False


def _windows(available: int, samples: int, seed: int, whole: bool) -> list[int]:
    """The windows that become samples: chosen by the seed from plain text, the first of shuffled rows."""
    return sorted(random.Random(seed).sample(range(available), samples)) if whole else list(range(samples))


def _token_data(rows: list[list[int]], name: str, seed: int) -> TokenData:
    ids = torch.tensor(rows, dtype=torch.int64)
    digest = hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    return TokenData(ids, DataInfo(source=name, samples=len(rows), length=ids.shape[1], seed=seed, sha256=digest))


def spaced_samples(source: str, tokenizer: PreTrainedTokenizerBase, samples: int, length: int) -> torch.Tensor:
    """Cut a local text into samples that begin at equal distances: int64 [samples, length].

    Unlike a choice by seed they cover the whole text, and more of them refine the same comparison.

    Raises:
        DataError: the text cannot be read, or is too short.
    """
    prefix = _prefix(tokenizer)
    window = length - len(prefix)
    ids = _join((_encode(_read_text(file), tokenizer) for file in local_files(source) or ()), tokenizer, None)
    if len(ids) < samples * window:
        raise DataError(
            f"{source} holds {len(ids)} tokens, fewer than {samples} samples of {length}; request fewer or shorter "
            "ones."
        )
    step = len(ids) // samples
    return torch.tensor([prefix + ids[i * step : i * step + window] for i in range(samples)], dtype=torch.int64)


def source_name(source: str | None, default: str) -> str:
    """The source's name in the manifest: the last part of a local path, because bundles are shared, paths private."""
    if source is None:
        return f"kvconvert:{default}"
    place, column = named_column(source)
    path = Path(place).expanduser()
    return path.resolve().name + (f"::{column}" if column else "") if path.exists() else source


def named_column(source: str) -> tuple[str, str | None]:
    """A local path and the column that `path::column` names; any other SOURCE as it is, and None."""
    place, _, column = source.rpartition("::")
    if place and column and not Path(source).expanduser().exists() and Path(place).expanduser().exists():
        return place, column
    return source, None


def local_files(source: str) -> list[Path] | None:
    """The files a local SOURCE stands for, all of one kind, sorted; None if it has to be a Hub id."""
    if not source.strip():
        raise DataError(
            "The data source is empty text; name a file, a directory or a Hub data set id, or leave it out."
        )
    source, column = named_column(source)
    path = Path(source).expanduser()
    files = _files(path)
    if files is not None and column is not None and is_plain_text(files):
        raise DataError(f"Data source {source} is plain text, which has no column {column!r}; leave it out.")
    if files is not None:
        return files
    head = source.partition(":")[0]
    if Path(head).expanduser().exists():
        raise DataError(
            f"Data source {source} adds :config:split:column to a local path; only Hub data sets take that, and a "
            "column of local files is named as in file.jsonl::column."
        )
    if head.startswith(("/", ".", "~")) or head.count("/") > 1 or Path(head).suffix in SUFFIXES:
        raise DataError(f"Data source {source} does not exist; check the path.")
    if "/" in head and (owner := missing_below(head)) is not None:
        raise DataError(
            f"Data source {source} does not exist, and as {owner} is a directory here, the Hub was not asked; check "
            "the path, or run from another directory if you mean a data set of the Hub."
        )
    return None


def _files(path: Path) -> list[Path] | None:
    """The data files at a path, all of one kind, sorted; None if there is nothing."""
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise DataError(f"Data file {path} is not of a known kind; convert it to {_listed(_DATA_SUFFIXES, 'or')}.")
        if path.stat().st_size == 0:
            raise DataError(f"Data file {path} is empty; give a file with text.")
        return [path]
    if path.is_dir():
        found = [p for p in sorted(path.rglob("*")) if p.suffix in SUFFIXES and p.is_file()]
        files = [p for p in found if not any(part.startswith(".") for part in p.relative_to(path).parts)]
        if any(p.suffix in {*_DATA_SUFFIXES, *CODE} - {*BESIDE_DATA} for p in files):
            files = [p for p in files if p.suffix not in BESIDE_DATA]
        if not files:
            raise DataError(
                f"Data directory {path} holds no {_listed(_DATA_SUFFIXES, 'or')} file and no code; name the directory "
                "that does."
            )
        return _of_one_kind(path, files)
    return None


def _of_one_kind(directory: Path, files: list[Path]) -> list[Path]:
    """Tables or .txt files if there are some; with code everything that is plain text; else Markdown.

    So a README.md beside data is not data, and a requirements.txt beside code is not all that is read.
    """
    kinds = {file.suffix for file in files}
    if kinds & {*LOADERS}:
        files = [file for file in files if file.suffix in _DATA_SUFFIXES]
    elif ".txt" in kinds and not kinds & {*CODE}:
        files = [file for file in files if file.suffix == ".txt"]
    mixed = sorted({file.suffix for file in files} & {*_DATA_SUFFIXES})
    if len(mixed) > 1:
        raise DataError(f"Data directory {directory} mixes {_listed(mixed, 'and')} files; keep one kind in it.")
    return files


def is_plain_text(files: list[Path] | None) -> bool:
    """Whether local files are documents, each of one text, and not tables."""
    return files is not None and files[0].suffix not in LOADERS


def holds_conversations(source: str | None) -> bool:
    """Whether a SOURCE is a table of messages."""
    files = None if source is None else local_files(source)
    if source is None or is_plain_text(files):
        return False
    table = Table.open(source, files)
    return _column(table.columns, table.wanted, table.place) == "messages"


def _read_text(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"Data file {file} is not UTF-8 text (byte {error.start}); convert it to UTF-8.") from error
    except OSError as error:
        raise DataError(f"Data file {file} cannot be read ({error.strerror}); check it and its permissions.") from error
    if not text.strip():
        raise DataError(f"Data file {file} holds no text; give a file with text.")
    return text


@dataclass(frozen=True)
class Table:
    """Rows of local files that are no plain text, or of a Hub data set, read as a stream through `datasets`.

    Attributes:
        place: name of the source in error messages.
        columns: their names.
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
    def open(cls, source: str, files: list[Path] | None) -> Table:
        """Open a SOURCE: local files, or the id of a Hub data set where there are none (DataError)."""
        import datasets

        hub = None if files else HubSource.parse(source)
        with _readable(source, local=hub is None):
            if hub is None:
                kind, names = LOADERS[files[0].suffix], [str(file) for file in files]
                stream = datasets.load_dataset(kind, data_files=names, split="train", streaming=True)
            else:
                stream = datasets.load_dataset(hub.name, hub.config, split=hub.split, streaming=True)
            # Images stay encoded: each is decoded where it is used, so that an error can name its row.
            encoded = datasets.Image(decode=False)
            for name, feature in (stream.features or {}).items():
                if isinstance(feature, datasets.Image):
                    stream = stream.cast_column(name, encoded)
                elif isinstance(feature, datasets.List) and isinstance(feature.feature, datasets.Image):
                    stream = stream.cast_column(name, datasets.List(encoded))
            columns = list(stream.features) if stream.features is not None else list(next(iter(stream), {}))
        place, folder = (source, files[0].parent) if hub is None else (hub.name, None)
        return cls(source, place, columns, hub.column if hub else named_column(source)[1], folder, stream)

    def first(self, count: int) -> list[dict[str, Any]]:
        """The first rows."""
        with _readable(self.source, self.folder is not None):
            return list(itertools.islice(self._stream, count))

    def shuffled(self, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row after its name for error messages, in an order given by the seed."""
        with _readable(self.source, self.folder is not None):
            for index, row in enumerate(_shuffled(self._stream, seed)):
                yield f"{self.place}, shuffled row {index}", row


@contextmanager
def _readable(source: str, local: bool) -> Iterator[None]:
    """Turn the errors of `datasets` into a DataError of one sentence."""
    import datasets

    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        cause = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        remedy = "check the file" if local else "check the name, the configuration, the split and the network"
        raise DataError(f"Data source {source} cannot be read through datasets ({cause}); {remedy}.") from error


def _row_ids(
    source: str, files: list[Path] | None, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Iterator[list[int]]:
    """Token ids of each row in shuffled order."""
    table = Table.open(source, files)
    column = _column(table.columns, table.wanted, table.place)
    empty = 0
    for place, row in table.shuffled(seed):
        ids = _encode_row(row.get(column), tokenizer, f"{place}, column {column}")
        if ids:
            yield ids
        else:
            empty += 1
    if empty:
        logger.info("%s: %d rows without text in column %s were skipped", table.place, empty, column)


def _shuffled(rows: Iterable[dict[str, Any]], seed: int) -> Iterator[dict[str, Any]]:
    """Rows in an order that depends on the seed and the rows alone, not on the version of `datasets`."""
    chance, buffer = random.Random(seed), []
    for row in rows:
        if len(buffer) < SHUFFLE_BUFFER:
            buffer.append(row)
            continue
        index = chance.randrange(SHUFFLE_BUFFER)
        yield buffer[index]
        buffer[index] = row
    chance.shuffle(buffer)
    yield from buffer


def _column(columns: list[str], wanted: str | None, place: str) -> str:
    """The column that holds the text: the requested one, `messages`, or the first known name."""
    if not columns:
        raise DataError(f"Data source {place} holds no rows; give a source with text.")
    if wanted is not None:
        if wanted not in columns:
            raise DataError(f"Data source {place} has no column {wanted!r}; its columns are {_listed(columns, 'and')}.")
        return wanted
    for name in ("messages", *TEXT_COLUMNS):
        if name in columns:
            return name
    raise DataError(
        f"Data source {place} has none of the text columns messages, {_listed(TEXT_COLUMNS, 'or')}; its columns are "
        f"{_listed(columns, 'and')}; rename one, or name it: name:config:split:column, file::column."
    )


def _encode_row(value: Any, tokenizer: PreTrainedTokenizerBase, place: str) -> list[int]:
    """Ids of one row: text as it is, messages through the chat template; empty for a row without either."""
    if value is None:
        return []
    if isinstance(value, str):
        return _encode(value, tokenizer) if value.strip() else []
    if isinstance(value, list) and all(isinstance(message, dict) and "role" in message for message in value):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"Data source {place}: rows hold messages, but the tokenizer {tokenizer.name_or_path!r} has no chat "
                "template; use a model with one, or data with a text column."
            )
        if not value:
            return []
        # Optional fields (tool_calls, name, ...) that the table form filled with null are absent for the template.
        messages = [{key: field for key, field in message.items() if field is not None} for message in value]
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:  # templates raise jinja2 errors of any kind
            raise DataError(
                f"Data source {place}: the chat template refuses the row ({error}); correct the row."
            ) from error
        return _encode(text, tokenizer)
    raise DataError(
        f"Data source {place}: {type(value).__name__} is neither text nor a list of messages; name another column."
    )


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-sequence token if the tokenizer puts it before a text by itself, else nothing."""
    start = tokenizer.bos_token_id
    return [start] if start is not None and tokenizer("a")["input_ids"][:1] == [start] else []


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids without the tokenizer's special tokens; a long text is cut into pieces at line ends."""
    ids, start = [], 0
    while start < len(text):
        end = len(text)
        if end - start > PIECE_CHARACTERS:
            newline = text.rfind("\n", start, start + PIECE_CHARACTERS)
            end = newline + 1 if newline > start else start + PIECE_CHARACTERS
        ids += tokenizer(text[start:end], add_special_tokens=False, verbose=False)["input_ids"]
        start = end
    return ids


def _join(documents: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, enough: int | None) -> list[int]:
    """All ids in one list, documents separated by the end-of-sequence token, stopping at `enough` ids."""
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined: list[int] = []
    for ids in documents:
        # A rendered conversation may end in the separator, or begin with it, already.
        joined += (separator if joined and joined[-1:] != separator and ids[:1] != separator else []) + ids
        if enough is not None and len(joined) >= enough:
            break
    return joined


def _listed(names: Iterable[str], word: str) -> str:
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {word} {names[-1]}"
