"""Facts about models: where they lie, checkpoints, names of tensors and modules, layer types, processors.

Importing this package refuses a version of transformers that was not tried, before anything is imported from it.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from kvconvert.arguments import ModelPlace, checked
from kvconvert.errors import CheckpointError, HubError, MissingError
from kvconvert.io.disk import GENAI_NAME, MANIFEST_NAME, STATE_NAME
from kvconvert.io.hub import ask_hub, check_content, is_hub_id, missing_below
from kvconvert.io.json_text import read_json
from kvconvert.io.regular import files_below

# The versions of transformers that kvconvert was tried with, of which pyproject.toml has the first and the last. Others
# may hand the cache over in another way, and then generate without it.
TRIED = ("5.23", "5.24")

_READ = (".json", ".txt", ".model", ".jinja")  # endings of what describes a model to transformers
_DESCRIPTION, _WEIGHTS = [*(f"*{ending}" for ending in _READ), "README.md", "LICENSE*"], ["*.safetensors"]
_GGUF = ".gguf"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
QUANTIZED = ("fp8", "mxfp4", "awq", "gptq", "compressed-tensors")  # by `quant_method`, what is read: see `formats`


def _transformers_version() -> str:
    """The installed version of transformers, checked against those that were tried (MissingError)."""
    if sys.flags.optimize > 1:
        raise MissingError(
            "Python runs with -OO or PYTHONOPTIMIZE=2, which drops the docstrings that transformers reads when it is "
            "imported; run it without."
        )
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return TRIED[-1]  # importing it says so
    if re.match(r"\d+\.\d+", version)[0] not in TRIED or "dev" in version:
        raise MissingError(
            f"transformers is {version}, and kvconvert was tried with {' and '.join(TRIED)} only; run pip install "
            f"'transformers=={TRIED[-1]}.*'."
        )
    return version


# The names under which models and `generate` take a cache and return it: transformers 5.24 renamed it.
CACHE_NAMES = ("past_key_values", "cache")
CACHE = CACHE_NAMES[not _transformers_version().startswith("5.23")]


@checked
def check_model(model: ModelPlace, was_fetched: bool = False) -> Path:
    """Refuse what is neither a directory of a model, a GGUF file, nor a model of the Hub (CheckpointError, HubError).

    Commands ask this first: torch, which takes seconds, is not imported for it, and no weights are fetched.

    Returns:
        where the model is; of one of the Hub at least what describes it.
    """
    path = Path(model)
    if os.path.isdir(path):
        _check_description(path, model)
        _check_weights(path, model)
        return path
    if os.path.exists(path) and path.suffix == _GGUF:
        return path
    if os.path.exists(path):
        raise CheckpointError(
            f"{model} is a file; give the directory that holds config.json and the weights, or a .gguf file."
        )
    owner = missing_below(model) if is_hub_id(model) else path.parent
    if path.suffix == _GGUF and owner is not None and not was_fetched:
        raise CheckpointError(
            f"There is no GGUF file {model}; check the path, or fetch the file from the Hub first (`hf download "
            "user/name FILE --local-dir DIR`)."
        )
    if not is_hub_id(model):
        raise CheckpointError(
            f"There is no model directory {model}; check the path, or give the id of a model on the Hub, user/name."
        )
    if not was_fetched and owner is not None:
        raise CheckpointError(
            f"There is no model directory {model}, and as {owner} is a directory here, the Hub was not asked; if you "
            f"mean its model {model}, fetch it with `hf download {model} --local-dir DIR`."
        )
    snapshot = _snapshot(model, _DESCRIPTION)
    _check_description(snapshot, model)
    return snapshot


def _check_description(directory: Path, model: str | Path) -> None:
    """Refuse what the files beside the weights tell of."""
    if not any(directory.iterdir()):
        raise CheckpointError(f"The model directory {model} is empty; give one with config.json and safetensors files.")
    for file in directory.iterdir():  # transformers would take it as absent
        if file.suffix in _READ and not file.is_file():
            raise CheckpointError(f"{file} is no file, nor a link to one; remove it, or fetch the model again.")
    quantization = _quantization(directory / "config.json")
    if (directory / MANIFEST_NAME).is_file() or "kvconvert" in quantization:
        raise CheckpointError(f"{model} is a kvconvert bundle, not a model; give the model that it was made from.")
    if (directory / GENAI_NAME).is_file() and not any(directory.glob("*.safetensors")):
        raise CheckpointError(
            f"{model} is an export for ONNX Runtime, not a model of transformers; give the model that it was made from."
        )
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{model} is an unmerged LoRA adapter (adapter_config.json), which would not survive the changes to "
            "the weights; merge it into its base model first (PEFT's merge_and_unload) and convert that."
        )
    if not (directory / "config.json").is_file() and not any(directory.glob(f"*{_GGUF}")):
        if (directory / STATE_NAME).is_file():
            raise CheckpointError(
                f"{model} is a working directory of kvconvert calibrate, not a model; give the model that it is of."
            )
        raise CheckpointError(f"{model} has no config.json; give the directory of a transformers model.")
    if quantization:
        check_quantization(model, quantization.get("quant_method"))


def _quantization(config: Path) -> dict[str, Any]:
    """The quantization that config.json states, or none."""
    try:
        quantization = read_json(config)["quantization_config"]
    except (OSError, ValueError, KeyError, TypeError):  # whoever reads more of it says what is wrong
        return {}
    return quantization if isinstance(quantization, dict) else {}


def check_quantization(model: str | Path, method: object) -> None:
    """Refuse (CheckpointError) a model whose weights are stored in a form that is not read."""
    if method not in QUANTIZED:
        raise CheckpointError(
            f"{model} is already quantized ({method!s:.80}); converting reads full precision and "
            f"{', '.join(QUANTIZED)} (quant_method), so give the model it was made from."
        )


def _check_weights(directory: Path, model: str | Path) -> None:
    weights = (".safetensors", _GGUF, *PICKLES, INDEX_FILE)
    if not any(file.name.endswith(weights) for file in directory.iterdir()):
        raise without_weights(model)


def without_weights(model: str | Path) -> CheckpointError:
    """The message for a checkpoint without readable weights."""
    return CheckpointError(
        f"{model} holds no weights ({SINGLE_FILE} or {INDEX_FILE} with its shards); fetch the model again."
    )


def locate_model(model: str, was_fetched: bool) -> tuple[Path, str, str | None]:
    """Directory, id and revision."""
    found = check_model(model, was_fetched)
    if os.path.exists(model):
        return found, found.resolve().name, None
    # Of the same commit: the branch may have moved on.
    snapshot = _snapshot(model, [*_DESCRIPTION, *_WEIGHTS], found.name)
    _check_weights(snapshot, model)
    return snapshot, model, snapshot.name


def _snapshot(model: str, files: list[str], commit: str | None = None) -> Path:
    """A model of the Hub in its cache, of which these files are fetched if need be."""
    from huggingface_hub import snapshot_download

    ignored = ["original/*", "consolidated*", "*/*.safetensors"]

    def fetch() -> str:
        return snapshot_download(model, revision=commit, allow_patterns=files, ignore_patterns=ignored)

    found = Path(ask_hub(model, fetch, revision=commit, or_path=True))
    if not found.is_dir():
        raise HubError(f"What answers in place of the Hub has no files of {model}; check HF_ENDPOINT and the network.")
    for file in files_below(found):
        if file.is_file() and file.suffix != ".safetensors":  # weights are hashed once, beside other work
            check_content(file)
    return found
