"""Bundles on the Hub: uploaded and fetched by the Hub's own client, and compared with the manifest on both ways."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from kvconvert.bundle.files import may_be_loaded, own_files
from kvconvert.bundle.locate import HIDDEN, MANIFEST_NAME, check_output
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.bundle.writer import is_own_directory, locked, put_in_place, recover
from kvconvert.errors import BundleError, HubError, UsageError, listed, printable
from kvconvert.io import disk
from kvconvert.io.hub import ask_hub, check_can_push, check_id
from kvconvert.io.regular import files_below

logger = logging.getLogger(__name__)
CLIENT_FOLDER = ".cache"  # where the client notes, inside a directory that it fetches into, what it has


def upload(bundle: Bundle, repository: str, *, private: bool = False, revision: str | None = None) -> str:
    """Upload the files of a bundle that was fully verified, and compare what the Hub then holds with them.

    The repository, and a branch `revision`, are made where they do not exist. Files of an earlier bundle that this one
    lacks and loaders would read are removed; a repository with another model in it is refused.

    Args:
        bundle: opened with `verify="full"`.
        repository: its id, owner/name.
        private: make the repository a private one; refused where it exists and is public.
        revision: branch to commit to, main by default.

    Returns:
        the commit.

    Raises:
        UsageError: no id, no access token, or a repository that does not fit.
        HubError: the Hub cannot be reached or refuses, holds another commit than when this began, or does not hold the
            bundle afterwards.
    """
    from huggingface_hub import HfApi

    check_can_push(repository)
    api = HfApi(library_name="kvconvert")
    names = own_files(bundle.manifest) & {*bundle.files.names}
    parent, present = ask_hub(repository, lambda: _prepare(api, repository, private, revision), revision=revision)
    loadable = sorted(name for name in present if may_be_loaded(name))
    if loadable and MANIFEST_NAME not in present:
        raise UsageError(
            f"{repository} on the Hub holds {loadable[0]} and is no bundle, so nothing was pushed; give another name."
        )
    foreign = [name for name in loadable if name not in names]
    bundle.files.check_unchanged()
    if bundle.files.links:
        names_of_links = printable(listed(sorted(bundle.files.links)))
        logger.warning("Not uploaded, because they are links: %s.", names_of_links)
    commit = ask_hub(
        repository,
        lambda: api.upload_folder(
            repo_id=repository,
            folder_path=bundle.directory,
            commit_message="Upload a kvconvert bundle",
            revision=revision,
            parent_commit=parent,  # or files that came meanwhile would stay beside the bundle's
            allow_patterns=sorted(names),
            delete_patterns=[glob.escape(name) for name in foreign] or None,
        ),
        revision=revision,
    ).oid
    found = ask_hub(repository, lambda: list(api.list_repo_tree(repository, recursive=True, revision=commit)))
    _compare(bundle, repository, names, {entry.path: entry for entry in found})
    return commit


def _prepare(api: Any, repository: str, private: bool, revision: str | None) -> tuple[str | None, list[str]]:
    """Make the repository and the branch where they are missing; gives the commit and the names of its files."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        exists, is_private = True, api.model_info(repository).private
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        exists, is_private = False, private
    if private and not is_private:
        raise UsageError(
            f"{repository} exists on the Hub and is public, so nothing was pushed; make it private there, or leave "
            "`private=True` out."
        )
    if not exists:
        api.create_repo(repository, private=private or None, exist_ok=True)
    try:
        info = api.model_info(repository, revision=revision)
    except RevisionNotFoundError:
        api.create_branch(repository, branch=revision, exist_ok=True)
        info = api.model_info(repository, revision=revision)
    return info.sha, [entry.rfilename for entry in info.siblings or ()]


