"""Calibration samples of a model: images and text for a vision-language model and data with images, else text.

A sample with images is one long prompt of documents, cut to exactly the requested length without padding, and goes
through the model's own processor in one piece, so that every model gets images in its own form (tiles, patches, sizes,
token types). An image is never cut: a document whose images no longer fit is left for the next sample, and the rest of
this one is filled with the text that ships with kvconvert. Documents are separated by the end-of-sequence token.

Captions follow their image in the plain form of the model (`<image>` and the like, found from its chat template where
it has one); questions and conversations go through the chat template. A model without one reads them joined by lines.

Text may come from several sources with weights. A weighted source is `SOURCE=WEIGHT`: of 16 samples, `chat.jsonl=3` and
`code=1` give 12 and 4. Each source is read and cut as if it were alone; samples of one source follow those of the
other, so that passes, which take evenly spaced samples, see both in proportion.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import ProcessorMixin

from kvconvert.data.images import (
    Document,
    directory_documents,
    drawn_documents,
    has_image_parts,
    image_column,
    is_image_directory,
    row_document,
)
from kvconvert.data.sources import (
    CALIBRATION,
    CONVERSATIONS,
    ROWS_INSPECTED,
    SHIPPED,
    Sources,
    SourceTable,
    WeightedSource,
    holds_conversations,
    is_plain_text,
    local_files,
    read_text,
    source_name,
    weighted_sources,
)
from kvconvert.data.text import TokenData, load_held_out_samples, load_token_samples, token_data
from kvconvert.errors import CheckpointError, DataError, UsageError, counted, listed
from kvconvert.io.records import DataInfo, shortened
from kvconvert.io.tensorfile import Mapped
from kvconvert.models.configuration import context_length, is_small, supports_images
from kvconvert.models.positions import check_length
from kvconvert.models.processors import ImagePrompts, has_processor, load_processor, load_tokenizer
from kvconvert.models.prompts import Conversations
from kvconvert.models.source import SourceModel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase, ProcessorMixin

LENGTH_STEP = 512  # tokens; the default length of samples is a multiple of it
_TEXT_SHARE = 128  # tokens that a sample of that length has at least besides one image
IMAGE_BYTES = 500_000_000  # of pixels and the like of all samples that are held in memory
_SLACK = 8  # tokens by which joining documents may change their number


def holds_images(source: str) -> bool:
    """Whether a SOURCE has images: a directory of them, or rows with a column or parts."""
    if is_image_directory(source):
        return True
    files = local_files(source)
    if is_plain_text(files):
        return False
    table = SourceTable.open(source, files)
    if image_column(table.columns) is not None:
        return True
    return "messages" in table.columns and any(has_image_parts(row["messages"]) for row in table.first(ROWS_INSPECTED))


def load_image_samples(
    source: str | None,
    processor: ProcessorMixin,
    config: PretrainedConfig,
    samples: int,
    length: int | None,
    seed: int,
    mapped: Mapped | None = None,
) -> TokenData:
    """Read a SOURCE that `holds_images` and pack it; the same arguments and files give the same samples.

    Args:
        source: see `kvconvert.data.images`.
        processor: the model's own.
        config: the model's, with the ids of its image tokens.
        samples, length: how many, and tokens in each; None takes as many as the first document's image needs, and
            some text, in steps of `LENGTH_STEP`.
        seed: of the order of documents.
        mapped: where the model's further inputs are kept from `IMAGE_BYTES` on; None keeps all in memory.

    Raises:
        DataError: an image or a caption that is missing or unreadable, an image longer than a sample, or too little.
    """
    name = f"{SHIPPED}drawings" if source is None else source_name(source)
    packer = _Packer(ImagePrompts(processor, config), _documents(source, seed), name, seed)
    if length is None:
        length = packer.fitting_length()
    rows, extras, images, held = [], [], 0, 0
    for _ in range(samples):
        ids, extra, count = packer.sample(length, len(rows), samples)
        size = sum(value.nbytes for value in extra.values())
        if mapped is not None and held + size > IMAGE_BYTES:
            extra = {name: mapped.copy(value) for name, value in extra.items()}
        else:
            held += size
        rows.append(ids)
        extras.append(extra)
        images += count
    ids = torch.stack(rows)
    info = DataInfo(
        source=shortened(name),
        samples=samples,
        length=length,
        seed=seed,
        images=images,
        sha256=_fingerprint(ids, extras),
    )
    return TokenData(ids, info, tuple(extras), packer.prompts.visual(ids))


def _documents(source: str | None, seed: int) -> Iterator[Document]:
    if source is None:
        yield from drawn_documents(seed)
    elif is_image_directory(source):
        yield from directory_documents(source, seed)
    else:
        table = SourceTable.open(source, local_files(source))
        for place, row in table.shuffled(seed):
            document = row_document(row, table.wanted, table.folder, f"Data source {place}")
            if document is not None:
                yield document


class _Packer:
    """Takes documents one after another and makes samples of them."""

    def __init__(self, prompts: ImagePrompts, documents: Iterator[Document], source: str, seed: int) -> None:
        self.prompts, self.source = prompts, source
        self._documents = documents
        self._waiting: list[Document] = []
        self._used = 0
        self._filler = _filler(seed)

    def fitting_length(self) -> int:
        """Tokens that hold the first document's images and some text."""
        document = self._next(0, 0)
        self._waiting.append(document)
        needed = self._extent(document)[1] + _TEXT_SHARE
        return -(-needed // LENGTH_STEP) * LENGTH_STEP

    def sample(self, length: int, made: int, wanted: int) -> tuple[Tensor, dict[str, Tensor], int]:
        """Ids [length], the model's further inputs, and how many images there are in them."""
        chosen: list[Document] = []
        used = 0
        while used < length + _SLACK:
            document = self._next(made, wanted)
            tokens, last = self._extent(document)
            if last > length - _SLACK and not chosen:
                raise DataError(
                    f"{document.place}: its images and what precedes them take {counted(last, 'token')}, "
                    f"more than the {length} "
                    f"of a sample; give a `seq_len` of {-(-(last + _TEXT_SHARE) // 256) * 256} or more, or smaller "
                    "images."
                )
            if used + last > length - _SLACK:
                self._waiting.append(document)
                break
            chosen.append(document)
            used += tokens + 1
        return self._encoded(chosen, length)

    def _encoded(self, documents: list[Document], length: int) -> tuple[Tensor, dict[str, Tensor], int]:
        """The documents in one piece, filled up with text and cut to length."""
        prompts = self.prompts
        texts = [prompts.text(document.messages, document.is_caption) for document in documents]
        images = [image for document in documents for image in document.images]
        inputs = prompts.encode(prompts.join(texts), images)
        while (missing := length - inputs["input_ids"].shape[1]) > 0:
            while missing > 0:
                texts.append(next(self._filler))
                missing -= len(prompts.processor.tokenizer(texts[-1]).input_ids)
            inputs = prompts.encode(prompts.join(texts), images)
        ids = inputs.pop("input_ids")
        inputs.pop("attention_mask", None)
        cut = {name: value[:, :length] if value.shape == ids.shape else value for name, value in inputs.items()}
        if prompts.visual(ids[:, length:]).any():
            raise DataError(
                f"{documents[-1].place}: the processor's tokens differ with what stands around an image, so that it "
                "does not fit where it was measured to; choose another `seq_len`."
            )
        return ids[0, :length], cut, len(images)

    def _extent(self, document: Document) -> tuple[int, int]:
        """Tokens of a document, and how many of them there are up to the end of its last image."""
        text = self.prompts.text(document.messages, document.is_caption)
        ids = self.prompts.encode(text, document.images)["input_ids"]
        visual = self.prompts.visual(ids)[0].nonzero().flatten()
        if document.images and not len(visual):
            raise CheckpointError(
                f"The processor puts none of the tokens {self.prompts.visual_ids} of config.json into a text with an "
                "image; processor and model do not belong together."
            )
        return ids.shape[1], int(visual[-1]) + 1 if len(visual) else 0

    def _next(self, made: int, wanted: int) -> Document:
        if self._waiting:
            return self._waiting.pop()
        document = next(self._documents, None)
        if document is None:
            if not self._used:
                raise DataError(f"Data source {self.source} holds no image with text; give some.")
            raise DataError(
                f"Data source {self.source} holds {counted(self._used, 'document')}, which make "
                f"{counted(made, 'sample')}, but {wanted:,} are "
                "requested; give more images, or smaller `samples` or `seq_len`."
            )
        self._used += 1
        return document


def _filler(seed: int) -> Iterator[str]:
    """Paragraphs of the embedded text, from a place that the seed chooses, without end."""
    text = "".join(read_text(file) for file in local_files(CALIBRATION[0]) or ())
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]
    start = random.Random(f"filler {seed}").randrange(len(paragraphs))
    while True:
        yield from paragraphs[start:]
        start = 0


