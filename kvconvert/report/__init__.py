"""`report`: what a bundle is and what it costs, as one HTML file and PNG figures.

Needs matplotlib (`pip install ".[report]"`). docs/evaluation.md shows the figures.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvconvert.arguments import BundlePlace, File, Folder, ModelPlace, checked
from kvconvert.bundle.describe import Description, check_cache_size, describe, smaller
from kvconvert.bundle.figures import number
from kvconvert.bundle.files import read_object
from kvconvert.bundle.locate import check_outside, locate
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.errors import BundleError, MissingError, UsageError, unreadable
from kvconvert.io import disk

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kvconvert.report.data import KeySample

PAGE_NAME = "report.html"


@checked
def write_report(
    bundle: BundlePlace,
    output: Folder | None = None,
    *,
    fidelity: File | None = None,
    model: ModelPlace | None = None,
) -> Path:
    """Write `report.html`, which holds everything, and each of its figures as PNG.

    Args:
        bundle: directory of the bundle, which is verified and stays as it is; or the id of one on the Hub, of which no
            weights are fetched.
        output: directory for the files, `BUNDLE-report` beside the bundle by default, or in the current directory for
            one on the Hub; an earlier report there is replaced.
        fidelity: file that `kvconvert eval --json` wrote of this bundle, which takes the place of what was measured at
            export.
        model: directory or Hub id of the source, on which a short text is run on the CPU for the figures of keys.

    Returns:
        path of the page.

    Raises:
        KvconvertError: one of its children; nothing was written then.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingError("A report is drawn with matplotlib; run pip install '.[report]' in a clone of kvconvert.")
    local = os.path.exists(bundle)
    if output is None and not local:  # not into the Hub's cache
        output = f"{Path(bundle).name}-report"
    directory = locate(bundle, weights=False)
    target = _target(directory, output)
    measured, missed = None if fidelity is None else _read_fidelity(Path(fidelity)), []
    opened = open_bundle(directory, verify="full" if local else "plan")
    stored = opened.manifest.fidelity
    if measured is None:
        measured, missed = (None, []) if stored is None else (stored.report, stored.missed)
    elif measured.get("files_digest") != opened.manifest.files_digest():
        raise UsageError(
            f"`fidelity` {fidelity} was not measured on this bundle; measure this one with kvconvert eval."
        )
    # Only now, for transformers and matplotlib take seconds.
    from kvconvert.models.configuration import read_config, sliding_windows
    from kvconvert.report.data import sample_keys

    sample = None if model is None else sample_keys(str(model), opened.manifest)
    config = read_config(opened.directory, opened.config)
    check_cache_size(opened.manifest, sliding_windows(config))
    html, images = render(opened, config, measured, missed, sample)
    _write(target, html, images)
    return target / PAGE_NAME


def render(
    bundle: Bundle,
    config: PretrainedConfig,
    fidelity: dict[str, Any] | None = None,
    missed: Sequence[str] = (),
    sample: KeySample | None = None,
) -> tuple[str, dict[str, bytes]]:
    """The page, and the PNG files by name.

    Args:
        bundle: verified, which does not mean that its texts are harmless.
        config: transformers' configuration of the bundle.
        fidelity: a fidelity report as plain JSON values, or None.
        missed: the recipe's limits that the bundle misses.
        sample: keys of the source, or None.
    """
    from kvconvert.models.configuration import context_length, sliding_windows
    from kvconvert.report.sections import Contents, Heading, page

    found = describe(bundle.manifest, sliding_windows(config), context_length(config))
    contents = Contents(replace(bundle, manifest=found.manifest), found, config, fidelity, list(missed), sample)
    contents.build()
    heading = Heading(found.manifest.source.id, found.facts, _tiles(found, fidelity))
    return page(heading, contents.sections, contents.omitted), contents.images


def _read_fidelity(path: Path) -> dict[str, Any]:
    """A file that `kvconvert eval --json` wrote.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        return read_object(path, bounded=True)
    except OSError as error:
        raise MissingError(f"`fidelity` {unreadable(path, error)}") from error
    except BundleError as error:
        raise UsageError(f"`fidelity` {path} is no JSON report of kvconvert eval; measure the bundle again.") from error


def _target(bundle: Path, output: str | Path | None) -> Path:
    resolved = bundle.resolve()
    target = resolved.with_name(f"{resolved.name}-report") if output is None else Path(output)
    if target.suffix.lower() in (".html", ".htm") and not target.is_dir():
        raise UsageError(
            f"`output` is {target}, and a report is a directory of {PAGE_NAME} and figures; give a directory's name."
        )
    check_outside(target / PAGE_NAME)
    disk.check_writable(target, "output")
    return target


def _write(target: Path, html: str, images: dict[str, bytes]) -> None:
    from kvconvert.report.sections import FILES

    try:
        disk.make_directory(target)
        for name, content in images.items():
            disk.replace_bytes(target / name, content)
        disk.replace_bytes(target / PAGE_NAME, html.encode())
        for name in FILES - images.keys():  # of an earlier report
            disk.remove(target / name)
    except OSError as error:
        raise MissingError(
            f"The report cannot be written to {target} ({error.strerror}); make room, or choose another `output`."
        ) from error


def _tiles(found: Description, measured: dict[str, Any] | None) -> list[tuple[str, str]]:
    tiles, size, weights = [], found.size, found.manifest.weights.bits_per_weight
    if size is not None:
        what = f"smaller cache at {size.context:,} tokens: {size.bits_per_value:.2f} bits per value"
        tiles.append((smaller(size), what))
    tiles.append((f"{weights:.2f}", "bits per weight, embeddings included"))
    if measured is None:
        tiles.append(("not measured", "what that loses; kvconvert eval measures it"))
    kl, agreement = number(measured or {}, "kl.mean"), number(measured or {}, "top1_agreement")
    before, after = (number(measured or {}, f"perplexity.{side}") for side in ("source", "bundle"))
    if kl is not None:
        tiles.append((f"{kl:.3g}", "KL from the source, nats per token"))
    if before is not None and after is not None:
        tiles.append((f"{after:,.2f}", f"perplexity; the source has {before:,.2f}"))
    if agreement is not None:
        tiles.append((f"{agreement:.1%}", "same most likely token"))
    return tiles
