"""`evaluate`: one report on what a bundle keeps of its source model.

Source and bundle are computed where and as the bundle is used: on a GPU in its own dtype, on a CPU in float32 unless
another is asked for. Both read at once, so that only one chunk of log-probabilities has to be held. What rounding alone
costs is measured beside it. The size of the cache is measured last, with the bundle in the dtype that it serves.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvconvert.arguments import NAMED, BundlePlace, Count, HeadBits, ModelPlace, checked
from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.data.sources import EVALUATION
from kvconvert.data.text import load_token_samples
from kvconvert.errors import UsageError, listed
from kvconvert.fidelity import PARTS, TEXT_ALONE, check_context, parts_asked, source_of
from kvconvert.fidelity.images import DRAWINGS, image_figures
from kvconvert.fidelity.probes import PROBES, ProbePrompt, Writer, abilities, measure_probes, probe_tokens, verdict
from kvconvert.fidelity.report import (
    ComparedWith,
    EvaluationText,
    FidelityReport,
    NoiseFloor,
    check_recorded_source,
    measure_cache,
    text_figures,
    weight_size,
)
from kvconvert.fidelity.retrieval import (
    BATCH,
    FREE_CONTEXT,
    RETRIEVAL_ANSWER_TOKENS,
    Drill,
    DrillBook,
    DrillCounts,
    NumberBook,
    answer_with,
    free_running,
    has_plain_template,
    retrieval,
    retrieval_drills,
)
from kvconvert.fidelity.scoring import (
    Decoder,
    Reader,
    Scores,
    Work,
    compare,
    compress_prompts,
    estimate_seconds,
    first_page,
    words,
)
from kvconvert.io.progress import loading_bars
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.methods.auto import stated_context
from kvconvert.models.configuration import context_length, read_config, supports_images
from kvconvert.models.devices import Device, Dtype, choose_device, compute_dtype
from kvconvert.models.processors import load_tokenizer, tokenizer_of
from kvconvert.models.source import SourceModel, open_source
from kvconvert.runtime import load
from kvconvert.version import __version__

CONTEXT = 1024  # tokens of a segment by default
SCORED_TOKENS_WANTED = 512  # of each segment
CACHE_TOKENS = (512, 2048)  # that the cache is filled with, at least and at most
NOISE_TOKENS = 512
TOKENS = 8192  # to score; half of them where not everything is measured
SCORED = ("perplexity", "kl", "top1")
SLOW = ("probes", "free-running")  # four fifths of the time
TEXT_PARTS = (*SCORED, "retrieval", *SLOW)  # of a vision-language model, too
ROWS = {"cpu": 4, "cuda": 16}  # segments scored at a time

__all__ = ["FidelityReport", "decoder_of", "evaluate", "text_figures", "versions"]


@checked
def evaluate(
    bundle: BundlePlace,
    against: ModelPlace | None = None,
    *,
    data: Annotated[str | Path, NAMED, "a source of text"] | None = None,
    tokens: Count | None = None,
    context: Count | None = None,
    only: Annotated[Collection[str], f"a list of some of {', '.join(PARTS)}"] | None = None,
    full: bool = True,
    device: Device | None = None,
    dtype: Dtype | None = None,
    seed: int = 0,
    drills: DrillCounts | None = None,
    drawings: Count = DRAWINGS,
    head_bits: HeadBits | None = None,
    for_record: bool = False,
    progress: bool = True,
) -> FidelityReport:
    """Measure a bundle against its source model.

    Args:
        bundle: directory of the bundle, or its id on the Hub.
        against: directory or Hub id of the source; None takes the id that the manifest records.
        data: SOURCE of held-out text, see `kvconvert.data.text`; None takes the embedded one.
        tokens: how many tokens to score, rounded up to whole segments where it is more than one; fewer than 8,192,
            which is what None takes, take proportionally fewer prompts of retrieval and of probes along.
        context: tokens of a segment, and of the prompts of retrieval and probes, up to the model's positions; None
            takes 1,024, or as many as there are.
        only: parts to measure, of `PARTS`; None measures all.
        full: False leaves out `SLOW` parts that `only` does not name, and halves the default of `tokens`.
        device: "cpu" or "cuda"; None takes a GPU if there is one.
        dtype: "float32", "bfloat16" or "float16"; None takes the model's own on a GPU and float32 on a CPU.
        seed: the seed of the choice of text, of drills and of the bootstrap.
        drills: how many prompts of each kind.
        drawings: how many conversations about an image a vision-language model is compared on.
        head_bits: the width of the bundle's embedding and head, see `load`.
        for_record: refuse, before anything is measured, a source whose figures `record` would not write.
        progress: an estimate of the time, and bars, on stderr.

    Raises:
        UsageError: nothing to score, a part, context, device or dtype that there is not, or a source that cannot be
            found or compared.
        BundleError, CheckpointError, DataError, NumericError: as their names say.
    """
    if for_record and head_bits is not None:
        raise UsageError("`head_bits` does not apply to `for_record`: a bundle records figures of what it stores.")
    whole = full or only is not None
    if tokens is None:
        tokens = TOKENS if whole else TOKENS // 2
    parts = parts_asked(only) - {*([] if whole else SLOW)}
    place = choose_device(device)
    say = partial(print, file=sys.stderr, flush=True) if progress else lambda message: None
    directory = locate(bundle)
    about = open_bundle(directory, verify="plan")
    config = read_config(directory, about.config)
    if only is not None and "images" in only and not supports_images(config):
        raise UsageError(TEXT_ALONE)
    was_fetched = against is None and about.manifest.source.revision is not None
    checkpoint = open_source(source_of(about.manifest, against), was_fetched=was_fetched)
    computed_in = compute_dtype(dtype, place, checkpoint.config.dtype)
    check_context(context, _positions(checkpoint))
    stated = (getattr(c.get_text_config(decoder=True), "vocab_size", None) for c in (checkpoint.config, config))
    _check_vocabularies(checkpoint.id, *stated)
    say("Verifying the bundle.")
    opened = open_bundle(directory)
    manifest = opened.manifest
    shape = _segment_shape(checkpoint, context, manifest.schemes())
    samples = load_token_samples(
        EVALUATION if data is None else str(data),
        load_tokenizer(directory),
        -(-tokens // shape.scored),
        shape.length,
        seed,
        asked=("tokens", "context"),
    )
    info = checkpoint.info(progress)
    recorded = manifest.source
    is_recorded = (info.config_sha256, info.weights_sha256) == (recorded.config_sha256, recorded.weights_sha256)
    compared = ComparedWith(checkpoint.id, is_recorded)
    if for_record:
        check_recorded_source(manifest, compared)

    say("Loading it and its source.")
    with loading_bars(progress):
        model, processor = load(directory, dtype=computed_in, verify="headers", head_bits=head_bits)  # hashed before
    opened.files.check_unchanged()
    model = model.to(place).eval()
    tokenizer = tokenizer_of(processor)
    if processor is tokenizer and "images" in parts:
        if only is not None:
            raise UsageError(TEXT_ALONE)
        parts.remove("images")
    decoder = decoder_of(model)
    ids = samples.ids[:, : shape.prefill + min(tokens, shape.scored) + 1]
    noise = None
    if computed_in != torch.float32 and "kl" in parts:
        with loading_bars(progress):
            noise = _noise(checkpoint, place, computed_in, samples.ids[:1, : NOISE_TOKENS + 1])
    with loading_bars(progress):
        source_model = _source_model(checkpoint, place, computed_in)
    vocabulary, own = (m.get_output_embeddings().out_features for m in (source_model, model))
    _check_vocabularies(checkpoint.id, vocabulary, own)
    source = Decoder.plain(source_model)
    drills = drills or DrillCounts.for_tokens(tokens)
    plan = _Drills.plan(parts, checkpoint, tokenizer, samples.ids, shape.length, drills, seed)
    if not plan.work and parts <= {"retrieval", "probes", "free-running"}:
        raise UsageError(
            f"`only`: a context of {shape.length:,} tokens holds no prompt of {listed(sorted(parts), 'or')}; take a "
            "longer `context` if the model has one, or measure other parts."
        )
    if progress:
        say("Timing a page of each.")
        work = [*plan.work, *([Work(*ids.shape, batch=ROWS[place.type])] if {*SCORED} & parts else [])]
        work += [Work(drawings, 4 * PAGE_SIZE)] if "images" in parts else []
        seconds = estimate_seconds((source, decoder), samples.ids, work)
        named = ", ".join(part for part in PARTS if part in parts)
        # What the source cannot do at all is not asked to the end.
        said = f"{'at most' if plan.probes else 'about'} {words(seconds)}"
        say(f"Measuring {named}: {said}.")

    comparison = None
    if {*SCORED} & parts:
        rows = ROWS[place.type]
        comparison = compare(source, {"bundle": decoder}, ids, shape.prefill, batch=rows, progress=progress)["bundle"]
    figures = {} if comparison is None else text_figures(comparison, seed)
    chunk = PAGE_SIZE if plan.templated else None
    answers = [
        answer_with(d, tokenizer, progress, name, chunk) for d, name in ((source, "source"), (decoder, "bundle"))
    ]
    found = retrieval(*answers, plan.numbers, seed) if "retrieval" in parts else None
    probes = None
    if "probes" in parts:
        probes = measure_probes(source, decoder, plan.probes, seed, ROWS[place.type], progress)
    continued = None
    if "free-running" in parts:
        continued = free_running(source, decoder, samples.ids, plan.reach, drills, progress)
    # Last: some models keep the positions that their latest image left behind.
    images = image_figures(source, decoder, processor, seed, drawings, progress) if "images" in parts else None
    del source_model, source, answers
    cache = None
    if "cache" in parts:
        least, most = CACHE_TOKENS
        # As `inspect` and the card state it.
        held = stated_context(_positions(checkpoint))
        longest = held if manifest.allocation is None else manifest.allocation.context
        size = min(max(least, tokens), most, held)
        served = checkpoint.config.dtype or torch.float32
        cache = measure_cache(decoder, samples.ids, size, longest, served, comparison)

    notes = []
    if comparison is not None and shape.scored < SCORED_TOKENS_WANTED:
        notes.append(
            f"{'the model has' if context is None else 'you asked for'} a context of {context or shape.length:,} "
            f"tokens, which leaves {shape.scored} scored tokens a segment, fewer than the {SCORED_TOKENS_WANTED} wanted"
        )
    if comparison is not None and tokens < shape.scored:
        notes.append(
            f"scored tokens: {tokens:,}, right after the first ones read, so that much of what they attend to is exact"
        )
    if head_bits is not None:
        notes.append(f"the bundle's embedding and head were rounded to {head_bits} bits as it was loaded")
    if not is_recorded:
        notes.append(f"{checkpoint.id} is not the checkpoint that the manifest records ({recorded.id})")
    if supports_images(checkpoint.config) and (alone := [part for part in TEXT_PARTS if part in parts]):
        notes.append(f"measured on text without images: {listed(alone)}")
    short = {
        "retrieval": found and found.prompts == 0,
        "probes": probes is not None and len(probes) < len(PROBES),
        "free-running": continued and continued.prompts == 0,
    }
    if left_out := [name for name, is_short in short.items() if is_short]:
        notes.append(f"prompts of {listed(left_out)} that do not fit the context were left out")
    scored = 0 if comparison is None else comparison.kl.numel()
    perplexity = figures.get("perplexity") if "perplexity" in parts else None
    text = None if perplexity is None else (perplexity.source, perplexity.bundle)
    return FidelityReport(
        parts=tuple(name for name in PARTS if name in parts),
        perplexity=perplexity,
        kl=figures.get("kl") if "kl" in parts else None,
        top1_agreement=figures.get("top1_agreement") if "top1" in parts else None,
        top1_agreement_interval=figures.get("top1_agreement_interval") if "top1" in parts else None,
        noise=noise,
        retrieval=found,
        retrieval_form=None if found is None else "chat template" if plan.templated else "plain text",
        probes=probes,
        verdict=verdict(abilities(probes or {}, found), text, scored, vocabulary),
        free_running=continued,
        images=images,
        kv=cache,
        weights=weight_size(opened.directory, manifest, checkpoint) if "weights" in parts else None,
        text=EvaluationText(
            samples.info,
            scored,
            0 if comparison is None else comparison.kl.shape[1],
            shape.prefill,
            PAGE_SIZE,
        ),
        against=compared,
        files_digest=manifest.files_digest(),
        compute_dtype=str(computed_in).removeprefix("torch."),
        device=place.type,
        seed=seed,
        versions=versions(),
        notes=tuple(notes),
        head_bits=head_bits,
    )


def _check_vocabularies(source: str, vocabulary: int | None, own: int | None) -> None:
    """Refuse (UsageError) a source of other tokens than the bundle's, as far as they are known."""
    if vocabulary is not None and own is not None and vocabulary != own:
        raise UsageError(
            f"{source} has a vocabulary of {vocabulary:,} tokens, the bundle one of {own:,}; compare a bundle with the "
            "model it was made from."
        )


