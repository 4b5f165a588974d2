"""`evaluate`: one report on what a bundle keeps of its source model.

Source and bundle are computed in float32 on the CPU, so that differences are the quantization's and not the dtype's,
and both at once, so that only one chunk of log-probabilities has to be held. The size of the cache is measured last,
with the bundle in the dtype that it serves.
"""

from __future__ import annotations

import math
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from kvconvert.bundle.manifest import PLAN_NAME, DataInfo, Manifest
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.tensorfile import nbytes, read_header
from kvconvert.data.text import load_token_samples
from kvconvert.errors import BundleError, UsageError
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.images import DRAWINGS, ImageFigures, image_figures
from kvconvert.fidelity.recall import (
    DEFAULT_COUNTS,
    DrillBook,
    DrillCounts,
    FreeRunningResult,
    PasskeyResult,
    RecitationResult,
    answer_with,
    free_running,
    passkey,
    passkey_drills,
    recitation,
)
from kvconvert.fidelity.scoring import Comparison, Decoder, compare, feed, seal, treats_whole_prompts
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models.auto_class import model_class, supports_images
from kvconvert.models.processors import tokenizer_of
from kvconvert.models.source import SourceModel, open_source
from kvconvert.runtime import KVCache, load
from kvconvert.version import __version__

SEGMENT_TOKENS = 1024
SCORED_TOKENS_WANTED = 512  # of each segment
CACHE_TOKENS = 2048  # at which the cache's size is measured: whole pages, so that the residual is empty


@dataclass(frozen=True)
class Perplexity:
    """Perplexity per token. `increase` is relative: 0.05 means 5 %; its interval is None with one segment."""

    source: float
    bundle: float
    increase: float
    increase_interval: tuple[float, float] | None


@dataclass(frozen=True)
class Divergence:
    """KL(source || bundle) of the next-token distribution in nats: mean and 99th percentile over scored tokens."""

    mean: float
    p99: float
    mean_interval: tuple[float, float] | None


@dataclass(frozen=True)
class CacheSize:
    """The bundle's cache after `tokens` tokens of one sequence, measured from its tensors.

    Attributes:
        bits_per_value: bits per stored key or value number, scales, norms and full-precision tokens included.
        bytes_per_token: over all layers.
        bytes_used, bytes_allocated: in total.
        source_bytes_per_token: of the source's cache in the same dtype.
        tokens, residual_tokens: stored, and how many of them in full precision.
        dtype: of full-precision tokens.
        residual_share: share of the attended context that was in full precision while fidelity was scored; the
            longer the context, the smaller it gets.
        clamped_rows: queries, per layer and head, for which CalibQuant's shift made different scores equal while
            fidelity was scored.
    """

    bits_per_value: float
    bytes_per_token: float
    bytes_used: int
    bytes_allocated: int
    source_bytes_per_token: float
    tokens: int
    residual_tokens: int
    dtype: str
    residual_share: float
    clamped_rows: int


@dataclass(frozen=True)
class WeightSize:
    """All tensors in the weight files, embeddings included; `bits_per_weight` is per parameter of the source model."""

    bytes: int
    bits_per_weight: float
    source_bytes: int


