"""Records of what is in files and where it came from, as working directories and manifests hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WrapValidator
from pydantic_core import PydanticCustomError

MAX_DTYPE = 16  # characters of the name of a tensor's type
MAX_ENTRIES = 1_000_000  # modules, or tensors: a model of a trillion parameters has a fifth of them
MAX_LAYERS = 1024
MAX_FILES = 10_000
MAX_FACTS = 100_000  # values at all depths of an object whose fields are its reader's affair
MAX_TEXT = 1000  # characters of a sentence or a name in a record
# Integers up to here are exact in every language's JSON.
Count = Annotated[int, Field(ge=0, le=2**53)]
LARGEST = 1e18  # of the numbers in a manifest that are no counts
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]
Size = Annotated[float, Field(ge=0, le=LARGEST, allow_inf_nan=False)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
Name = Annotated[str, Field(max_length=255)]  # of a module, a tensor, a candidate
# Parts begin with no dot, so that no name leads out of the directory, and none is hidden.
FileName = Annotated[str, Field(max_length=255, pattern=r"^[\w+@-][\w.+@ -]*(/[\w+@-][\w.+@ -]*)*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_AT_ONCE = 1000


def _first_faults(values: Any, validate: Callable[[Any], Any], most: int | None = None) -> Any:
    if not isinstance(values, dict):
        return validate(values)
    if len(values) > (most := most or MAX_ENTRIES):
        raise PydanticCustomError("too_long", f"Dictionary should have at most {most} items")
    entries = iter(values.items())
    found: dict[Any, Any] = {}
    while part := dict(islice(entries, _AT_ONCE)):
        found |= validate(part)
    return found


# Of a dictionary that may be long: pydantic would keep an error for every entry, and only the first is shown.
FirstFaults = WrapValidator(_first_faults)
FewFiles = WrapValidator(partial(_first_faults, most=MAX_FILES))


def _few_facts(values: dict[str, Any]) -> dict[str, Any]:
    left = MAX_FACTS
    containers: list[Any] = [values]
    while containers:
        value = containers.pop()
        left -= len(value)
        if left < 0:
            raise PydanticCustomError("too_long", f"Object should have at most {MAX_FACTS:,} values in all")
        entries = value.values() if isinstance(value, dict) else value
        containers += [entry for entry in entries if isinstance(entry, dict | list)]
    return values


Facts = Annotated[dict[str, Any], AfterValidator(_few_facts)]


def shortened(text: str) -> str:
    """A text that a record can hold."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


class Record(BaseModel):
    """A frozen record that refuses unknown fields and does not convert one type into another."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class TensorInfo(Record):
    """Type and shape of a stored tensor: `dtype` in safetensors' words ("F16", "BF16", "I32", ...)."""

    dtype: Annotated[str, Field(max_length=MAX_DTYPE)]
    shape: list[Annotated[int, Field(ge=0, le=2**56)]] = Field(max_length=16)


class FileInfo(Record):
    """Size in bytes and SHA-256 of a file that loading depends on."""

    size: Count
    sha256: Sha256


class SourceInfo(Record):
    """The checkpoint that was converted.

    Attributes:
        id: Hub id, of a local checkpoint as it was given at export, or else the name of its directory (never the full
            path: machines differ).
        revision: commit of the Hub repository, where known.
        licence: the license that the model's card states, by the Hub's identifier, where known.
        licence_name, licence_link: of the license "other".
        language: the languages that the card states.
        config_sha256: SHA-256 of `config.json`.
        weights_sha256: SHA-256 of each weight file, by name.
        stored_as: the form in which its weights were stored, where they were quantized already ("mxfp4 experts").
    """

    id: Text
    revision: Name | None = None
    licence: Text | None = None
    licence_name: Text | None = None
    licence_link: Text | None = None
    language: list[Name] = Field(default_factory=list, max_length=MAX_TEXT)
    config_sha256: Sha256
    weights_sha256: Annotated[dict[Name, Sha256], FirstFaults]
    stored_as: Text | None = None


class DataInfo(Record):
    """Calibration or evaluation data, without any of its text.

    Attributes:
        source: as given on the command line, or the name of the embedded text.
        samples, length: number of token sequences and tokens in each.
        seed: seed of the choice of samples.
        images: how many images are in them.
        sha256: of the int64 token ids, little endian, in order; with images, followed by each sample's further inputs
            (pixel values, token types, ...) in order of their names: the name and the values as float32.
    """

    source: Text
    samples: Count
    length: Count
    seed: Annotated[int, Field(ge=-(2**64), le=2**64)]
    images: Count = 0
    sha256: Sha256