def _compare(bundle: Bundle, repository: str, names: set[str], found: dict[str, Any]) -> None:
    """Refuse a repository that holds other bytes: a file changed meanwhile, or was lost on the way."""
    for name in sorted(names):
        entry, listed = found.get(name), bundle.manifest.files.get(name)
        lfs = getattr(entry, "lfs", None)
        if lfs is not None:
            expected = listed.sha256 if listed is not None else _sha256(bundle.directory / name)
            same = lfs.sha256 == expected
        elif entry is not None:  # stored by git, under the SHA-1 of a header and the content
            content = (bundle.directory / name).read_bytes()
            same = entry.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            same = same and (listed is None or hashlib.sha256(content).hexdigest() == listed.sha256)
        else:
            same = False
        if not same:
            raise HubError(
                f"{name} of {repository} on the Hub {'differs from' if entry else 'is missing, unlike in'} the bundle "
                f"{bundle.directory}; push it again."
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch(
    repository: str, output: str | Path | None = None, *, revision: str | None = None, force: bool = False
) -> tuple[Path, str]:
    """Fetch a bundle from the Hub and verify all of it.

    Files that were fetched completely before an interruption are not fetched again.

    Args:
        repository: its id, owner/name.
        output: directory to write, which appears when everything is there and verified; None fetches into the Hub's
            cache, where every command finds it by its id.
        revision: branch, tag or commit.
        force: replace a bundle at `output`.

    Returns:
        the bundle's directory, and the commit.

    Raises:
        UsageError: no id, or an output that exists.
        HubError: it cannot be fetched.
        BundleError: it does not hold what its manifest says; then no output is left.
    """
    from huggingface_hub import HfApi

    check_id(repository)
    target = None if output is None else Path(os.path.realpath(output))
    if target is not None:
        if target.parent.is_dir():
            recover(target)
        check_output(target, force)
        disk.check_writable(target.parent, "output")
    api = HfApi(library_name="kvconvert")
    # Asked first, so that what is taken from the cache is not taken for what the Hub has.
    info = ask_hub(repository, lambda: api.model_info(repository, revision=revision), revision=revision)
    commit, names = str(info.sha), {entry.rfilename for entry in info.siblings or ()}
    if MANIFEST_NAME not in names:
        raise HubError(
            f"{repository} on the Hub is not a kvconvert bundle: it has no {MANIFEST_NAME}; give another id."
        )
    if target is None:
        directory = Path(ask_hub(repository, lambda: _snapshot(repository, revision), revision=revision))
        open_bundle(directory)
        return directory, directory.name  # a branch may have moved on since
    disk.make_directory(target.parent)
    # The same for the same repository, so that the next pull goes on with what an interrupted one has.
    mark = hashlib.sha256(repository.encode()).hexdigest()[:8]
    staging = target.parent / f".{target.name}.pulling-{mark}"
    if os.path.lexists(staging) and not is_own_directory(staging):
        raise UsageError(f"{staging} is no directory of yours, and a pull to {output} needs one there; remove it.")
    disk.make_directory(staging)
    with locked(staging) as held:
        if not held:
            raise UsageError(f"Another pull of {repository} to {output} is at work; wait for it.")
        ask_hub(repository, lambda: _snapshot(repository, commit, staging), revision=revision)
        for path in filter(Path.is_file, files_below(staging)):  # of an earlier revision
            name = path.relative_to(staging).as_posix()
            if name not in names and not name.startswith(f"{CLIENT_FOLDER}/"):
                disk.remove(path)
        try:
            open_bundle(staging)
        except BundleError as error:
            disk.remove_tree(staging)
            raise BundleError(
                f"{repository} on the Hub does not verify, so {output} was not written: {error}"
            ) from error
        disk.remove_tree(staging / CLIENT_FOLDER)
        put_in_place(staging, target, force)
    return target, commit


def _snapshot(repository: str, revision: str | None, directory: Path | None = None) -> str:
    """The files of a repository, fetched as far as they are not there: in a directory, or in the Hub's cache."""
    from huggingface_hub import snapshot_download

    return snapshot_download(repository, revision=revision, local_dir=directory, ignore_patterns=HIDDEN)
