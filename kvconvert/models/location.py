"""Where a source model lies: at a path, or on the Hub under the id of a repository."""

from __future__ import annotations

from pathlib import Path

from kvconvert.errors import CheckpointError
from kvconvert.io.hub import ask_hub, is_hub_id, missing_below

_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "README.md", "LICENSE*"]
_GGUF = ".gguf"


def check_model(model: str, was_fetched: bool = False) -> None:
    """Refuse what is neither a directory, a GGUF file, nor the id of a repository (CheckpointError).

    Commands ask this first: torch, which takes seconds, is not imported for it.
    """
    path = Path(model)
    if path.is_dir() or (path.exists() and path.suffix == _GGUF):
        return
    if path.exists():
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


def locate_model(model: str, was_fetched: bool) -> tuple[Path, str, str | None]:
    """Directory, id and revision."""
    check_model(model, was_fetched)
    path = Path(model)
    if path.is_dir():
        return path, path.resolve().name, None
    from huggingface_hub import snapshot_download

    ignored = ["original/*", "consolidated*", "*/*.safetensors"]
    snapshot = ask_hub(model, lambda: snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=ignored))
    return Path(snapshot), model, Path(snapshot).name