@dataclass(frozen=True)
class EvaluationText:
    """What was scored: the samples, and in each `prefill` tokens read first, then `scored` tokens in `chunk`s."""

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
class FidelityReport:
    """All figures of one evaluation; source and bundle were given the same tokens and prompts.

    Attributes:
        top1_agreement: share of scored tokens at which both rank the same token first.
        top1_agreement_interval: its bootstrap interval over segments, None with one segment.
        images: of a vision-language model; None for any other, and where a conversation does not fit its positions.
        files_digest: of the bundle that was measured, see `Manifest.files_digest`.
        compute_dtype, device, seed, versions: how it was measured.
        notes: what a reader has to know to judge the figures.
    """

    perplexity: Perplexity
    kl: Divergence
    top1_agreement: float
    top1_agreement_interval: tuple[float, float] | None
    passkey: PasskeyResult
    recitation: RecitationResult
    free_running: FreeRunningResult
    images: ImageFigures | None
    kv: CacheSize
    weights: WeightSize
    text: EvaluationText
    against: ComparedWith
    files_digest: str
    compute_dtype: str
    device: str
    seed: int
    versions: dict[str, str]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain JSON values, nested by the names above."""
        plain = asdict(self)
        plain["text"]["samples"] = self.text.samples.model_dump(mode="json")
        return _plain(plain)


def evaluate(
    bundle: str | Path,
    against: str | Path | None = None,
    *,
    data: str | None = None,
    tokens: int = 8192,
    seed: int = 0,
    drills: DrillCounts = DEFAULT_COUNTS,
    drawings: int = DRAWINGS,
    progress: bool = True,
) -> FidelityReport:
    """Measure a bundle against its source model.

    Args:
        bundle: directory of the bundle.
        against: directory or Hub id of the source; None takes the id that the manifest records.
        data: SOURCE of held-out text, see `kvconvert.data.text`; None takes the embedded one.
        tokens: how many tokens to score; rounded up to whole segments.
        seed: of the choice of text, of drills and of the bootstrap.
        drills: how many recall drills of each kind.
        drawings: how many conversations about an image a vision-language model is compared on.
        progress: bars on stderr.

    Raises:
        UsageError: nothing to score, or a source that cannot be found or compared.
        BundleError, CheckpointError, DataError, NumericError: as their names say.
    """
    if tokens < 1:
        raise UsageError(f"tokens = {tokens} leaves nothing to score; score at least one token.")
    if drawings < 1:
        raise UsageError(f"drawings = {drawings}: images are compared on at least one conversation.")
    bundle = Path(bundle)
    opened = open_bundle(bundle)
    manifest = opened.manifest
    checkpoint = open_source(_source_of(manifest, against))
    info = checkpoint.info(progress)
    recorded = manifest.source
    is_recorded = (info.config_sha256, info.weights_sha256) == (recorded.config_sha256, recorded.weights_sha256)

    model, processor = load(bundle, dtype=torch.float32, verify="headers")  # hashed a moment ago
    tokenizer = tokenizer_of(processor)
    auto = model_class(checkpoint.config)
    source_model = auto.from_pretrained(checkpoint.directory, dtype=torch.float32).eval()
    vocabularies = [m.get_output_embeddings().weight.shape[0] for m in (source_model, model)]
    if vocabularies[0] != vocabularies[1]:
        raise UsageError(
            f"{checkpoint.id} has a vocabulary of {vocabularies[0]} tokens, the bundle one of {vocabularies[1]}; "
            "compare a bundle with the model it was made from."
        )
    source, decoder = Decoder.plain(source_model), decoder_of(model.eval())
    length, prefill, scored = _segment_shape(source_model, treats_whole_prompts(decoder.new_cache()))
    samples = load_token_samples(data, tokenizer, -(-tokens // scored), length, seed, default="evaluation")
    comparison = compare(source, {"bundle": decoder}, samples.ids, prefill, progress=progress)["bundle"]

    reach = min(_max_length(source_model), SEGMENT_TOKENS)
    prose = samples.ids.flatten().tolist()
    answers = [answer_with(d, tokenizer, progress, name) for d, name in ((source, "source"), (decoder, "bundle"))]
    passkeys = passkey(*answers, passkey_drills(DrillBook(tokenizer, prose, seed), reach, drills.passkey_trials))
    recited = recitation(*answers, DrillBook(tokenizer, prose, seed), reach, drills)
    continued = free_running(source, decoder, samples.ids, reach, drills, progress)
    has_processor = processor is not tokenizer
    # Last: some models keep the positions that their latest image left behind.
    images = image_figures(source, decoder, processor, seed, drawings, progress) if has_processor else None
    del source_model, source, answers
    cache = measure_cache(decoder, samples.ids, checkpoint, comparison)

    notes = [f"fidelity computed in float32 on the CPU, the cache's size in {cache.dtype}"]
    if scored < SCORED_TOKENS_WANTED:
        notes.append(f"the model's context of {length} tokens leaves {scored} scored tokens a segment instead of 512")
    if not is_recorded:
        notes.append(f"{checkpoint.id} is not the checkpoint that the manifest records ({recorded.id})")
    if supports_images(checkpoint.config):
        notes.append("perplexity, KL and recall are those of text alone" + ("; images has the rest" if images else ""))
    if passkeys.prompts == 0 or recited.pairs == 0 or continued.prompts == 0:
        notes.append("recall drills that do not fit the model's context were left out and are null")
    return FidelityReport(
        **text_figures(comparison, seed),
        passkey=passkeys,
        recitation=recited,
        free_running=continued,
        images=images,
        kv=cache,
        weights=_weight_size(opened.directory, manifest, checkpoint),
        text=EvaluationText(samples.info, comparison.kl.numel(), scored, prefill, PAGE_SIZE),
        against=ComparedWith(checkpoint.id, is_recorded),
        files_digest=manifest.files_digest(),
        compute_dtype="float32",
        device="cpu",
        seed=seed,
        versions=versions(),
        notes=tuple(notes),
    )


def versions() -> dict[str, str]:
    """What a figure may depend on besides its inputs."""
    return {
        "kvconvert": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def decoder_of(model: PreTrainedModel) -> Decoder:
    """A loaded bundle with the cache of its KV plan, or with transformers' own where it has no plan."""
    make = getattr(model, "new_kv_cache", None)
    return Decoder(model, make) if make is not None else Decoder.plain(model)


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
            p99=float(comparison.kl.flatten().sort().values[int(0.99 * (comparison.kl.numel() - 1))]),
            mean_interval=None if kl.low is None else (kl.low, kl.high),
        ),
        "top1_agreement": agreement.mean,
        "top1_agreement_interval": None if agreement.low is None else (agreement.low, agreement.high),
    }


