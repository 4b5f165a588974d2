"""Images with text: where they come from, and how one becomes a document for a processor.

A document is an image with its caption, a question about it and its answer, or a conversation with images in it.
Sources of documents:

- a directory of images, each with its caption in a text file of the same stem, or in a captions.jsonl or
  metadata.jsonl with a `file_name` and a text column;
- rows (.jsonl, .parquet, a Hub data set) with an image column (a path, bytes, or a list of either) and a text column,
  perhaps a `question` and an `answer`; or with `messages` whose parts hold images, or stand for those of the image
  column in order;
- nothing: drawings made by kvconvert itself.

Paths in rows are relative to the file that names them. Nothing is fetched from the network but a Hub data set itself.
"""

from __future__ import annotations

import base64
import io
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvconvert.data.drawings import Drawing, draw
from kvconvert.data.sources import (
    ANSWER_COLUMNS,
    ASKED_COLUMNS,
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    IMAGE_SUFFIXES,
    JsonRows,
    read_text,
    shown_columns,
    suffix,
)
from kvconvert.errors import DataError, first_line, listed
from kvconvert.io.regular import files_below

if TYPE_CHECKING:
    from PIL.Image import Image

# What Pillow may take a file for, whatever its name: to read some others it starts a program, such as Ghostscript.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
_MOST_BYTES = 2**28  # of an image's file, which Pillow may read whole, or in an archive, whose own size says nothing
# Pixels of an image, of all images of a document, and how many there may be: a picture of one color has any size in a
# few kilobytes. Passes over all pixels of a JPEG, of which a progressive one has ten and each may take a few bytes.
MOST_PIXELS, MOST_DOCUMENT_PIXELS, MOST_IMAGES, MOST_SCANS = 2**26, 2**27, 1000, 32
MOST_CHARACTERS = 2**20  # of a document, whose tokens are made together and take a hundred times its memory
_SCAN = b"\xff\xda"
LISTS = ("captions.jsonl", "metadata.jsonl")
_TABLES = (".jsonl", ".parquet")

# Bundles are measured on drawings of another seed than those that calibrate by default.
EVALUATION_SEED = 500_000


@dataclass(frozen=True)
class Document:
    """Images and the text about them.

    Attributes:
        messages: a conversation in transformers' form; its parts of type "image" stand for `images` in order.
        images: in RGB.
        place: where it comes from, for error messages.
        is_caption: a single message of an image and its caption, not a conversation.

    Raises:
        DataError: it has more text than `MOST_CHARACTERS`.
    """

    messages: tuple[dict[str, Any], ...]
    images: tuple[Image, ...]
    place: str
    is_caption: bool = False

    def __post_init__(self) -> None:
        parts = [part for message in self.messages for part in message["content"]]
        if sum(len(str(part.get("text", ""))) for part in parts) > MOST_CHARACTERS:
            raise DataError(f"{self.place} has more than {MOST_CHARACTERS:,} characters of text; divide it.")

    @classmethod
    def captioned(cls, images: Iterable[Image], caption: str, place: str) -> Document:
        """Images with their caption."""
        images = tuple(images)
        return cls((_message("user", caption, len(images)),), images, place, is_caption=True)

    @classmethod
    def asked(cls, images: Iterable[Image], question: str, answer: str, place: str) -> Document:
        """A question about images, and its answer."""
        images = tuple(images)
        return cls((_message("user", question, len(images)), _message("assistant", answer, 0)), images, place)

    @classmethod
    def conversation(cls, drawing: Drawing) -> Document:
        """All questions about a drawing, and their answers."""
        from PIL import Image as pillow

        turns = [turn for q in drawing.questions for turn in (("user", q.text), ("assistant", q.answer))]
        messages = tuple(_message(role, text, int(index == 0)) for index, (role, text) in enumerate(turns))
        return cls(messages, (pillow.fromarray(drawing.image),), "a drawing")


def _message(role: str, text: str, images: int) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "image"}] * images + [{"type": "text", "text": text}]}


