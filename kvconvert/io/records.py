"""Records of what is in files and where it came from, as working directories and manifests hold them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

Sha256 = str


class Record(BaseModel):
    """A frozen record that refuses unknown fields and does not convert one type into another."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, defer_build=True)


class TensorInfo(Record):
    """Type and shape of a stored tensor: `dtype` in safetensors' words ("F16", "BF16", "I32", ...)."""

    dtype: str
    shape: list[int]


class FileInfo(Record):
    """Size in bytes and SHA-256 of a file that loading depends on."""

    size: int = Field(ge=0)
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

    id: str
    revision: str | None = None
    licence: str | None = None
    licence_name: str | None = None
    licence_link: str | None = None
    language: list[str] = Field(default_factory=list)
    config_sha256: Sha256
    weights_sha256: dict[str, Sha256]
    stored_as: str | None = None


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

    source: str
    samples: int
    length: int
    seed: int
    images: int = 0
    sha256: Sha256
