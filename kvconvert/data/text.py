"""Reads text and cuts it into token samples, for calibration and for measuring fidelity.

A SOURCE is a .txt, .jsonl, .json, .csv or .parquet file, a directory of one of these kinds, either of them with
optional `::column`, source code or Markdown (a file, or a directory with files of `CODE`), a Hub data set id with
optional `:config:split:column`, or a text that ships with kvconvert (`kvconvert:books-calib.txt`, public-domain novels;
`kvconvert:code-calib.txt`, code and notes of earlier versions of kvconvert; `kvconvert:chat-calib.jsonl`, conversations
with worked problems and requests of code). `kvconvert.data.samples` takes several.

How samples are cut, always without overlap and padding, so that every sample has exactly the requested length:

- Plain text (.txt, code): each file is one document. All documents are tokenized and joined, the result is divided into
  windows, and the seed chooses which windows are taken; they keep their order in the text.
- Rows (of all others): rows are shuffled by the seed within a moving buffer of `SHUFFLE_BUFFER` rows, joined,
  and cut into consecutive windows until there are enough; a row may span windows and a window may hold several rows
  (what AutoAWQ does, and llm-compressor with `concatenate_data`). Only as many rows are read or downloaded as needed.

Documents are separated by the tokenizer's end-of-sequence token. Where the tokenizer itself begins a text with a
beginning-of-sequence token, every sample begins with one, because models trained so attend to it as a sink.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvconvert.data.sources import (
    CONVERSATIONS,
    ROWS_INSPECTED,
    SourceTable,
    is_conversation,
    is_plain_text,
    local_files,
    read_text,
    refuse_spelled_conversations,
    source_name,
    spells_conversation,
    spells_records,
)
from kvconvert.errors import DataError, UsageError, counted, first_line
from kvconvert.io.records import DataInfo, shortened
from kvconvert.models.prompts import Conversations, added_around, token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PIECE_CHARACTERS = 1_000_000  # a long text is tokenized piece by piece: the peak of memory is then one piece's encoding


@dataclass(frozen=True)
class TokenData:
    """Token samples and where they come from.

    Attributes:
        ids: int64 [samples, length].
        info: source, sizes, seed and the sha256 of the ids (and pixels); no text.
        extras: for each sample the model's further inputs, as for a batch of that sample alone (pixel values, sizes,
            token types); empty for text.
        visual: which tokens stand for parts of images, bool [samples, length]; None for text.
        warnings: sentences on what in them is unlike the model, see `kvconvert.data.samples`.
        random: how many of the last samples are random tokens, see `with_random_tokens`.
    """

    ids: torch.Tensor
    info: DataInfo
    extras: tuple[dict[str, torch.Tensor], ...] = ()
    visual: torch.Tensor | None = None
    warnings: tuple[str, ...] = ()
    random: int = 0

    def first(self, count: int) -> TokenData:
        """The first samples alone, under the fingerprint of all."""
        visual = None if self.visual is None else self.visual[:count]
        return TokenData(self.ids[:count], self.info.model_copy(update={"samples": count}), self.extras[:count], visual)


def load_token_samples(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    seed: int,
    asked: tuple[str, str] = ("samples", "seq_len"),
) -> TokenData:
    """Read a SOURCE and cut it into samples; the same arguments and files give the same ids.

    Args:
        source: see the module's text.
        tokenizer: the model's own tokenizer, with a chat template if rows hold `messages`.
        samples: number of samples; more than the source holds are an error that says how many it has.
        length: tokens per sample.
        seed: chooses windows of plain text, and the order of rows.
        asked: the arguments by which the user gives `samples` and `length`, for messages.

    Raises:
        DataError: the source is missing, empty, undecodable, of an unknown kind, has no text column, or is too short.
        UsageError: samples or length is not positive.
    """
    if samples < 1 or length < 2:
        raise UsageError(
            f"{counted(samples, 'sample')} of {counted(length, 'token')} cannot be cut; request at least 1 "
            "sample of at least 2 tokens."
        )
    prefix, window = _prefix(tokenizer, length)
    name = source_name(source)
    ids, whole = _token_ids(source, tokenizer, seed, samples * window)
    available = len(ids) // window
    if available < samples:
        found = f"Data source {name} holds {counted(len(ids), 'token')}"
        if available == 0:
            raise DataError(f"{found}, but one sample needs {window:,}; give more text, or a smaller `{asked[1]}`.")
        raise DataError(
            f"{found}, which make {counted(available, 'sample')} of {length:,}, but "
            f"{counted(samples, 'sample')} ({counted(samples * window, 'token')}) "
            f"are requested; give more text, or a smaller `{asked[0]}` or `{asked[1]}`."
        )
    rows = [prefix + ids[i * window : (i + 1) * window] for i in _windows(available, samples, seed, whole)]
    return token_data(torch.tensor(rows), name, seed)


RANDOM_SHARE = 16  # samples per random one: benchmarks/WEIGHTS.md


def with_random_tokens(data: TokenData, tokenizer: PreTrainedTokenizerBase, vocabulary: int, seed: int) -> TokenData:
    """Samples of text with random tokens in the last of every 16, each of the vocabulary as likely as another.

    A text of some 30,000 tokens has a tenth of a vocabulary; what corrects weights for inputs that it lacks would be
    left to chance. Fewer than 16 samples stay as they are.

    Args:
        data: of text.
        tokenizer: its special tokens are left out.
        vocabulary: tokens that the model has.
        seed: of the tokens.
    """
    count = len(data.ids) // RANDOM_SHARE
    if not count:
        return data
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= set(tokenizer.all_special_ids)
    known = torch.tensor([number for number in range(min(vocabulary, len(tokenizer))) if number not in special])
    drawn = torch.randint(len(known), (count, data.ids.shape[1]), generator=torch.Generator().manual_seed(seed))
    prefix, ids = added_around(tokenizer)[0], data.ids.clone()
    ids[-count:] = known[drawn]
    ids[-count:, : len(prefix)] = torch.tensor(prefix, dtype=torch.int64)
    named = token_data(ids, f"{data.info.source}, {count} of them random tokens", data.info.seed)
    return replace(data, ids=ids, info=named.info, random=count)


def load_held_out_samples(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    seed: int,
    apart_from: tuple[int, int],
) -> TokenData:
    """Samples of what `load_token_samples` leaves over, for choices that calibration's own samples must not decide.

    Args:
        source, tokenizer, seed: as of those samples.
        samples: how many; fewer where the rest of the text has no more that are evenly spread. Consecutive text, or,
            where calibration left none that is long enough, what lies between its samples, joined.
        length: tokens per sample.
        apart_from: number and length of the samples that are left out.

    Raises:
        DataError: the rest of the text has not one sample; see also `load_token_samples`.
    """
    prefix, window = _prefix(tokenizer, length)
    taken = apart_from[1] - len(prefix)
    name = source_name(source)
    used = apart_from[0] * taken
    ids, whole = _token_ids(source, tokenizer, seed, used + samples * window)
    starts, rest, at = [], [], 0
    for index in [*_windows(len(ids) // taken, apart_from[0], seed, whole), None]:
        gap = len(ids) if index is None else index * taken
        starts += range(at, gap - window + 1, window)
        rest += ids[at:gap]
        at = gap + taken
    if not starts:  # nowhere so many in a row: what lies between the samples, joined
        ids, starts = rest, list(range(0, len(rest) - window + 1, window))
    if not starts:
        raise DataError(
            f"Data source {name} leaves {counted(len(rest), 'token')} outside of the {apart_from[0]} "
            "calibration samples, and "
            f"{window} are needed; give more text, or calibrate on fewer samples."
        )
    count = min(samples, len(starts))
    rows = [prefix + ids[at : at + window] for at in (starts[i * len(starts) // count] for i in range(count))]
    return token_data(torch.tensor(rows), name, seed)


def _prefix(tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[list[int], int]:
    """Tokens that the tokenizer puts before each sample, and the number of the text's that follow (UsageError)."""
    prefix, _ = added_around(tokenizer)
    if len(prefix) >= length:
        raise UsageError(
            f"The tokenizer puts {counted(len(prefix), 'token')} before a text, which leaves nothing of "
            f"{length} for the text; "
            "give a larger sequence length."
        )
    return prefix, length - len(prefix)