def read_image(value: Any, folder: Path | None, place: str) -> Image:
    """An image in RGB from a path, bytes, base64 in a data URL, a mapping with either, or an image.

    Args:
        value: from a row, a message or the caller.
        folder: to which relative paths refer; None for the working directory.
        place: where the image comes from, for error messages.

    Raises:
        DataError: there is no such file, or it is not an image that Pillow can read.
    """
    from PIL import Image as pillow
    from PIL import ImageOps

    value = _stated(value)
    if isinstance(value, str | Path):
        name = str(value)
        if name.startswith("data:"):
            value = _decoded(name, place)
        elif name.startswith(("hf://", "zip://", "gzip://")):
            value = _from_archive(name, place)
        elif name.startswith(("http:/", "https:/")):  # of which a Path keeps one slash
            raise _on_network(name, place)
        else:
            name = name.removeprefix("file://")
            path = Path(os.path.expanduser(name))
            path = path if folder is None else folder / path
            if not os.path.isfile(path):
                raise DataError(f"{place}: there is no image {path}; check the path.")
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise DataError(
                    f"{place}: the image {path} has {size:,} bytes, more than {_MOST_BYTES:,}; make it smaller or "
                    "remove it."
                )
            value, place = path, f"{place}: {path}" if str(path) not in place else place
    if isinstance(value, bytes):
        value = io.BytesIO(value)
    try:
        image = value if isinstance(value, pillow.Image) else _opened(value, place)
        image.load()
        with suppress(Exception):  # EXIF that cannot be read: the picture is taken as it is stored
            image = ImageOps.exif_transpose(image)  # as it is shown: cameras store how they were held
        return _in_eight_bits(image, place).convert("RGB")
    except DataError:
        raise
    except pillow.UnidentifiedImageError as error:  # whose own message has the object's address
        known = listed(_FORMATS, "or")
        raise DataError(f"{place} is not an image that can be read (no {known}); replace or remove it.") from error
    except Exception as error:  # whatever a decoder makes of a damaged file
        raise DataError(
            f"{place} is not an image that can be read ({first_line(error)}); replace or remove it."
        ) from error


def _in_eight_bits(image: Image, place: str) -> Image:
    """An image with shades of 8 bits, as all but those have that Pillow would cut at 255, which leaves them white."""
    from PIL import Image as pillow

    if image.mode in ("I", "F"):
        raise DataError(f"{place} has shades of 32 bits, of which none is known to be white; store it with 8 or 16.")
    return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)) if image.mode.startswith("I;16") else image


def _stated(value: Any) -> Any:
    """The image, or its address, of a mapping with either."""
    if not isinstance(value, Mapping):
        return value
    return next((value[key] for key in ("bytes", "path", "image", "url", "base64") if value.get(key)), None)


def _opened(source: Path | io.BytesIO, place: str) -> Image:
    """An image of which the header alone was read, and which is not too much to decode (DataError)."""
    from PIL import Image as pillow

    image = pillow.open(source, formats=_FORMATS)
    if image.width * image.height > MOST_PIXELS:
        raise DataError(
            f"{place} has {image.width:,} x {image.height:,} pixels, more than {MOST_PIXELS:,}; make it smaller or "
            "remove it."
        )
    if too_many_scans(image):
        raise DataError(f"{place} comes in more than {MOST_SCANS} scans; store it as a baseline JPEG.")
    return image


def too_many_scans(image: Image) -> bool:
    """Whether a JPEG, of which the header alone was read, is decoded in more passes than any program writes."""
    from PIL.JpegImagePlugin import JpegImageFile

    if not isinstance(image, JpegImageFile):  # of which one with several pictures is another kind
        return False
    place = image.fp.tell()
    image.fp.seek(0)
    scans = image.fp.read().count(_SCAN)
    image.fp.seek(place)
    return scans > MOST_SCANS


def _decoded(url: str, place: str) -> bytes:
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except ValueError as error:
        raise DataError(f"{place}: the image in a data URL is not base64 ({error}); correct it.") from error