@torch.no_grad()
def measure_cache(decoder: Decoder, ids: torch.Tensor, checkpoint: SourceModel, comparison: Comparison) -> CacheSize:
    """Fill the bundle's cache with whole pages, in the dtype that the bundle serves, and measure its tensors.

    The model is left in that dtype.
    """
    model = decoder.model
    dtype = checkpoint.config.dtype or torch.float32
    model.to(dtype)
    tokens = max(1, min(CACHE_TOKENS, _max_length(model)) // PAGE_SIZE * PAGE_SIZE)
    flat = ids.flatten()
    filler = flat.repeat(-(-tokens // len(flat)))[:tokens].unsqueeze(0)
    cache, plain = decoder.new_cache(), Decoder.plain(model).new_cache()
    for start in range(0, tokens, SEGMENT_TOKENS):
        feed(decoder, cache, filler[:, start : start + SEGMENT_TOKENS], logits_to_keep=1)
    seal(cache)
    # The source's cache holds as many numbers, all of them in the model's dtype: one page tells the size of a token.
    feed(Decoder.plain(model), plain, filler[:, :PAGE_SIZE], logits_to_keep=1)
    source_bytes = sum(_nbytes(layer) for layer in plain.layers) / plain.get_seq_length()
    if isinstance(cache, KVCache):
        stats = cache.stats()
        used, allocated, bits, residual = (
            stats.bytes_used,
            stats.bytes_allocated,
            stats.bits_per_value,
            stats.residual_tokens,
        )
    else:
        used = allocated = sum(_nbytes(layer) for layer in cache.layers)
        bits, residual = 8.0 * dtype.itemsize, tokens
    return CacheSize(
        bits_per_value=bits,
        bytes_per_token=used / tokens,
        bytes_used=used,
        bytes_allocated=allocated,
        source_bytes_per_token=source_bytes,
        tokens=tokens,
        residual_tokens=residual,
        dtype=str(dtype).removeprefix("torch."),
        residual_share=comparison.residual_share,
        clamped_rows=comparison.clamped_rows,
    )


def _segment_shape(model: PreTrainedModel, whole_prompts: bool) -> tuple[int, int, int]:
    """Tokens of a segment, tokens prefilled, tokens scored.

    A cache that compresses whole prompts reads half the segment first, at least four pages where there is room.
    """
    length = min(SEGMENT_TOKENS + 1 if whole_prompts else SEGMENT_TOKENS, _max_length(model))
    prefill = min(SEGMENT_TOKENS // 2 if whole_prompts else PAGE_SIZE, length // 2)
    return length, prefill, length - prefill - 1


def _max_length(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or SEGMENT_TOKENS


def _source_of(manifest: Manifest, against: str | Path | None) -> str:
    if against is not None:
        return str(against)
    recorded = manifest.source
    if recorded.revision is None and not Path(recorded.id).is_dir():
        raise UsageError(
            f"The bundle was made from a local directory named {recorded.id}, which is not in the current directory; "
            "give its path as `against`."
        )
    return recorded.id


def _nbytes(layer: Any) -> int:
    return sum(x.nbytes for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.ndim == 4)


def _weight_size(directory: Path, manifest: Manifest, checkpoint: SourceModel) -> WeightSize:
    """Sizes from the headers of the files themselves."""
    own = [name for name in manifest.files if name.endswith(".safetensors") and name != PLAN_NAME]
    if not own:
        raise BundleError(f"{directory} lists no weight files; export the bundle again.")
    size = sum(nbytes(info) for name in own for info in read_header(directory / name).values())
    source_size = sum(_data_bytes(checkpoint.directory / name) for name in set(checkpoint.weight_map.values()))
    parameters = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return WeightSize(bytes=size, bits_per_weight=8 * size / parameters, source_bytes=source_size)


def _data_bytes(file: Path) -> int:
    """Bytes of the tensors in a safetensors file, whatever their types: all but the header and the length before it."""
    with file.open("rb") as stream:
        return file.stat().st_size - 8 - int.from_bytes(stream.read(8), "little")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
