"""`kvconvert eval --write`: a measurement becomes part of the bundle, its weights untouched."""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from kvconvert.bundle.card import CARD_NAME, model_card, replace_fidelity
from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import Fidelity, Manifest
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, UsageError
from kvconvert.fidelity.probes import MIN_PROMPTS
from kvconvert.fidelity.report import FidelityReport
from kvconvert.io import disk
from kvconvert.models.configuration import context_length, read_config, sliding_windows
from kvconvert.recipes.recipe import Limits, Recipe

logger = logging.getLogger(__name__)


def check_recordable(bundle: str | Path) -> None:
    """Refuse, before anything is measured, a bundle that cannot be written to.

    Raises:
        UsageError: it is on the Hub or in the Hub's cache, or its directory is read-only.
    """
    manifest = Path(bundle) / MANIFEST_NAME
    if manifest.is_symlink() or not os.path.exists(bundle):
        raise UsageError(
            f"{bundle} is no directory of your own, so nothing can be written into it; `kvconvert pull` it to one, and "
            "push that afterwards."
        )
    disk.check_writable(Path(bundle), "bundle")


def record(bundle: str | Path, report: FidelityReport) -> Fidelity:
    """Put a whole measurement into the bundle's manifest, which is sealed anew, and into its card.

    Each of the two files is replaced in one step, the manifest first. Of a card that was edited by hand the section
    about fidelity is replaced.

    Args:
        bundle: its directory.
        report: `evaluate`'s, of all parts, against the recorded source.

    Returns:
        what the manifest now holds.

    Raises:
        UsageError: the report is of another source.
        BundleError: the bundle changed since it was measured.
    """
    directory = Path(bundle)
    opened = open_bundle(directory, verify="headers")
    before = opened.manifest
    config = read_config(directory, opened.config, len(before.tensors))
    told = sliding_windows(config), context_length(config)
    if not report.against.is_recorded_source:
        raise UsageError(
            f"{report.against.id} is not the checkpoint that {MANIFEST_NAME} records ({before.source.id}), so the "
            "figures were not written; give that one as `against`."
        )
    if report.files_digest != before.files_digest():
        raise BundleError(f"{bundle} changed while it was measured, so nothing was written; measure it again.")
    fidelity = fidelity_of(before, Recipe.from_dict(before.recipe).limits, report)
    manifest = before.model_copy(update={"fidelity": fidelity})
    path = directory / CARD_NAME
    # A card that was edited may hold any bytes, which stay as they are.
    present = CARD_NAME in opened.files.names
    card = path.read_text(encoding="utf-8", errors="surrogateescape") if present else model_card(before, *told)
    written = model_card(manifest, *told) if card == model_card(before, *told) else replace_fidelity(card, manifest)
    disk.replace_bytes(directory / MANIFEST_NAME, manifest.to_bytes())
    if written is not None and CARD_NAME in manifest.informative:
        disk.replace_bytes(path, written.encode("utf-8", "surrogateescape"))
    return fidelity


def fidelity_of(manifest: Manifest, limits: Limits, report: FidelityReport) -> Fidelity:
    """A report on exactly the files of `manifest`, with the limits that it meets or misses; warns of what is lost."""
    if lost := report.losses():
        logger.warning("The bundle loses more than a tenth of what its source can do: %s.", "; ".join(lost))
    figures = _without_few_prompts(report.to_dict())
    return Fidelity(
        measured_on=manifest.files_digest(),
        report=_finite(figures),
        limits=limits.as_set(),
        missed=limits.missed(figures),
    )


def _without_few_prompts(figures: dict[str, Any]) -> dict[str, Any]:
    """A report in which retrieval and probes that were measured on too few prompts to be judged are None, or absent."""
    retrieval, probes = figures.get("retrieval"), figures.get("probes") or {}
    # A probe of which the source knows nothing is asked in few prompts.
    few = [name for name, found in probes.items() if found["prompts"] < MIN_PROMPTS and found["bundle"] is not None]
    few_retrieved = retrieval is not None and 0 < retrieval["prompts"] < MIN_PROMPTS
    if not few and not few_retrieved:
        return figures
    logger.warning(
        "Retrieval and probes of fewer than %d prompts show nothing and are not recorded: score more.", MIN_PROMPTS
    )
    kept = {name: found for name, found in probes.items() if name not in few}
    return figures | {"retrieval": None if few_retrieved else retrieval, "probes": kept}


def _finite(value: Any) -> Any:
    """The same report with null for NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
