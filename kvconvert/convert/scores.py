"""Calibration text, read twice by the whole source model, and what predicts the second reading's scores (KVzip)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvconvert.calibration.kvzip import FittedScorer, fit_scorer
from kvconvert.calibration.protocol import LayerJob
from kvconvert.errors import NumericError
from kvconvert.io.progress import progress_bar
from kvconvert.kernels.select import token_features
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE
from kvconvert.runtime import KVCache
from kvconvert.runtime.hf.attention import NAME as KVCONVERT_ATTENTION
from kvconvert.runtime.hf.prompts import score_prompt

__all__ = ["KVCONVERT_ATTENTION", "predicts", "rows_read", "scorer_seconds", "with_scorers"]

# Tokens that are read, and bytes that their features may take.
TOKENS, GPU_TOKENS = 2**15, 2**19
FEATURE_BYTES, GPU_FEATURE_BYTES = 2 * 2**30, 12 * 2**30
HELD_OUT = 8  # one row of as many judges the networks


def predicts(jobs: Sequence[LayerJob]) -> bool:
    """Whether layers need a network that predicts scores."""
    return any(job.scheme is not None and job.scheme.predicts for job in jobs)


def rows_read(length: int, device: torch.device) -> int:
    """How many rows of `length` tokens are read twice, at least one."""
    return max(1, (GPU_TOKENS if device.type == "cuda" else TOKENS) // length)


def with_scorers(
    jobs: Sequence[LayerJob],
    model: PreTrainedModel,
    ids: Tensor,
    seed: int,
    say: Callable[[str], None],
    progress: bool,
) -> list[LayerJob]:
    """The jobs of all layers with networks fitted to this text.

    Args:
        jobs: the jobs of all layers, which share one budget.
        model: the source model, with attention implementation "kvconvert".
        ids: int64 [rows, length], the token ids of the text.
        seed: seed for choosing tokens and fitting the networks.
        say: shows a message.
        progress: show bars.

    Raises:
        RecipeError, UnsupportedModelError: see `KVCache`.
        NumericError: keys, values or scores of a layer are NaN or infinite.
    """
    say(f"Reading {ids.numel():,} tokens twice, to learn which of them reconstruct a prompt.")
    features, scores = _read_twice(jobs, model, ids, seed, progress)
    held_out = len(ids) // HELD_OUT * len(features[0][0])
    found: list[FittedScorer] = []
    layers = list(zip(jobs, features, scores, strict=True))
    for job, own, wanted in progress_bar(layers, desc="fits", unit="layer", shown=progress):
        found.append(fit_scorer(torch.cat(own), torch.cat(wanted), held_out, seed))
        own.clear()
        if not math.isfinite(found[-1].explained):
            raise NumericError(f"{job.name} computes NaN or infinity on the calibration text; check the source model.")
    mean = sum(fit.explained for fit in found) / len(found)
    where = "held-out tokens" if held_out else "these tokens"
    say(f"The networks explain {mean:.0%} of the variance of the scores' logarithms on {where}.")
    return [replace(job, scorer=fit) for job, fit in zip(jobs, found, strict=True)]


def scorer_seconds(jobs: Sequence[LayerJob], model: PreTrainedModel, ids: Tensor, seed: int) -> float:
    """How long `with_scorers` will take: two rows are read and one layer is fitted; arguments as there."""
    begun = time.perf_counter()
    features, scores = _read_twice(jobs, model, ids[:2], seed, progress=False)
    read = (time.perf_counter() - begun) / len(ids[:2])
    begun = time.perf_counter()
    fit_scorer(torch.cat(features[0]), torch.cat(scores[0]), 0, seed)
    return len(ids) * read + len(jobs) * (time.perf_counter() - begun)


@torch.no_grad()
def _read_twice(
    jobs: Sequence[LayerJob], model: PreTrainedModel, ids: Tensor, seed: int, progress: bool
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Of each layer and row the features and scores of tokens, as many as memory has room for."""
    on_gpu, sinks = model.device.type == "cuda", jobs[0].scheme.sink_tokens
    exact = KVScheme(
        key_bits=16, value_bits=16, sink_tokens=sinks, heavy_ratio=1.0, recent_ratio=0.0, selection="reconstruction"
    )
    width = sum(job.heads * (job.value_dim + job.key_dim // 2) for job in jobs)
    most = (GPU_FEATURE_BYTES if on_gpu else FEATURE_BYTES) // (2 * width * len(ids))
    generator = torch.Generator().manual_seed(seed)
    features: list[list[Tensor]] = [[] for _ in jobs]
    scores: list[list[Tensor]] = [[] for _ in jobs]
    for row in progress_bar(ids.split(1), desc="second readings", unit="row", total=len(ids), shown=progress):
        cache = KVCache(model.config, exact)
        cache.begin_prompt()
        row = row.to(model.device)
        model(input_ids=row, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        score_prompt(model, cache, row)
        count = row.shape[1] - sinks
        chosen = (sinks + torch.randperm(count, generator=generator)[:most].sort().values).to(model.device)
        for index, store in enumerate(cache.stores()):
            keys, values = (
                torch.stack([side.tokens(0, row.shape[1])[0, chosen] for side in sides])
                for sides in ([own.keys for own in store.rows], [own.values for own in store.rows])
            )
            features[index].append(token_features(keys, values).bfloat16())
            scores[index].append(torch.cat([own.attention_mass for own in store.rows])[:, chosen].T.float())
    return features, scores