def _fingerprint(ids: Tensor, extras: Iterable[dict[str, Tensor]]) -> str:
    """sha256 of the ids, then of each sample's further inputs in order of their names, little endian."""
    digest = hashlib.sha256(ids.numpy().astype("<i8").tobytes())
    for extra in extras:
        for name in sorted(extra):
            value = extra[name].contiguous()
            digest.update(name.encode())
            digest.update(value.float().numpy().astype("<f4").tobytes())
    return digest.hexdigest()


# By default. Weights that are corrected on short samples lose what lies far back: benchmarks/WEIGHTS.md.
TEXT_LENGTH = 2048  # tokens of a sample of text
TEXT_TOKENS = 32768  # of all of them
CHAT_TOKENS = 16384  # further ones of small models that have a chat template
MOST_SAMPLES = 64  # of text, and with images


def text_shape(
    samples: int | None, length: int | None, positions: int | None, tokens: int = TEXT_TOKENS
) -> tuple[int, int]:
    """The number of samples of text and the tokens in each; None takes the default.

    Args:
        samples, length: as the user gave them.
        positions: the model's maximum number of positions; None without a limit.
        tokens: the default number of tokens of all samples together.
    """
    length = min(TEXT_LENGTH, positions or TEXT_LENGTH) if length is None else length
    return min(MOST_SAMPLES, max(1, tokens // length)) if samples is None else samples, length


def default_tokens(config: PretrainedConfig, source: Sources, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of all samples by default, for the configuration of a model's text decoder."""
    return TEXT_TOKENS + CHAT_TOKENS * (source is None and is_small(config) and _writes_answers(tokenizer))


def sample_shape(
    model: SourceModel, source: Sources, samples: int | None, length: int | None, seed: int
) -> tuple[int, int]:
    """How many samples `load_samples` takes with the same arguments, and tokens in each."""
    if not _takes_images(model, source):
        config = model.config.get_text_config()
        tokens = default_tokens(config, source, load_tokenizer(model.directory)) if samples is None else TEXT_TOKENS
        return text_shape(samples, length, context_length(config), tokens)
    if length is None:
        length = load_samples(model, source, 1, None, seed).info.length
    return MOST_SAMPLES if samples is None else samples, length


def check_amount(model: SourceModel, source: Sources, samples: int, length: int, seed: int) -> None:
    """Refuse text that has fewer samples or other tokens, as `load_samples` does; images are read only there."""
    if not _takes_images(model, source):
        _check_tokens(model, load_mixture(source, load_tokenizer(model.directory), samples, length, seed))


def _check_tokens(model: SourceModel, data: TokenData) -> None:
    known, highest = model.config.get_text_config().vocab_size, int(data.ids.max())
    if highest >= known:
        raise DataError(
            f"The tokenizer of {model.directory} gives the token {highest}, and the model's ids are 0 to {known - 1}; "
            "fetch the tokenizer that belongs to the model."
        )


def _takes_images(model: SourceModel, source: Sources) -> bool:
    """Whether a model's samples have images: those of its source, or drawings."""
    multimodal = supports_images(model.config) and has_processor(model.directory)
    return multimodal and (source is None or any(holds_images(part.source) for part in weighted_sources(source)))


def load_samples(
    model: SourceModel,
    source: Sources,
    samples: int | None,
    length: int | None,
    seed: int,
    mapped: Mapped | None = None,
) -> TokenData:
    """Calibration samples of a SOURCE for a model, read with its own tokenizer or processor.

    Args:
        model: its configuration gives the number of positions, the vocabulary, and whether images are supported.
        source: see `kvconvert.data.text` and `kvconvert.data.images`; None takes the text that ships with kvconvert,
            or its drawings for vision-language models. Several sources of text may have weights, see
            `kvconvert.data.samples`.
        samples, length: how many, and tokens in each; None takes those of `text_shape`, or `MOST_SAMPLES` and what an
            image needs.
        seed: of the choice and order.
        mapped: where images are kept that are too many for memory.

    Raises:
        UsageError: samples that cannot be cut, or a package that is missing.
        DataError: the source cannot be used.
        CheckpointError: there is no tokenizer that transformers can load, or processor and model do not belong
            together.
    """
    config = model.config.get_text_config()
    positions = context_length(config)
    check_length("seq_len", length, positions)
    several = weighted_sources(source)
    only = several[0].source if source is not None and len(several) == 1 else None
    with_images = _takes_images(model, source)
    if with_images and source is not None and len(several) > 1:
        raise UsageError("`data` names several sources and one of them holds images, which are not mixed; give one.")
    if with_images:
        count = MOST_SAMPLES if samples is None else samples
        data = load_image_samples(only, _processor(model), model.config, count, length, seed, mapped)
    else:
        tokenizer = load_tokenizer(model.directory)
        samples, length = text_shape(samples, length, positions, default_tokens(config, source, tokenizer))
        data = load_mixture(source, tokenizer, samples, length, seed)
        data = replace(data, warnings=tuple(unlike_the_model(source, data, tokenizer)))
    _check_tokens(model, data)
    if positions and data.ids.shape[1] > positions:
        raise UsageError(
            f"One image and some text take {data.ids.shape[1]:,} tokens, more than the {positions:,} positions this "
            "model has; give smaller images."
        )
    return data


def _processor(model: SourceModel) -> ProcessorMixin:
    try:
        return load_processor(model.directory)
    except UsageError as error:
        raise UsageError(f"{str(error).rstrip('.')}, or calibrate with text (a .txt file as `data`).") from error


FEW_BYTES = 2.0  # of text per token: prose has 4 and more, code 3, text in a script that the tokenizer lacks 1
MANY_UNKNOWN = 0.02  # share of tokens
_BYTE = re.compile(r"<0x(?!0A)[0-9A-F]{2}>")  # of a vocabulary with byte fallback; line ends are common in all text


def shares(weights: Sequence[float], samples: int) -> list[int]:
    """Samples of each source: in proportion to the weights, rounded down, the rest to the largest remainders.

    Raises:
        UsageError: a source would get none.
    """
    exact = [samples * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: samples - sum(counts)]:
        counts[i] += 1
    if not all(counts):
        raise UsageError(
            f"{counted(samples, 'sample')} cannot be divided among {len(counts)} sources with these weights: one gets "
            "none; request more samples, or leave that source out."
        )
    return counts


def load_mixture(data: Sources, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int) -> TokenData:
    """Samples of one or several text sources; see `load_token_samples`, which cuts those of each."""
    sources = _sources(data, samples, tokenizer)
    if len(sources) == 1:
        return load_token_samples(sources[0].source, tokenizer, samples, length, seed)
    counts = shares([source.weight for source in sources], samples)
    parts = [
        load_token_samples(source.source, tokenizer, count, length, seed)
        for source, count in zip(sources, counts, strict=True)
    ]
    return _joined(sources, parts, seed)


def load_held_out_mixture(
    data: Sources, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int, apart_from: tuple[int, int]
) -> TokenData:
    """The same of `load_held_out_samples`: of each source what calibration left over."""
    sources = _sources(data, apart_from[0], tokenizer)
    if len(sources) == 1:
        return load_held_out_samples(sources[0].source, tokenizer, samples, length, seed, apart_from)
    weights = [source.weight for source in sources]
    wanted = shares(weights, max(samples, len(sources)))
    parts = [
        load_held_out_samples(source.source, tokenizer, count, length, seed, (used, apart_from[1]))
        for source, count, used in zip(sources, wanted, shares(weights, apart_from[0]), strict=True)
    ]
    return _joined(sources, parts, seed)


def _sources(data: Sources, samples: int | None, tokenizer: PreTrainedTokenizerBase) -> list[WeightedSource]:
    """All that are named; of the texts that ship with kvconvert no more than there are samples, and conversations for
    models with a template that writes them.
    """
    sources = weighted_sources(data)
    if data is not None:
        return sources
    return [own for own in sources if own.source != CONVERSATIONS or _writes_answers(tokenizer)][:samples]


def _writes_answers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether there is a chat template, which writes an answer to a user."""
    return bool(tokenizer.chat_template) and Conversations(tokenizer).takes("user", "assistant")


def _joined(sources: list[WeightedSource], parts: list[TokenData], seed: int) -> TokenData:
    ids = torch.cat([part.ids for part in parts])
    name = ", ".join(f"{part.info.source}={source.weight:g}" for source, part in zip(sources, parts, strict=True))
    return token_data(ids, name, seed)


def unlike_the_model(data: Sources, tokens: TokenData, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Warnings, one sentence each, where the samples suggest that the model is used for something else.

    Args:
        data: where the samples are from.
        tokens: the samples, of text.
        tokenizer: the model's tokenizer.
    """
    said, ids = [], tokens.ids
    named = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id}
    special = torch.tensor(sorted(set(tokenizer.all_special_ids) - named), dtype=torch.int64)
    rendered = bool(torch.isin(ids, special).any())
    sources = _sources(data, None, tokenizer)
    names = [source_name(source.source) for source in sources]
    named_text, verb = listed(names, "and"), "is" if len(names) == 1 else "are"
    plain = not rendered and not any(holds_conversations(source.source) for source in sources)
    if tokenizer.chat_template and plain:
        said.append(
            f"The tokenizer has a chat template, and {named_text} {verb} plain text; if the model is to serve "
            "conversations, give data with a column of messages."
        )
    unknown = {tokenizer.unk_token_id} - {None, tokenizer.bos_token_id, tokenizer.eos_token_id}
    distinct, counts = ids.unique(return_counts=True)
    spelled = tokenizer.convert_ids_to_tokens(distinct.tolist())
    pieces = [
        count
        for token, text, count in zip(distinct.tolist(), spelled, counts.tolist(), strict=True)
        if token in unknown or _BYTE.fullmatch(text or "")
    ]
    share = sum(pieces) / ids.numel()
    if share > MANY_UNKNOWN:
        said.append(
            f"{share:.0%} of the calibration tokens of {named_text} are unknown to the tokenizer or single "
            "bytes; the model was hardly trained on such text."
        )
    text = sum(len(row.encode()) for row in tokenizer.batch_decode(ids, skip_special_tokens=True))
    if text / ids.numel() < FEW_BYTES:
        said.append(
            f"{named_text} {'has' if len(names) == 1 else 'have'} {text / ids.numel():.1f} bytes of text per token, "
            "where a tokenizer that fits has 3 to 5; check that it is text in the model's languages."
        )
    return said