def versions() -> dict[str, str]:
    """Versions that a figure may depend on."""
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


@dataclass(frozen=True)
class _Shape:
    """Tokens of a segment, tokens read first, tokens scored after them."""

    length: int
    prefill: int
    scored: int


@dataclass(frozen=True)
class _Drills:
    """Prompts of retrieval and of probes as they will be asked.

    Attributes:
        numbers: codes in plain text, or numbers to be asked for through the chat template (`templated`).
        probes: prompts by probe; without those that the model's positions do not hold.
        reach: tokens that continuations may take with their context.
        work: what all of them take.
    """

    numbers: Sequence[Drill]
    templated: bool
    probes: Mapping[str, Sequence[ProbePrompt]]
    reach: int
    work: Sequence[Work]

    @classmethod
    def plan(
        cls,
        parts: Collection[str],
        checkpoint: SourceModel,
        tokenizer: PreTrainedTokenizerBase,
        ids: torch.Tensor,
        context: int,
        counts: DrillCounts,
        seed: int,
    ) -> _Drills:
        prose, positions = ids.flatten().tolist(), _positions(checkpoint) or CONTEXT
        reach = min(positions, CONTEXT)
        templated = has_plain_template(tokenizer)
        numbers: Sequence[Drill] = ()
        if "retrieval" in parts and templated:
            book = NumberBook(tokenizer, prose, seed)
            hidden = _whole_pages(min(context, positions - book.room))
            numbers = book.drills(hidden, counts.numbers) if book.fits(hidden) else ()
        elif "retrieval" in parts:
            plain = DrillBook(tokenizer, prose, seed)
            numbers = retrieval_drills(plain, context, counts.retrieval_trials)
        work = [Work(1, len(drill.context), RETRIEVAL_ANSWER_TOKENS, 1) for drill in numbers]
        probes: dict[str, list[ProbePrompt]] = {}
        length = probe_tokens(min(context, positions))
        if "probes" in parts and length:
            writer = Writer(tokenizer, prose, seed)
            made = {probe.name: writer.prompts(probe, length, counts.probes) for probe in PROBES}
            probes = {name: asked for name, asked in made.items() if max(len(p.ids) for p in asked) <= positions}
        work += [Work(len(asked), len(asked[0].ids), batch=BATCH) for asked in probes.values()]
        if "free-running" in parts and reach > FREE_CONTEXT:
            work.append(Work(min(counts.free_prompts, len(ids)), FREE_CONTEXT, counts.free_tokens, BATCH))
        return cls(numbers, templated, probes, reach, work)


