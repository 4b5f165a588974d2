"""The figures of one evaluation, as `evaluate` returns them, and as a table for a person; `--json` has every figure.

Sizes of the cache are computed and measured, those of the weights are from the files' headers. With `--write` a
measurement becomes part of the bundle, its weights untouched.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from kvconvert.bundle.card import CARD_NAME, model_card, replace_fidelity
from kvconvert.bundle.figures import HEADER, fidelity_rows
from kvconvert.bundle.locate import MANIFEST_NAME
from kvconvert.bundle.manifest import Fidelity, Manifest
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, UsageError, listed
from kvconvert.fidelity.images import ImageFigures
from kvconvert.fidelity.probes import MIN_PROMPTS, PILOT, ProbeResult, abilities, losses
from kvconvert.fidelity.retrieval import FreeRunningResult, RetrievalResult
from kvconvert.fidelity.scoring import Comparison, Decoder, bootstrap_mean, read_prompt
from kvconvert.io import disk
from kvconvert.io.json_text import MAX_JSON
from kvconvert.io.records import DataInfo
from kvconvert.io.regular import read_regular
from kvconvert.io.tensorheader import nbytes, read_header
from kvconvert.models.configuration import context_length, model_cache, read_config, sliding_windows
from kvconvert.models.source import SourceModel
from kvconvert.recipes.recipe import Limits, Recipe
from kvconvert.runtime import KVCache
from kvconvert.tables import text_table


@dataclass(frozen=True)
class Perplexity:
    """Perplexity per token. `increase` is relative: 0.05 means 5%; its interval is None with one segment."""

    source: float
    bundle: float
    increase: float
    increase_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Divergence:
    """KL(source || bundle) of the next-token distribution in nats: mean and percentiles over scored tokens."""

    mean: float
    p99: float
    p999: float
    mean_interval: tuple[float, float] | None


@dataclass(frozen=True)
class CacheSize:
    """The bundle's cache of one sequence.

    Attributes:
        context: tokens for which bits and bytes per token are stated.
        bits_per_value: the mean over how full the last page is (`kvconvert.cache`), scales, norms and
            full-precision tokens included; of schemes that compress the tokens of one modality, measured with text.
        bytes_per_token: over all layers, at these bits.
        bytes_used, bytes_allocated: measured from the tensors of a cache of `tokens` tokens.
        source_bytes_per_token: bytes per token of the source's cache in the same dtype.
        tokens, residual_tokens: stored, and how many of them in full precision.
        dtype: the dtype of full-precision tokens.
        residual_share: share of the attended context that was in full precision while text was scored; the longer
            the context, the smaller it gets. None, as `clamped_rows`, if none was.
        clamped_rows: queries, per layer and head, for which CalibQuant's shift made different scores equal while
            fidelity was scored.
    """

    context: int
    bits_per_value: float
    bytes_per_token: float
    bytes_used: int
    bytes_allocated: int
    source_bytes_per_token: float
    tokens: int
    residual_tokens: int
    dtype: str
    residual_share: float | None
    clamped_rows: int | None


@dataclass(frozen=True)
class WeightSize:
    """All tensors in the weight files, embeddings included; `bits_per_weight` is per parameter of the source model."""

    bytes: int
    bits_per_weight: float
    source_bytes: int


@dataclass(frozen=True)
class EvaluationText:
    """The scored text: the samples, and in each `prefill` tokens read first, then `scored` tokens in `chunk`s.

    `scored_tokens` is 0 where no text was scored.
    """

    samples: DataInfo
    scored_tokens: int
    scored_per_segment: int
    prefill: int
    chunk: int


@dataclass(frozen=True)
class ComparedWith:
    """The model compared with; `is_recorded_source` says whether its files are those that the manifest names."""

    id: str
    is_recorded_source: bool


@dataclass(frozen=True)
class NoiseFloor:
    """The cost of rounding alone: a KL as small as this says nothing of the quantization.

    Attributes:
        kl: the KL divergence of the source in the dtype of the evaluation from the source in float32, nats per token.
        tokens: scored for it, of the first segment.
        what: which two were compared.
    """

    kl: float
    tokens: int
    what: str


@dataclass(frozen=True)
class FidelityReport:
    """All figures of one evaluation; source and bundle were given the same tokens and prompts.

    A part that was not chosen is None.

    Attributes:
        parts: that were measured, of `PARTS`.
        top1_agreement: share of scored tokens at which both rank the same token first.
        top1_agreement_interval: its bootstrap interval over segments, None with one segment.
        noise: the noise of the dtype; None in float32, whose rounding is negligible.
        retrieval: numbers found in the context; `retrieval_form` says how they were asked for.
        retrieval_form: "chat template" or "plain text".
        probes: by name; without those that do not fit the model's positions.
        verdict: what the bundle is fit for, in a sentence; see `kvconvert.fidelity.probes`.
        images: results on text about images; None unless the model reads images and a conversation fits its positions.
        files_digest: the digest of the files of the bundle that was measured, see `Manifest.files_digest`.
        compute_dtype, device, seed, versions: how it was measured.
        notes: what a reader has to know to judge the figures.
        head_bits: that the bundle was loaded with, see `load`.
    """

    parts: tuple[str, ...]
    perplexity: Perplexity | None
    kl: Divergence | None
    top1_agreement: float | None
    top1_agreement_interval: tuple[float, float] | None
    noise: NoiseFloor | None
    retrieval: RetrievalResult | None
    retrieval_form: str | None
    probes: dict[str, ProbeResult] | None
    verdict: str | None
    free_running: FreeRunningResult | None
    images: ImageFigures | None
    kv: CacheSize | None
    weights: WeightSize | None
    text: EvaluationText
    against: ComparedWith
    files_digest: str
    compute_dtype: str
    device: str
    seed: int
    versions: dict[str, str]
    notes: tuple[str, ...]
    head_bits: int | None = None

    def losses(self) -> list[str]:
        """One clause for retrieval and for each probe of which the bundle loses over a tenth, and not by chance."""
        return losses(abilities(self.probes or {}, self.retrieval))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values, nested by the names above."""
        plain = asdict(self)
        plain["text"]["samples"] = self.text.samples.model_dump(mode="json")
        return _plain(plain)