def _token_ids(source: str, tokenizer: PreTrainedTokenizerBase, seed: int, enough: int) -> tuple[list[int], bool]:
    """All tokens of plain text, or `enough` of shuffled rows; and whether it is plain text."""
    files = local_files(source)
    if is_plain_text(files):
        return _join((_encode(read_text(file), tokenizer) for file in files), tokenizer, None), True
    return _join(_row_ids(source, files, tokenizer, seed), tokenizer, enough), False


def _windows(available: int, samples: int, seed: int, whole: bool) -> list[int]:
    """The windows that become samples: chosen by the seed from plain text, the first of shuffled rows."""
    return sorted(random.Random(seed).sample(range(available), samples)) if whole else list(range(samples))


def token_data(ids: torch.Tensor, name: str, seed: int) -> TokenData:
    """Samples [samples, length] of text with their fingerprint."""
    digest = hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
    return TokenData(
        ids, DataInfo(source=shortened(name), samples=len(ids), length=ids.shape[1], seed=seed, sha256=digest)
    )


def spaced_samples(source: str, tokenizer: PreTrainedTokenizerBase, samples: int, length: int) -> torch.Tensor:
    """Cut a local text into samples that begin at equal distances: int64 [samples, length].

    Unlike a choice by seed they cover the whole text, and more of them refine the same comparison.

    Raises:
        DataError: the text cannot be read, or is too short.
    """
    prefix, window = _prefix(tokenizer, length)
    ids = _join((_encode(read_text(file), tokenizer) for file in local_files(source) or ()), tokenizer, None)
    if len(ids) < samples * window:
        raise DataError(
            f"{source} holds {counted(len(ids), 'token')}, fewer than {counted(samples, 'sample')} of "
            f"{length:,}; request fewer or shorter "
            "ones."
        )
    step = len(ids) // samples
    return torch.tensor([prefix + ids[i * step : i * step + window] for i in range(samples)], dtype=torch.int64)


