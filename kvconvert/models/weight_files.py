"""The safetensors files of a checkpoint: which there are, what their headers and their index say."""

from __future__ import annotations

import json
import re
from pathlib import Path

from kvconvert.errors import CheckpointError
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorfile import read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def weight_files(directory: Path) -> list[str]:
    """The safetensors files that make up the model, from the index if there is one."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    shards = sorted(file.name for file in directory.iterdir() if _SHARD.fullmatch(file.name))
    if index.exists():
        if single.exists():
            raise CheckpointError(
                f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}, which may disagree; remove the wrong one."
            )
        named = sorted(set(_read_index(index).values()))
        for file in named:
            if not (directory / file).is_file():
                raise CheckpointError(f"The shard {file} that {index} names is missing; fetch it again.")
        extra = sorted(set(shards) - set(named))
        if extra:
            raise CheckpointError(
                f"{directory} holds shard {extra[0]} that {INDEX_FILE} does not name; remove it or repair the index."
            )
        return named
    if shards:
        missing = f"; remove the shard {shards[0]}" if single.exists() else f" but no {INDEX_FILE}; fetch the index"
        raise CheckpointError(f"{directory} holds shards{missing}.")
    if single.exists():
        return [SINGLE_FILE]
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise CheckpointError(
            f"{directory} holds pickled weights ({pickles[0]}), which are refused because loading them runs code; "
            "convert them where you trust them, with AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)."
        )
    raise CheckpointError(
        f"{directory} holds no weights ({SINGLE_FILE} or {INDEX_FILE} with its shards); fetch the model again."
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        entries = list(weight_map.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of safetensors files ({error!r}); fetch it again.") from error
    for name, file in entries:
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(f"{index} places {name} in {file!r}, which is not a safetensors file beside it.")
    return dict(weight_map)


def tensor_files(directory: Path, headers: dict[str, dict[str, TensorInfo]]) -> dict[str, str]:
    """Tensor to file, from the headers, checked against the index."""
    found: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in found:
                raise CheckpointError(
                    f"{directory} holds {name} twice, in {found[name]} and {file}; remove one of them."
                )
            found[name] = file
    index = directory / INDEX_FILE
    if index.exists():
        stated = _read_index(index)
        for name, file in stated.items():
            if found.get(name) != file:
                raise CheckpointError(f"{index} says that {file} holds {name}, but it does not; fetch the shard again.")
        extra = sorted(set(found) - set(stated))
        if extra:
            raise CheckpointError(f"{directory / found[extra[0]]} holds {extra[0]}, which {INDEX_FILE} does not name.")
    return dict(sorted(found.items()))


def read_weight_header(path: Path) -> dict[str, TensorInfo]:
    """A safetensors header; types that bundles do not hold pass, for not every tensor is copied into one."""

    def refuse(file: str, field: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(
            f"{path} is truncated or damaged: {field} should be {expected}, found {found}; fetch it again."
        )

    return read_header(path, refuse, any_dtype=True)