def text_figures(comparison: Comparison, seed: int) -> dict[str, Any]:
    """Perplexity, KL and top-1 agreement with bootstrap intervals, by the names of `FidelityReport`."""
    rise = bootstrap_mean((comparison.other_nll - comparison.source_nll).mean(1), seed)
    kl = bootstrap_mean(comparison.kl.mean(1), seed)
    agreement = bootstrap_mean(comparison.agrees.double().mean(1), seed)

    def relative(log_ratio: float) -> float:
        return float(torch.tensor(log_ratio, dtype=torch.float64).expm1())

    return {
        "perplexity": Perplexity(
            source=float(comparison.source_nll.mean().exp()),
            bundle=float(comparison.other_nll.mean().exp()),
            increase=relative(rise.mean),
            increase_interval=None if rise.low is None else (relative(rise.low), relative(rise.high)),
        ),
        "kl": Divergence(
            mean=kl.mean,
            p99=_percentile(comparison.kl, 0.99),
            p999=_percentile(comparison.kl, 0.999),
            mean_interval=kl.bounds,
        ),
        "top1_agreement": agreement.mean,
        "top1_agreement_interval": agreement.bounds,
    }


def _percentile(values: torch.Tensor, share: float) -> float:
    """The value below which a share of all lies; no interpolation."""
    return float(values.flatten().sort().values[int(share * (values.numel() - 1))])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def table(report: FidelityReport) -> str:
    """About twenty rows, what the bundle is fit for, then how all was measured."""
    text = report.text
    said = [f"computed in {report.compute_dtype} on {report.device} against {report.against.id}"]
    if text.scored_tokens:
        said.insert(
            0,
            f"{text.scored_tokens:,} tokens of {text.samples.source} scored: whole segments, "
            f"{text.scored_per_segment:,} of each after {text.prefill:,} read first",
        )
    judged = [] if report.verdict is None else [report.verdict, ""]
    return "\n".join([text_table(HEADER, fidelity_rows(report.to_dict())), "", *judged, *said, *report.notes])


CHUNK = 1024  # tokens per pass


