"""Rows of a SOURCE that is no plain text, read as a stream through `datasets`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvconvert.data.sources import LOADERS, HubSource, is_plain_text, listed, local_files, named_column
from kvconvert.errors import DataError

TEXT_COLUMNS = ("text", "content", "document", "article", "passage", "body", "raw_content", "markdown", "code")
SHUFFLE_BUFFER = 1_000


def holds_conversations(source: str | None) -> bool:
    """Whether a SOURCE is a table of messages."""
    files = None if source is None else local_files(source)
    if source is None or is_plain_text(files):
        return False
    table = Table.open(source, files)
    return text_column_of(table.columns, table.wanted, table.place) == "messages"


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


def text_column_of(columns: list[str], wanted: str | None, place: str) -> str:
    """The column that holds the text: the requested one, `messages`, or the first known name."""
    if not columns:
        raise DataError(f"Data source {place} holds no rows; give a source with text.")
    if wanted is not None:
        if wanted not in columns:
            raise DataError(f"Data source {place} has no column {wanted!r}; its columns are {listed(columns, 'and')}.")
        return wanted
    for name in ("messages", *TEXT_COLUMNS):
        if name in columns:
            return name
    raise DataError(
        f"Data source {place} has none of the text columns messages, {listed(TEXT_COLUMNS, 'or')}; its columns are "
        f"{listed(columns, 'and')}; rename one, or name it: name:config:split:column, file::column."
    )
