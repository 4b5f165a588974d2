"""Facts about models: where they lie, checkpoints, names of tensors and modules, layer types, processors.

Importing this package refuses a version of transformers that was not tried, before anything is imported from it.
"""

from __future__ import annotations

import os
import re
from importlib import metadata
from pathlib import Path

from kvconvert.arguments import ModelPlace, checked
from kvconvert.errors import CheckpointError, HubError, MissingError
from kvconvert.io.disk import MANIFEST_NAME, STATE_NAME
from kvconvert.io.hub import ask_hub, check_content, is_hub_id, missing_below

# The versions of transformers that kvconvert was tried with, of which pyproject.toml has the first and the last. Others
# may hand the cache over in another way, and then generate without it.
TRIED = ("5.23", "5.24")

_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*"]
_GGUF = ".gguf"
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def _transformers_version() -> str:
    """The installed version of transformers, checked against those that were tried (UsageError)."""
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
def check_model(model: ModelPlace, was_fetched: bool = False) -> None:
    """Refuse what is neither a directory of a model, a GGUF file, nor the id of a repository (CheckpointError).

    Commands ask this first: torch, which takes seconds, is not imported for it.
    """
    path = Path(model)
    if os.path.isdir(path):
        _check_directory(path)
        return
    if os.path.exists(path) and path.suffix == _GGUF:
        return
    if os.path.exists(path):
        raise CheckpointError(
            f"{model} is a file; give the directory that holds config.json and the weights, or a .gguf file."
        )
    if not is_hub_id(model):
        raise CheckpointError(
            f"There is no model directory {model}; check the path, or give the id of a model on the Hub, user/name."
        )
    if not was_fetched and (owner := missing_below(model)) is not None:
        raise CheckpointError(
            f"There is no model directory {model}, and as {owner} is a directory here, the Hub was not asked; if you "
            f"mean its model {model}, fetch it with `hf download {model} --local-dir DIR`."
        )
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        _snapshot(model)


def _check_directory(directory: Path) -> None:
    if not any(directory.iterdir()):
        raise CheckpointError(
            f"The model directory {directory} is empty; give one with config.json and safetensors files."
        )
    if (directory / MANIFEST_NAME).is_file():
        raise CheckpointError(f"{directory} is a kvconvert bundle, not a model; give the model that it was made from.")
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(
            f"{directory} is an unmerged LoRA adapter (adapter_config.json), which would not survive the changes to "
            "the weights; merge it into its base model first (PEFT's merge_and_unload) and convert that."
        )
    if not (directory / "config.json").is_file() and not any(directory.glob(f"*{_GGUF}")):
        if (directory / STATE_NAME).is_file():
            raise CheckpointError(
                f"{directory} is a working directory of kvconvert calibrate, not a model; give the model that it is of."
            )
        raise CheckpointError(f"{directory} has no config.json; give the directory of a transformers model.")
    weights = (".safetensors", _GGUF, *PICKLES, INDEX_FILE)
    if not any(file.name.endswith(weights) for file in directory.iterdir()):
        raise without_weights(directory)


def without_weights(directory: Path) -> CheckpointError:
    """The message for a checkpoint without readable weights."""
    return CheckpointError(
        f"{directory} holds no weights ({SINGLE_FILE} or {INDEX_FILE} with its shards); fetch the model again."
    )


def locate_model(model: str, was_fetched: bool) -> tuple[Path, str, str | None]:
    """Directory, id and revision."""
    check_model(model, was_fetched)
    path = Path(model)
    if os.path.isdir(path):
        return path, path.resolve().name, None
    snapshot = _snapshot(model)
    _check_directory(snapshot)
    return snapshot, model, snapshot.name


def _snapshot(model: str) -> Path:
    """A model of the Hub in its cache, fetched if need be."""
    from huggingface_hub import snapshot_download

    ignored = ["original/*", "consolidated*", "*/*.safetensors"]

    def fetch() -> str:
        return snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=ignored)

    found = Path(ask_hub(model, fetch, or_path=True))
    if not found.is_dir():
        raise HubError(f"What answers in place of the Hub has no files of {model}; check HF_ENDPOINT and the network.")
    for file in found.rglob("*"):
        if file.is_file() and file.suffix != ".safetensors":  # weights are hashed once, beside other work
            check_content(file)
    return found