@torch.no_grad()
def measure_cache(
    decoder: Decoder, ids: torch.Tensor, tokens: int, context: int, dtype: torch.dtype, comparison: Comparison | None
) -> CacheSize:
    """Fill the bundle's cache with `tokens` tokens and measure its tensors; sizes at `context` follow by arithmetic.

    Args:
        decoder: the bundle, which is left in `dtype`.
        ids: token ids of text, repeated where it is too short.
        tokens: how many.
        context: tokens for which bits per value are stated.
        dtype: that the bundle serves, in which full-precision tokens are counted.
        comparison: while which the share of full-precision tokens was counted, if there was one.
    """
    model = decoder.model
    if model.dtype != dtype:
        model.to(dtype)
    flat = ids.flatten()
    filler = flat.repeat(-(-tokens // len(flat)))[:tokens].unsqueeze(0)
    cache = decoder.new_cache()
    read_prompt(decoder, cache, filler, CHUNK)
    schemes = cache.schemes if isinstance(cache, KVCache) else [None] * len(cache.layers)
    size = model_cache(model.config, schemes, dtype)
    bits = size.bits_per_value(context) or 0.0
    if isinstance(cache, KVCache):
        stats = cache.stats()
        used, allocated, residual = stats.bytes_used, stats.bytes_allocated, stats.residual_tokens
        if any(scheme is not None and scheme.only_tokens() for scheme in schemes):
            context, bits = tokens, stats.bits_per_value  # the filler has none of those
    else:
        used = allocated = sum(_nbytes(layer) for layer in cache.layers)
        residual = tokens
    return CacheSize(
        context=context,
        bits_per_value=bits,
        bytes_per_token=bits / 8 * size.numbers(context) / context,
        bytes_used=used,
        bytes_allocated=allocated,
        source_bytes_per_token=size.plain_bytes(context) / context,
        tokens=tokens,
        residual_tokens=residual,
        dtype=str(dtype).removeprefix("torch."),
        residual_share=None if comparison is None else comparison.residual_share,
        clamped_rows=None if comparison is None else comparison.clamped_rows,
    )


def _nbytes(layer: Any) -> int:
    return sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.ndim == 4)


def weight_size(directory: Path, manifest: Manifest, checkpoint: SourceModel) -> WeightSize:
    """Sizes from the headers of the files themselves."""
    own = manifest.weight_files()
    if not own:
        raise BundleError(f"{directory} lists no weight files; export the bundle again.")
    size = sum(nbytes(info) for name in own for info in read_header(directory / name).values())
    files = [checkpoint.file(name) for name in set(checkpoint.weight_map.values())]
    source_size = sum(_data_bytes(file) if file.suffix == ".safetensors" else file.stat().st_size for file in files)
    parameters = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return WeightSize(bytes=size, bits_per_weight=8 * size / parameters, source_bytes=source_size)


def _data_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file, whatever their types: all but the header and the length before it."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


logger = logging.getLogger(__name__)


def check_recordable(bundle: str | Path) -> None:
    """Refuse, before anything is measured, a bundle that cannot be written to.

    Raises:
        UsageError: it is on the Hub or in the Hub's cache, or its directory is read-only.
        RecipeError: its manifest records no recipe, whose limits are written, too.
    """
    manifest = Path(bundle) / MANIFEST_NAME
    if manifest.is_symlink() or not os.path.exists(bundle):
        raise UsageError(
            f"{bundle} is no directory of your own, so nothing can be written into it; `kvconvert pull` it to one, and "
            "push that afterwards."
        )
    disk.check_writable(Path(bundle), "bundle", "make it writable, or measure a copy of the bundle")
    Recipe.from_dict(open_bundle(Path(bundle), verify="plan").manifest.recipe)


def check_recorded_source(manifest: Manifest, against: ComparedWith) -> None:
    """Refuse (UsageError) a comparison with another model than the one that the manifest records."""
    if not against.is_recorded_source:
        raise UsageError(
            f"{against.id} is not the checkpoint that {MANIFEST_NAME} records ({manifest.source.id}), whose figures "
            "belong there; give that one as `against`."
        )


def record(bundle: str | Path, report: FidelityReport) -> Fidelity:
    """Put a whole measurement into the bundle's manifest, which is sealed anew, and into its card.

    Both files are written before either is replaced, each in one step, the manifest first. Of a card that was edited by
    hand the section about fidelity is replaced.

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
    config = read_config(directory, opened.config)
    told = sliding_windows(config), context_length(config)
    check_recorded_source(before, report.against)
    if report.files_digest != before.files_digest():
        raise BundleError(f"{bundle} changed while it was measured, so nothing was written; measure it again.")
    fidelity = fidelity_of(before, Recipe.from_dict(before.recipe).limits, report)
    manifest = before.model_copy(update={"fidelity": fidelity})
    path = directory / CARD_NAME
    # A card that was edited may hold any bytes, which stay as they are.
    present = CARD_NAME in opened.files.names
    content = read_regular(path, MAX_JSON) if present else model_card(before, *told).encode()
    if content is None:
        raise BundleError(f"{path} has more than {MAX_JSON:,} bytes, too many for a card; replace it.")
    card = content.decode(errors="surrogateescape").replace("\r\n", "\n")
    written = model_card(manifest, *told) if card == model_card(before, *told) else replace_fidelity(card, manifest)
    contents = {directory / MANIFEST_NAME: manifest.to_bytes()}
    if written is not None and CARD_NAME in manifest.informative:
        contents = {path: written.encode("utf-8", "surrogateescape")} | contents
    with ExitStack() as replaced:  # the last one first
        for file, content in contents.items():
            replaced.enter_context(disk.replacement(file, len(content), hashed=False)).write(content)
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
    few = [name for name, found in probes.items() if found["prompts"] < MIN_PROMPTS]
    few_retrieved = retrieval is not None and 0 < retrieval["prompts"] < MIN_PROMPTS
    # Of many prompts, PILOT show that the source knows nothing, and the others are not asked.
    many = all(probes[name]["bundle"] is None and probes[name]["prompts"] == PILOT for name in few)
    if many and not few_retrieved:
        return figures
    unrecorded = ["retrieval"] * few_retrieved + [f"the probe {name}" for name in few]
    logger.warning(
        "%s: fewer than %d prompts show nothing and are not recorded; score more.", listed(unrecorded), MIN_PROMPTS
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
