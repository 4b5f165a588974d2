"""How close a bundle stays to its source in conversations about images.

Each segment is a conversation about one of the project's drawings: the image is read as the prompt, then everything
that is asked and answered about it is scored through what the cache made of the image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PretrainedConfig, ProcessorMixin

from kvconvert.data.drawings import draw
from kvconvert.data.images import EVALUATION_SEED, Document
from kvconvert.fidelity.scoring import Decoder, bootstrap_mean, compare
from kvconvert.models.configuration import context_length
from kvconvert.models.processors import ImagePrompts

DRAWINGS = 16


@dataclass(frozen=True)
class ImageFigures:
    """Source against bundle on text about images that the caches hold.

    Attributes:
        drawings: how many conversations, with one image each.
        image_tokens: that stand for each image.
        tokens_scored: over all conversations.
        kl, kl_interval: mean KL(source || bundle) of the next-token distribution in nats.
        top1_agreement: share of scored tokens at which both rank the same token first.
        residual_share: share of the attended tokens that the bundle held in full precision; with images of fewer
            tokens than a page, much of them.
    """

    drawings: int
    image_tokens: int
    tokens_scored: int
    kl: float
    kl_interval: tuple[float, float] | None
    top1_agreement: float
    residual_share: float


def image_figures(
    source: Decoder,
    bundle: Decoder,
    processor: ProcessorMixin,
    seed: int,
    drawings: int = DRAWINGS,
    progress: bool = False,
) -> ImageFigures | None:
    """Compare source and bundle on conversations about drawings; None where one does not fit the model's positions."""
    segments, extras, prefill = conversations(processor, source.model.config, seed, drawings)
    positions = context_length(source.model.config)
    if positions is not None and segments.shape[1] > positions:
        return None
    scored = compare(source, {"bundle": bundle}, segments, prefill, batch=1, progress=progress, extras=extras)["bundle"]
    kl = bootstrap_mean(scored.kl.mean(1), seed)
    return ImageFigures(
        drawings=len(scored.kl),
        image_tokens=int(ImagePrompts(processor, source.model.config).visual(segments[0]).sum()),
        tokens_scored=scored.kl.numel(),
        kl=kl.mean,
        kl_interval=kl.bounds,
        top1_agreement=scored.agrees.double().mean().item(),
        residual_share=scored.residual_share,
    )


def conversations(
    processor: ProcessorMixin, config: PretrainedConfig, seed: int, drawings: int = DRAWINGS
) -> tuple[Tensor, list[dict[str, Tensor]], int]:
    """Ids [drawings, length], the other model inputs of each, and the number of tokens up to the end of the image."""
    prompts = ImagePrompts(processor, config)
    rows: list[Tensor] = []
    extras: list[dict[str, Tensor]] = []
    for index in range(drawings):
        document = Document.conversation(draw(EVALUATION_SEED + seed, index))
        inputs = prompts.encode(prompts.text(document.messages), document.images)
        rows.append(inputs.pop("input_ids")[0])
        inputs.pop("attention_mask", None)
        extras.append(inputs)
    length = min(len(row) for row in rows)
    ids = torch.stack([row[:length] for row in rows])
    # Drawings are equally large, so that all images end at the same token.
    prefill = int(prompts.visual(ids).any(0).nonzero().max()) + 1
    whole = [len(row) for row in rows]
    cut = [
        {key: value[:, :prefill] if value.shape == (1, total) else value for key, value in extra.items()}
        for extra, total in zip(extras, whole, strict=True)
    ]
    return ids, cut, prefill
