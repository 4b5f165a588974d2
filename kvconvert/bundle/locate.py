"""Where a bundle lies, at a path or on the Hub under the id of a repository; which the Hub's cache holds; and where one
may be written.

Nothing here imports torch, which takes seconds, or pydantic: commands refuse wrong paths before that.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvconvert.arguments import BundlePlace, checked
from kvconvert.errors import (
    NO_IMAGES,
    NO_SYSTEM,
    NOTHING_DRAWN,
    BundleError,
    HubError,
    UsageError,
    did_you_mean,
    printable,
)
from kvconvert.io.disk import GENAI_NAME, LOCK_NAME, MANIFEST_NAME, PROCESSOR_FILES, STATE_NAME
from kvconvert.io.hub import ask_hub, is_hub_id, missing_below
from kvconvert.io.json_text import read_json

# What `export` writes.
BUNDLE, ONNX_EXPORT, CHECKPOINT = "a bundle", "an export for ONNX Runtime", "a compressed-tensors checkpoint"
WRITTEN = (BUNDLE, ONNX_EXPORT, CHECKPOINT)
# Characters of the names of temporary directories beside an output, besides its own: .NAME.replaced-12345678.
_BESIDE = 19
# In a folder, for engines read every *.safetensors file that lies beside config.json as weights.
PLAN_NAME = "kvconvert/plan.safetensors"
FORMER_PLAN_NAME = "kv_plan.safetensors"
# Not fetched: no part of a bundle, and programs that are run in its folder may do what such a file says, as git does.
HIDDEN = [".*", "*/.*"]
DESCRIPTION = (MANIFEST_NAME, "config.json", PLAN_NAME)  # what a bundle does, without its weights


@checked
def locate(
    bundle: BundlePlace,
    *,
    weights: bool = True,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> Path:
    """The bundle's directory; a repository is fetched into the Hub's cache. Nothing is verified here.

    Args:
        bundle: a path, or the id of a repository; what exists is a path, and what looks like one is never asked for,
            nor is owner/name where there is a local directory `owner`.
        weights: fetch the whole repository, and not just the files that `open_bundle(..., verify="plan")` reads.
        revision: branch, tag or commit of a repository.
        token: as in `kvconvert.runtime.load`.
        local_files_only: use the Hub's cache alone, as HF_HUB_OFFLINE=1 does.

    Raises:
        BundleError: there is no such path, or no bundle there.
        HubError: the repository holds no bundle or cannot be fetched.
    """
    check_place(bundle)
    if os.path.exists(bundle):
        return Path(bundle)
    return _fetch(str(bundle), weights, {"revision": revision, "token": token, "local_files_only": local_files_only})


@checked
def check_system(bundle: BundlePlace) -> None:
    """Refuse a system message (UsageError) for a local bundle none of whose files states a chat template."""
    directory = Path(bundle)
    if not directory.is_dir() or any(directory.glob("*chat_template*")):
        return
    for file in (directory / "tokenizer_config.json", directory / "processor_config.json"):
        try:
            stated = read_json(file) if file.is_file() else {}
        except (OSError, ValueError):  # loading the bundle says so
            return
        if not isinstance(stated, dict) or stated.get("chat_template") is not None:
            return
    raise UsageError(NO_SYSTEM)


def check_images(bundle: BundlePlace, refusal: str = NO_IMAGES) -> None:
    """Refuse images (UsageError) for a local bundle without a processor, as those of text models are."""
    directory = Path(bundle)
    if directory.is_dir() and not any((directory / name).is_file() for name in PROCESSOR_FILES):
        raise UsageError(refusal)


def check_seed(bundle: BundlePlace) -> None:
    """Refuse a seed (UsageError) for a local bundle whose generation_config.json asks for no sampling."""
    file = Path(bundle) / "generation_config.json"
    try:
        stated = read_json(file) if file.is_file() else None
    except (OSError, ValueError):  # loading the bundle says so
        return
    if isinstance(stated, dict) and not stated.get("do_sample"):
        raise UsageError(NOTHING_DRAWN)


def check_place(bundle: BundlePlace) -> None:
    """Refuse what is neither a directory with a manifest nor the id of a repository (BundleError)."""
    if os.path.exists(bundle):
        manifest_path(Path(bundle))
    elif not is_hub_id(bundle):
        raise BundleError(f"{bundle} is not a kvconvert bundle: there is no such directory; check the path.")
    elif (owner := missing_below(bundle)) is not None:
        raise BundleError(
            f"{bundle} is not a kvconvert bundle: there is no such directory, and as {owner} is one here, the Hub was "
            f"not asked; if you mean its repository {bundle}, pull it into a directory first (`kvconvert pull`)."
        )


def manifest_path(directory: Path) -> Path:
    """The manifest of a bundle; BundleError where there is none."""
    if directory.is_file():
        raise BundleError(
            f"{directory} is a file, and a bundle is a directory; `kvconvert convert` makes one of a model."
        )
    if not directory.is_dir():
        raise BundleError(f"{directory} is not a kvconvert bundle: it is not a directory; check the path.")
    if not os.access(directory, os.R_OK | os.X_OK):
        raise BundleError(f"The directory {directory} cannot be read; check its permissions.")
    path = directory / MANIFEST_NAME
    if not os.path.lexists(path):
        if (directory / STATE_NAME).is_file():
            raise BundleError(
                f"{directory} is a working directory of kvconvert calibrate, not a bundle; write its bundle with "
                f"`kvconvert export`."
            )
        kind = kind_of(directory)
        found = f"it is {kind}, which other programs run" if kind in WRITTEN else f"it has no {MANIFEST_NAME}"
        raise BundleError(f"{directory} is not a kvconvert bundle: {found}; make one with `kvconvert convert`.")
    return path


def check_output(output: Path, force: bool, kind: str = BUNDLE) -> None:
    """Refuse an output that exists, before any work is done.

    An empty directory may be filled. With `force` an earlier result of the same kind, see `kind_of`, may be replaced.

    Raises:
        UsageError: the output exists and may not be replaced, lies around or in the place of the current directory, or
            its name is too long for those of temporary directories beside it.
    """
    check_outside(output)
    place = output.absolute()
    folder = next(folder for folder in (*place.parents, place) if folder.is_dir())  # a root has no parents
    length, most = len(os.fsencode(output.name)), os.pathconf(folder, "PC_NAME_MAX") - _BESIDE
    if length > most:
        raise UsageError(
            f"The name of the output {output} has {length:,} bytes and may have {most}, because temporary directories "
            "beside it have longer names; choose a shorter one."
        )
    if not os.path.lexists(output):
        return
    is_empty, found = output.is_dir() and not any(output.iterdir()), kind_of(output)
    if not is_empty and found != kind:
        advice = "choose another path" + ", or remove it first" * (found in WRITTEN)
        raise UsageError(f"The output {output} exists and is {found}, not {kind}, so it is not replaced; {advice}.")
    if not is_empty and not force:
        raise UsageError(f"The output {output} exists; choose another path, or replace it with `force=True`.")
    if Path.cwd().is_relative_to(output.resolve()):  # which programs and shells would go on using as it was
        raise UsageError(
            f"The output {output} takes the place of the current directory; choose another path, or change to another "
            "directory first."
        )


def kind_of(path: Path) -> str:
    """What lies at an existing path, in words: one of WRITTEN, or something else."""
    if not path.is_dir():
        return "a file"
    for name, kind in ((MANIFEST_NAME, BUNDLE), (STATE_NAME, "a working directory"), (GENAI_NAME, ONNX_EXPORT)):
        if (path / name).is_file():
            return kind
    if not (path / "config.json").is_file():
        return "a directory of other files"
    config: Any = None
    with suppress(OSError, ValueError):  # whoever reads it as a model says what is wrong
        config = read_json(path / "config.json")
    settings = config.get("quantization_config") if isinstance(config, dict) else None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return CHECKPOINT if method == "compressed-tensors" else "a model"


def check_outside(output: Path) -> None:
    """Refuse (UsageError) an output within a bundle, which would not verify with further files in it, or within a
    working directory, or nowhere, or at a path that safetensors does not open.
    """
    try:
        place = output.resolve()
        folders = place.parents
        os.fsencode(place).decode()
    except UnicodeError as error:
        raise UsageError(f"The path {printable(str(output))} is not UTF-8 text; choose another.") from error
    except (OSError, RuntimeError) as error:  # Python before 3.13 raises the latter
        raise UsageError(f"{output} leads through a symbolic link to itself; choose another path.") from error
    for folder in folders:
        if (folder / MANIFEST_NAME).exists():
            raise UsageError(
                f"{output} lies in the bundle {folder}, which stays as it was sealed; choose a path outside of it."
            )
        if (folder / STATE_NAME).is_file() and (folder / LOCK_NAME).exists():
            raise UsageError(
                f"{output} lies in the working directory {folder}, where another calibration may remove it; choose a "
                "path outside of it."
            )


def fetch_repository(repository: str, *, revision: str | None = None, token: str | bool | None = None) -> Path:
    """The directory of a bundle in the Hub's cache, whatever exists locally; raises as `locate` does."""
    return _fetch(repository, True, {"revision": revision, "token": token, "local_files_only": False})