def _from_archive(url: str, place: str) -> bytes:
    """An image file within a local archive, as `datasets` names it, and from nowhere else, whatever an address says."""
    from datasets.utils.file_utils import xopen

    *archives, root = url.split("::")
    is_local = "://" not in root.removeprefix("file://")
    if not is_local or not all(archive.startswith(("zip://", "gzip://")) for archive in archives):
        raise _on_network(url, place)
    if not os.path.isfile(path := root.removeprefix("file://")):
        raise DataError(
            f"{place}: the image {url:.200} cannot be read (there is no archive {path:.200}); check its address."
        )
    try:
        with xopen(url, "rb") as stream:
            return stream.read(_MOST_BYTES)
    except Exception as error:  # archives and their readers have errors of many kinds
        raise DataError(f"{place}: the image {url} cannot be read ({first_line(error)}); check its address.") from error


def _on_network(url: str, place: str) -> DataError:
    return DataError(f"{place}: the image {url} is on the network; fetch it and give its path.")


def is_image_directory(source: str) -> bool:
    """Whether a SOURCE is a directory of images; one with tables in it, which may name images, is not."""
    path = Path(os.path.expanduser(source))
    if not path.is_dir() or any(suffix(file) in _TABLES and file.name not in LISTS for file in files_below(path)):
        return False
    return any(_images_in(path))


def _images_in(directory: Path) -> Iterator[Path]:
    for path in files_below(directory):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if suffix(path) in IMAGE_SUFFIXES and not hidden and path.is_file():
            yield path


def drawn_documents(seed: int) -> Iterator[Document]:
    """The project's own drawings without end: captions and questions in turn."""
    from PIL import Image as pillow

    for index in itertools.count():
        drawing = draw(seed, index)
        images, place = (pillow.fromarray(drawing.image),), f"drawing {index}"
        if index % 2:
            question = drawing.questions[0]
            yield Document.asked(images, question.text, question.answer, place)
        else:
            yield Document.captioned(images, drawing.caption, place)


def directory_documents(source: str, seed: int) -> Iterator[Document]:
    """Images of a directory with their captions, shuffled by the seed.

    Raises:
        DataError: an image without caption, a list without the columns it needs, a listed image that is missing.
    """
    directory = Path(os.path.expanduser(source))
    lists = [file for file in files_below(directory) if file.name in LISTS and file.is_file()]
    entries = [entry for file in lists for entry in _listed(file)]
    if not lists:
        entries = [(path, None) for path in _images_in(directory)]
    random.Random(seed).shuffle(entries)
    for path, caption in entries:
        if caption is None:
            file = path.with_suffix(".txt")
            if not file.is_file():
                raise DataError(
                    f"Data directory {directory}: {path.name} has no caption; write {file.name} beside it, or a "
                    f"{LISTS[0]} with file_name and caption."
                )
            caption = read_text(file).strip()
        yield Document.captioned([read_image(path, None, f"Data directory {directory}")], caption, str(path))


def _listed(file: Path) -> list[tuple[Path, str]]:
    """Images and captions of a captions.jsonl."""
    entries = []
    for number, row in enumerate(JsonRows([file]), 1):
        columns = list(row)
        name, caption = image_column(columns), text_column(columns)
        if name is None or caption is None:
            raise DataError(
                f"{file}, row {number} has no {'image' if name is None else 'caption'} column (its columns are "
                f"{shown_columns(columns)}); name the image in file_name and its caption in caption."
            )
        path = file.parent / str(row[name])
        if not os.path.isfile(path):
            raise DataError(
                f"{file}, row {number} names the image {str(row[name])[:200]}, which does not exist; check the path."
            )
        entries.append((path, _text(row[caption])))
    return entries


def image_column(columns: Iterable[str]) -> str | None:
    """The column that holds images, by its name."""
    return next((name for name in IMAGE_COLUMNS if name in set(columns)), None)


def text_column(columns: Iterable[str]) -> str | None:
    """The column that holds captions, by its name."""
    return next((name for name in CAPTION_COLUMNS if name in set(columns)), None)


def has_image_parts(value: Any) -> bool:
    """Whether `messages` have a part that is an image."""
    messages = value if isinstance(value, list) else []
    return any(_is_image(part) for message in messages if isinstance(message, Mapping) for part in _parts(message))