def _row_ids(
    source: str, files: list[Path] | None, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Iterator[list[int]]:
    """Token ids of each row in shuffled order."""
    table = SourceTable.open(source, files)
    column = table.text_column
    first = table.first(ROWS_INSPECTED)
    for name in table.read_columns:
        refuse_spelled_conversations((row.get(name) for row in first), f"{source}, column {name}")
    if table.read_columns == [column] and spells_records(row.get(column) for row in first):
        logger.warning("%s, column %s: JSON is read as prose; store what it says in columns.", source, column)
    conversations, rows, empty, spelled = Conversations(tokenizer), 0, 0, False
    named = ("columns " if len(table.read_columns) > 1 else "column ") + " and ".join(table.read_columns)
    drops_system = source == CONVERSATIONS and not conversations.takes("system", "user", "assistant")
    for place, row in table.shuffled(seed):
        rows += 1
        value = row.get(column)
        if drops_system:
            value = [message for message in value if message["role"] != "system"]
        if not spelled and isinstance(value, str) and spells_conversation(value):
            spelled = True
            logger.warning(
                "%s, %s: a conversation spelled as JSON or Python text is read as prose; store a list of messages.",
                place,
                named,
            )
        ids = _encode_row(value, tokenizer, conversations, f"{place}, {named}")
        if ids:
            yield ids
        else:
            empty += 1
    if rows == empty:
        raise DataError(
            f"Data source {source} has no text in {named} of any row; name another column, or another source."
        )
    if empty:
        logger.info("%s: %d rows without text in column %s were skipped", table.place, empty, column)


def _encode_row(value: Any, tokenizer: PreTrainedTokenizerBase, conversations: Conversations, place: str) -> list[int]:
    """Ids of one row: text as it is, messages through the chat template; empty for a row without either."""
    if value is None:
        return []
    if isinstance(value, str):
        return _encode(value, tokenizer) if value.strip() else []
    if isinstance(value, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value):
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"Data source {place}: a conversation, but the tokenizer {tokenizer.name_or_path!r} has no chat "
                "template; use a model with one, or data with a text column."
            )
        if not value:
            return []
        try:
            ids = conversations.encode(value, answer=False)
        except UsageError as error:
            raise DataError(f"Data source {place}: {first_line(error)}; correct the row.") from error
        # Every sample begins with what the tokenizer puts before a text, which a template may write as well.
        prefix, _ = added_around(tokenizer)
        return ids[len(prefix) :] if prefix and ids[: len(prefix)] == prefix else ids
    kind = "a conversation whose messages have no role" if is_conversation(value) else type(value).__name__
    raise DataError(
        f"Data source {place}: {kind} is neither text nor a list of messages (role and content); name another column, "
        "or write the conversations so."
    )


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids without the tokenizer's special tokens; a long text is cut into pieces at line ends."""
    ids, start = [], 0
    while start < len(text):
        end = len(text)
        if end - start > PIECE_CHARACTERS:
            newline = text.rfind("\n", start, start + PIECE_CHARACTERS)
            end = newline + 1 if newline > start else start + PIECE_CHARACTERS
        ids += token_ids(tokenizer, text[start:end])
        start = end
    return ids


def _join(documents: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, enough: int | None) -> list[int]:
    """All ids in one list, documents separated by the end-of-sequence token, stopping at `enough` ids."""
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    joined: list[int] = []
    for ids in documents:
        # A rendered conversation may end in the separator, or begin with it, already.
        joined += (separator if joined and joined[-1:] != separator and ids[:1] != separator else []) + ids
        if enough is not None and len(joined) >= enough:
            break
    return joined