def fetch_config(name: str, *, revision: str | None = None, token: str | bool | None = None) -> Path | None:
    """The config.json, in the Hub's cache, of the repository that a name is the id of; None for a path.

    Raises:
        HubError: there is none, or it cannot be fetched.
    """
    if os.path.exists(name) or not is_hub_id(name):
        return None
    from huggingface_hub import hf_hub_download

    def fetch() -> str:
        return hf_hub_download(name, "config.json", revision=revision, token=token)

    return Path(ask_hub(name, fetch, revision=revision, token=token, or_path=True))


def _fetch(bundle: str, weights: bool, options: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    def fetch() -> str | None:
        # The smallest file first, for other models are large; and in a snapshot, for which a Hub that cannot be reached
        # is asked once, where it is asked for a file six times within half a minute.
        manifest = Path(snapshot_download(bundle, allow_patterns=[MANIFEST_NAME], **options), MANIFEST_NAME)
        if not manifest.exists():
            return None
        # Of the manifest's commit: the branch may have moved on.
        commit = options | {"revision": manifest.parent.name}
        wanted = {} if weights else {"allow_patterns": list(DESCRIPTION)}
        return snapshot_download(bundle, ignore_patterns=HIDDEN, **commit | wanted)

    found = ask_hub(bundle, fetch, revision=options["revision"], token=options["token"], or_path=True)
    if found is None:
        raise HubError(f"{bundle} on the Hub is not a kvconvert bundle: it has no {MANIFEST_NAME}; give another id.")
    return Path(found)


@dataclass(frozen=True)
class Pulled:
    """A bundle in the cache.

    Attributes:
        repository: its id.
        commits: that are there.
        size: bytes on the disk.
        modified: when a file last changed, in UTC as ISO 8601 writes it.
    """

    repository: str
    commits: tuple[str, ...]
    size: int
    modified: str


def pulled() -> list[Pulled]:
    """All of them, by id."""
    found = _bundles(_scan())
    return [
        Pulled(
            repo.repo_id,
            tuple(sorted(revision.commit_hash for revision in repo.revisions)),
            repo.size_on_disk,
            datetime.fromtimestamp(repo.last_modified, UTC).isoformat(timespec="seconds"),
        )
        for repo in sorted(found, key=lambda repo: repo.repo_id)
    ]


def remove_pulled(repository: str) -> int:
    """Remove a bundle with all its revisions; gives the bytes that were freed (HubError: there is none)."""
    if not is_hub_id(repository):
        raise UsageError(
            f"{repository!r} is no id of a repository, USER/NAME; `kvconvert list` shows those in the cache."
        )
    cache = _scan()
    found = {repo.repo_id: repo for repo in _bundles(cache)}
    if repository not in found:
        hint = did_you_mean(repository, found) if found else "kvconvert list shows what is there."
        raise HubError(f"The Hub's cache holds no bundle {repository}; {hint}")
    strategy = cache.delete_revisions(*(revision.commit_hash for revision in found[repository].revisions))
    strategy.execute()
    return strategy.expected_freed_size


def _scan() -> Any:
    """The Hub client's account of its cache; None where there is no cache yet."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir(constants.HF_HUB_CACHE)
    except CacheNotFound:
        return None
    except ValueError as error:
        place = printable(constants.HF_HUB_CACHE)
        raise HubError(f"The Hub's cache, {place}, is no directory; set HF_HOME or HF_HUB_CACHE to one.") from error


def _bundles(cache: Any) -> list[Any]:
    repos = () if cache is None else cache.repos
    return [
        repo for repo in repos if any((revision.snapshot_path / MANIFEST_NAME).exists() for revision in repo.revisions)
    ]