def _reader(folder: Path | None, place: str) -> Callable[[Any], Image]:
    """`read_image` for one document, whose images are in memory together (DataError: they are too many).

    Rows of the Hub, which have no folder, hold their images; files that they name would be this machine's.
    """
    count = pixels = 0

    def read(value: Any) -> Image:
        nonlocal count, pixels
        stated = _stated(value)
        if folder is None and isinstance(stated, str | Path) and not str(stated).startswith("data:"):
            raise DataError(
                f"{place} names the image {str(stated)[:200]} without holding it, which is not read of a data set of "
                "the Hub; fetch the data set and give its path."
            )
        image = read_image(value, folder, place)
        count, pixels = count + 1, pixels + image.width * image.height
        if count > MOST_IMAGES or pixels > MOST_DOCUMENT_PIXELS:
            raise DataError(
                f"{place} has more than {MOST_IMAGES:,} images, or they have more than {MOST_DOCUMENT_PIXELS:,} pixels"
                "; divide it."
            )
        return image

    return read


def row_document(row: Mapping[str, Any], wanted: str | None, folder: Path | None, place: str) -> Document | None:
    """The document of a row; None for one without text.

    Args:
        row: of a table with an image column, or with messages that have images in them.
        wanted: the requested text column, or None.
        folder: to which relative paths refer; None for a row of the Hub.
        place: where the row comes from, for error messages.

    Raises:
        DataError: no image or no text where one must be, an unreadable image, or images that do not fit the messages.
    """
    column = image_column(row)
    found = row.get(column) if column else None
    values = [v for v in found if v is not None] if isinstance(found, list | tuple) else [found] * (found is not None)
    read = _reader(folder, place)
    images = [read(value) for value in values]
    if wanted is None and row.get("messages"):
        return _conversation(row["messages"], images, read, place)
    question = next((row[name] for name in ASKED_COLUMNS if row.get(name)), None)
    answer = next((row[name] for name in ANSWER_COLUMNS if row.get(name)), None)
    if wanted is None and question and answer:
        return Document.asked(images, _text(question), _text(answer), place)
    name = wanted or text_column(row) or next((name for name in ANSWER_COLUMNS if name in row), None)
    if name is None or name not in row:
        raise DataError(
            f"{place} has no text column ({', '.join(CAPTION_COLUMNS)}, or question and answer); its columns are "
            f"{', '.join(row)}; rename one."
        )
    caption = _text(row[name])
    return Document.captioned(images, caption, place) if caption else None


def _conversation(messages: Any, images: list[Image], read: Callable[[Any], Image], place: str) -> Document:
    """Messages with their images gathered; parts without a source of their own take those of the row in order."""
    rest, gathered, rendered = iter(images), [], []
    if not isinstance(messages, list) or not all(
        isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages
    ):
        raise DataError(f"{place}: messages are no list of objects with a role; correct the row.")
    for message in messages:
        parts = []
        for part in _parts(message):
            if not _is_image(part):
                parts.append({key: value for key, value in part.items() if value is not None})
                continue
            value = next((part[key] for key in ("image", "path", "bytes", "url", "base64") if part.get(key)), None)
            if value is None and isinstance(part.get("image_url"), Mapping | str):
                value = part["image_url"] if isinstance(part["image_url"], str) else part["image_url"].get("url")
            image = read(value) if value is not None else next(rest, None)
            if image is None:
                raise DataError(f"{place}: the messages refer to more images than the row has; correct the row.")
            gathered.append(image)
            parts.append({"type": "image"})
        rendered.append({"role": message["role"], "content": parts})
    if next(rest, None) is not None:
        raise DataError(f"{place}: the row has more images than its messages refer to; correct the row.")
    return Document(tuple(rendered), tuple(gathered), place)


def _parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _is_image(part: Mapping[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def _text(value: Any) -> str:
    """A caption; the first of several."""
    if isinstance(value, list | tuple):
        value = next((v for v in value if v), "")
    return str(value or "").strip()
