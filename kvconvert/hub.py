"""`push` and `pull`: a bundle to the Hub and back."""

from __future__ import annotations

from pathlib import Path

from kvconvert.arguments import BundlePlace, Folder, Repository, checked
from kvconvert.bundle import hub
from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.io.hub import check_can_push
from kvconvert.runtime.hf.bundle_quantizer import check_fits


@checked
def push(bundle: BundlePlace, repository: Repository, *, private: bool = False, revision: str | None = None) -> str:
    """Verify a bundle as `kvconvert verify` does, then upload it; see `kvconvert.bundle.hub.upload`.

    Args:
        bundle: directory of the bundle, or the id of another repository.
        repository: id to push to, owner/name.
        private: make the repository a private one.
        revision: branch to commit to, main by default.

    Returns:
        the commit.

    Raises:
        BundleError: the bundle does not verify; nothing is sent then.
        UsageError, HubError: see `kvconvert.bundle.hub.upload`.
    """
    check_can_push(repository)
    opened = open_bundle(locate(bundle), verify="full")
    check_fits(opened)
    return hub.upload(opened, repository, private=private, revision=revision)


@checked
def pull(
    repository: Repository, output: Folder | None = None, *, revision: str | None = None, force: bool = False
) -> Path:
    """Fetch a bundle from the Hub and verify it; see `kvconvert.bundle.hub.fetch`.

    Args:
        repository: its id, owner/name.
        output: directory to write; None fetches into the Hub's cache.
        revision: branch, tag or commit.
        force: replace a bundle at `output`.

    Returns:
        the bundle's directory.

    Raises:
        UsageError, HubError, BundleError: see `kvconvert.bundle.hub.fetch`.
    """
    return hub.fetch(repository, output, revision=revision, force=force)[0]
