"""The bundles in the Hub's cache: those that were pulled without a directory, or used by their id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvconvert.bundle.manifest import MANIFEST_NAME
from kvconvert.errors import HubError, did_you_mean


@dataclass(frozen=True)
class Pulled:
    """A bundle in the cache.

    Attributes:
        repository: its id.
        commits: that are there.
        size: bytes on the disk.
        modified: when a file last changed, in words.
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
            repo.last_modified_str,
        )
        for repo in sorted(found, key=lambda repo: repo.repo_id)
    ]


def remove_pulled(repository: str) -> int:
    """Remove a bundle with all its revisions; gives the bytes that were freed (HubError: there is none)."""
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
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return scan_cache_dir()
    except CacheNotFound:
        return None


def _bundles(cache: Any) -> list[Any]:
    repos = () if cache is None else cache.repos
    return [
        repo for repo in repos if any((revision.snapshot_path / MANIFEST_NAME).exists() for revision in repo.revisions)
    ]
