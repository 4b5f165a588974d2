"""The arguments of an evaluation: parts or tasks to measure, the length of segments, and the source to compare with.

Nothing here imports torch, which takes seconds: commands refuse wrong names and paths before that.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kvconvert.errors import MissingError, UsageError
from kvconvert.io.hub import is_hub_id
from kvconvert.kernels.page_formats import PAGE_SIZE
from kvconvert.models.positions import check_length

if TYPE_CHECKING:
    from kvconvert.bundle.manifest import Manifest

PARTS = {
    "perplexity": "perplexity per token of held-out text",
    "kl": "KL divergence from the source's next-token distribution",
    "top1": "how often both rank the same token first",
    "retrieval": "retrieval of numbers from the context; through the chat template, if the model has one",
    "probes": "exact lookups in JSON, assignments, prose, code and earlier turns",
    "free-running": "tokens until greedy continuations differ",
    "images": "the same on text about images, of vision-language models",
    "cache": "bytes and bits of the cache",
    "weights": "bytes and bits of the weights",
}


TEXT_ALONE = "`only`: the bundle's model reads text alone, so leave images out."


def parts_asked(only: Collection[str] | None) -> set[str]:
    """The parts to measure, all of them for None.

    Raises:
        UsageError: there is no such part, or none is named.
    """
    if only is None:
        return set(PARTS)
    unknown = [name for name in only if name not in PARTS]
    if unknown or not only:
        what = f"{unknown[0]!r} is not a part of an evaluation" if unknown else "no part is named"
        raise UsageError(f"`only`: {what}; choose among {', '.join(PARTS)}.")
    return set(only)


def check_tasks(tasks: Collection[str]) -> list[str]:
    """The task files (.yaml) among tasks of lm-evaluation-harness.

    Raises:
        UsageError: no task is named, or one of which the harness has none.
        MissingError: a file is not there.
    """
    if not tasks:
        raise UsageError("`tasks`: no task is named; give names of lm-evaluation-harness, or .yaml files.")
    files = [task for task in tasks if task.endswith((".yaml", ".yml"))]
    for file in files:
        if not Path(file).is_file():
            raise MissingError(f"There is no task file {file}; check its path.")
    spec = importlib.util.find_spec("lm_eval")
    if spec is not None and spec.submodule_search_locations:
        # Its import and its index take most of a minute, and a name occurs in a file of its tasks.
        unknown = {task for task in tasks if task not in files and not {*"*?["} & {*task}}
        for file in Path(spec.submodule_search_locations[0], "tasks").rglob("*.yaml") if unknown else ():
            text = file.read_bytes()
            unknown = {task for task in unknown if task.encode() not in text}
        for task in unknown:
            raise no_such_task(task)
    return files


def no_such_task(task: str) -> UsageError:
    """The error for a name that is none of the harness's."""
    return UsageError(f"lm-evaluation-harness has no task {task!r}; name another, or give a .yaml file.")


def check_context(context: int | None, positions: int | None) -> None:
    """Refuse (UsageError) segments that are too short to be scored, or longer than a model's positions."""
    if context is not None and context < 2 * PAGE_SIZE:
        raise UsageError(f"`context` is {context}; text is scored after a page of 128 tokens, so take at least 256.")
    check_length("context", context, positions)


def source_of(manifest: Manifest, against: str | Path | None) -> str:
    """The directory or Hub id of the model to compare with: `against`, or what the manifest records.

    What a manifest records is an id or the name of a directory, never a path, so that none leads elsewhere.

    Raises:
        MissingError: the manifest records a directory that is not there.
    """
    if against is not None:
        return str(against)
    recorded = manifest.source
    is_here = Path(recorded.id).name == recorded.id != ".." and os.path.exists(recorded.id)
    if not is_hub_id(recorded.id) and not is_here:
        raise MissingError(
            f"The bundle was made from a local model named {recorded.id}, which is not in the current directory; "
            "give its path as `against`."
        )
    return recorded.id