def _positions(checkpoint: SourceModel) -> int | None:
    return context_length(checkpoint.config)


def _segment_shape(checkpoint: SourceModel, context: int | None, schemes: Sequence[KVScheme | None]) -> _Shape:
    """A cache that compresses whole prompts reads half the segment first, others what `first_page` says.

    Short segments are halved, unless a page fits and leaves half a page to score.
    """
    wanted, whole_prompts = context or CONTEXT, compress_prompts(schemes)
    length = min(wanted + 1 if whole_prompts else wanted, _positions(checkpoint) or wanted)
    most = length // 2 if whole_prompts else max(length // 2, length - PAGE_SIZE // 2)
    prefill = min(wanted // 2 if whole_prompts else first_page(schemes), most)
    return _Shape(length, prefill, length - prefill - 1)


def _whole_pages(tokens: int) -> int:
    """As many tokens as end with a page, where there is room for one."""
    return tokens // PAGE_SIZE * PAGE_SIZE or tokens


def _source_model(checkpoint: SourceModel, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    return checkpoint.load(dtype).to(device).eval()


@torch.no_grad()
def _noise(checkpoint: SourceModel, device: torch.device, dtype: torch.dtype, ids: torch.Tensor) -> NoiseFloor:
    """KL of the source in `dtype` from the source in float32, which are never in memory together."""
    scores = []
    for used in (torch.float32, dtype):
        reader = Reader(Decoder.plain(_source_model(checkpoint, device, used)), "source")
        scores.append(reader.score(ids[:, :-1]).cpu())
        del reader
    kl = Scores.of(*scores, ids[:, 1:]).kl
    name = str(dtype).removeprefix("torch.")
    return NoiseFloor(float(kl.mean()), kl.numel(), f"the source in {name} from the source in float32")
