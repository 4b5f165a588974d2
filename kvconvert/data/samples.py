"""Calibration samples of a model: images and text for a vision-language model and data with images, else text."""

from __future__ import annotations

from dataclasses import replace

from transformers import ProcessorMixin

from kvconvert.data.image_samples import holds_images, load_image_samples
from kvconvert.data.mixture import Sources, load_mixture, unlike_the_model, weighted_sources
from kvconvert.data.text import TokenData
from kvconvert.errors import DataError, UsageError
from kvconvert.io.tensorfile import Mapped
from kvconvert.models.configuration import supports_images
from kvconvert.models.processors import has_processor, load_processor, load_tokenizer
from kvconvert.models.source import SourceModel

TEXT_LENGTH = 512  # default tokens of a text sample


def load_samples(
    model: SourceModel,
    source: Sources,
    samples: int,
    length: int | None,
    seed: int,
    mapped: Mapped | None = None,
) -> TokenData:
    """Calibration samples of a SOURCE for a model, read with its own tokenizer or processor.

    Args:
        model: its configuration gives the number of positions, the vocabulary, and whether images are supported.
        source: see `kvconvert.data.text` and `kvconvert.data.images`; None takes the text that ships with kvconvert,
            or its drawings for vision-language models. Several sources of text may have weights, see
            `kvconvert.data.mixture`.
        samples, length: how many, and tokens in each; None takes `TEXT_LENGTH`, or what an image needs.
        seed: of the choice and order.
        mapped: where images are kept that are too many for memory.

    Raises:
        UsageError: samples that cannot be cut, or a package that is missing.
        DataError: the source cannot be used.
        CheckpointError: there is no tokenizer that transformers can load, or processor and model do not belong
            together.
    """
    for name, value in (("samples", samples), ("seq_len", length)):
        if value is not None and value < 1:
            raise UsageError(f"`{name}` is {value}; calibration needs at least 1.")
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    if positions and length is not None and length > positions:
        raise UsageError(
            f"`seq_len` is {length}, more than the {positions} positions this model has; choose a shorter one."
        )
    multimodal = supports_images(model.config) and has_processor(model.directory)
    several = weighted_sources(source)
    only = several[0].source if len(several) == 1 else None
    with_images = multimodal and any(holds_images(part.source) for part in several)
    if with_images and len(several) > 1:
        raise UsageError("`data` names several sources and one of them holds images, which are not mixed; give one.")
    if with_images:
        data = load_image_samples(only, _processor(model), model.config, samples, length, seed, mapped)
    else:
        length = min(TEXT_LENGTH, positions or TEXT_LENGTH) if length is None else length
        tokenizer = load_tokenizer(model.directory)
        data = load_mixture(source, tokenizer, samples, length, seed)
        data = replace(data, warnings=tuple(unlike_the_model(source, data, tokenizer)))
    if int(data.ids.max()) >= config.vocab_size:
        raise DataError(
            f"The tokenizer of {model.directory} gives token {int(data.ids.max())}, beyond the model's "
            f"{config.vocab_size}; they do not belong together."
        )
    if positions and data.ids.shape[1] > positions:
        raise UsageError(
            f"One image and some text take {data.ids.shape[1]} tokens, more than the {positions} positions this model "
            "has; give smaller images."
        )
    return data


def _processor(model: SourceModel) -> ProcessorMixin:
    try:
        return load_processor(model.directory)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}, or calibrate with text (a .txt file as `data`).") from error
