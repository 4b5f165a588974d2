"""Calibration text from several sources with weights, and what is unlike the model in it.

A weighted source is `SOURCE=WEIGHT`: of 16 samples, `chat.jsonl=3` and `code=1` give 12 and 4. Each source is read and
cut as if it were alone; samples of one source follow those of the other, so that passes, which take evenly spaced
samples, see both in proportion.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvconvert.data.sources import Sources, WeightedSource, holds_conversations, source_name, weighted_sources
from kvconvert.data.text import TokenData, load_held_out_samples, load_token_samples, token_data
from kvconvert.errors import UsageError, listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
            f"{samples} samples are too few for {len(counts)} sources with these weights: one gets none; request more "
            "samples, or leave that source out."
        )
    return counts


def load_mixture(data: Sources, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int) -> TokenData:
    """Samples of one or several text sources; see `load_token_samples`, which cuts those of each."""
    sources = _sources(data, samples)
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
    sources = _sources(data, apart_from[0])
    if len(sources) == 1:
        return load_held_out_samples(sources[0].source, tokenizer, samples, length, seed, apart_from)
    weights = [source.weight for source in sources]
    wanted = shares(weights, max(samples, len(sources)))
    parts = [
        load_held_out_samples(source.source, tokenizer, count, length, seed, (used, apart_from[1]))
        for source, count, used in zip(sources, wanted, shares(weights, apart_from[0]), strict=True)
    ]
    return _joined(sources, parts, seed)


def _sources(data: Sources, samples: int) -> list[WeightedSource]:
    """All that are named; of the texts that ship with kvconvert no more than there are samples."""
    sources = weighted_sources(data)
    return sources[:samples] if data is None else sources


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
    names = [source_name(source.source) for source in weighted_sources(data)]
    named_text, verb = listed(names, "and"), "is" if len(names) == 1 else "are"
    plain = not rendered and not any(holds_conversations(source.source) for source in weighted_sources(data))
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
