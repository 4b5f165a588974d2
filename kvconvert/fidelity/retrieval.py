"""Retrieval: does a model still find, in its quantized past, what it found at full precision?

Perplexity alone hides damage to lookups that generation shows. The drills are greedy, with the question or cue read
after the context, so that everything looked up is in quantized pages (contexts are whole pages long, after as many
tokens as the cache keeps as sinks):

- codes, in plain text: prose with two people's five-digit codes stated once; one is asked for. Exact match of all
  digits.
- numbers, for chat models: a five-digit number stated once in prose, and a question in the chat template. The answer is
  begun for the model: what is asked is whether the number is found, not whether the model obeys.
- free running: the model continues held-out text; tokens until source and bundle first differ.

The words of the first are those that the reference model was trained on; the drills run on any model.
"""

from __future__ import annotations

import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from kvconvert.arguments import Count, checked_fields
from kvconvert.errors import UsageError
from kvconvert.fidelity.scoring import Decoder, batches, bootstrap_mean, generate_greedily
from kvconvert.io.progress import progress_bar
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models.prompts import Conversations, token_ids

NAMES = """
    Alice Boris Clara Daniel Emma Felix Grace Henry Irene Jacob Karen Louis Maria Nathan Olive Peter Quinn Rosa Simon
    Tara Ursula Victor Wendy Xavier Yvonne Zachary
""".split()  # noqa: SIM905 (words are easier to read so)

RETRIEVAL_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
RETRIEVAL_ANSWER_TOKENS = 10
FREE_CONTEXT = 4 * PAGE_SIZE
FULL_TOKENS = 8192  # scored tokens that go with the full number of drills
BATCH = 16

Answer = Callable[[Sequence["Drill"], int], list[str]]


@checked_fields
@dataclass(frozen=True)
class DrillCounts:
    """How much is drilled; reports are comparable only at equal counts.

    Attributes:
        retrieval_trials: codes of each context length and depth.
        numbers: prompts of a model with a chat template, which is asked for numbers instead.
        probes: prompts of each probe, six answers each.
        free_prompts: beginnings of segments that are continued.
        free_tokens: tokens generated after each.
    """

    retrieval_trials: Count = 4
    numbers: Count = 16
    probes: Count = 12
    free_prompts: Count = 16
    free_tokens: Count = PAGE_SIZE

    @classmethod
    def for_tokens(cls, tokens: int) -> DrillCounts:
        """The default counts, or proportionally fewer where fewer than `FULL_TOKENS` tokens are scored."""
        share = min(1.0, tokens / FULL_TOKENS)
        fewer = {name: max(1, round(share * count)) for name, count in vars(cls()).items()}
        return cls(**fewer | {"free_tokens": max(16, fewer["free_tokens"])})


DEFAULT_COUNTS = DrillCounts()


@dataclass(frozen=True)
class Drill:
    """A prompt in two parts and what is expected after it.

    Attributes:
        context, cue: token ids.
        expected: five digits.
        depth: the depth of the fact asked for, as a share of the prose.
    """

    context: list[int]
    cue: list[int]
    expected: str
    depth: float


@dataclass(frozen=True)
class RetrievalResult:
    """Numbers of five digits that are found.

    Attributes:
        source, bundle: share of prompts answered exactly.
        prompts: how many.
        by_length: context length in tokens to (source, bundle).
        by_depth: depth of the fact to (source, bundle).
        loss_interval: bootstrap interval, over prompts, of `source` - `bundle`; None with one prompt.
    """

    source: float | None
    bundle: float | None
    prompts: int
    by_length: dict[str, tuple[float, float]]
    by_depth: dict[str, tuple[float, float]]
    loss_interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class FreeRunningResult:
    """Greedy continuations of held-out text.

    Attributes:
        agreement_tokens: mean number of tokens until source and bundle first differ, `generated` where they never do.
        median_agreement_tokens: the median.
        identical: share of continuations that never differ.
        prompts, context, generated: how many, tokens before each and tokens generated after each.
    """

    agreement_tokens: float | None
    median_agreement_tokens: float | None
    identical: float | None
    prompts: int
    context: int
    generated: int


class DrillBook:
    """Writes drills in the form that the reference model was trained on.

    Args:
        tokenizer: the model's tokenizer.
        prose: token ids of held-out text, the filler.
        seed: the seed of names, codes, tables and filler.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prose: list[int], seed: int):
        self.tokenizer, self.prose, self.random = tokenizer, prose, random.Random(seed)
        self.start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return token_ids(self.tokenizer, text)

    def code(self, context: int, depth: float) -> Drill:
        """Prose of `context` tokens in which two codes are stated; the one at `depth` is asked for."""
        names = self.random.sample(NAMES, 2)
        codes = ["".join(self.random.choices("0123456789", k=5)) for _ in names]
        facts = [
            self.encode(f" The secret code of {name} is {code}. ") for name, code in zip(names, codes, strict=True)
        ]
        length = context - len(self.start) - sum(map(len, facts))
        begin = self.random.randrange(len(self.prose) - length + 1)
        body = self.prose[begin : begin + length]
        places = [round(depth * length), self.random.randrange(length + 1)]
        for place, fact in sorted(zip(places, facts, strict=True), reverse=True):
            body[place:place] = fact
        cue = self.encode(f"\nQuestion: what is the secret code of {names[0]}?\nAnswer:")
        return Drill(self.start + body, cue, codes[0], depth)


def answer_with(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    progress: bool = False,
    name: str = "",
    chunk: int | None = None,
    batch: int = BATCH,
) -> Answer:
    """How a decoder answers drills: text generated greedily after each, `batch` prompts at a time.

    Contexts are read in chunks of `chunk` tokens, or in one pass.
    """

    def answer(drills: Sequence[Drill], new_tokens: int) -> list[str]:
        prompts = [(drill.context, drill.cue) for drill in drills]
        texts = [""] * len(drills)
        with progress_bar(total=len(drills), desc=f"retrieval, {name}", unit="prompt", shown=progress) as bar:
            for indices in batches(prompts, batch):
                context, cue = (torch.tensor([prompts[i][part] for i in indices]) for part in (0, 1))
                answers = generate_greedily(decoder, context, cue, new_tokens, chunk)
                for index, ids in zip(indices, answers, strict=True):
                    texts[index] = tokenizer.decode(ids)
                bar.update(len(indices))
        return texts

    return answer


def retrieval_drills(book: DrillBook, max_length: int, trials: int) -> list[Drill]:
    """Codes over all depths, in a quarter, half, and all of `max_length` tokens with the answer, by whole pages."""
    room = RETRIEVAL_ANSWER_TOKENS + len(book.encode("\nQuestion: what is the secret code of Zachary?\nAnswer:")) + 4
    most = min(max_length - room, len(book.prose))
    pages = sorted({min(tokens, most) // PAGE_SIZE for tokens in (max_length // 4, max_length // 2, most)})
    lengths = [count * PAGE_SIZE for count in pages if count > 0]
    return [book.code(n, depth) for n in lengths for depth in RETRIEVAL_DEPTHS for _ in range(trials)]


def retrieval(source: Answer, bundle: Answer, drills: Sequence[Drill], seed: int = 0) -> RetrievalResult:
    """Ask source and bundle for the same five digits."""
    if not drills:
        return RetrievalResult(None, None, 0, {}, {})
    right = [
        [retrieval_right(d, text) for d, text in zip(drills, answer(drills, RETRIEVAL_ANSWER_TOKENS), strict=True)]
        for answer in (source, bundle)
    ]

    def shares(key: Callable[[Drill], Any]) -> dict[str, tuple[float, float]]:
        groups: dict[Any, list[int]] = {}
        for index, drill in enumerate(drills):
            groups.setdefault(key(drill), []).append(index)
        return {
            str(name): tuple(sum(answers[i] for i in chosen) / len(chosen) for answers in right)
            for name, chosen in sorted(groups.items())
        }

    before, after = (torch.tensor(answers, dtype=torch.float64) for answers in right)
    return RetrievalResult(
        *(sum(answers) / len(drills) for answers in right),
        prompts=len(drills),
        by_length=shares(lambda drill: len(drill.context)),
        by_depth=shares(lambda drill: drill.depth),
        loss_interval=bootstrap_mean(before - after, seed).bounds,
    )


def free_running(
    source: Decoder,
    bundle: Decoder,
    ids: torch.Tensor,
    max_length: int,
    counts: DrillCounts = DEFAULT_COUNTS,
    progress: bool = False,
) -> FreeRunningResult:
    """Let source and bundle continue the beginnings of the segments `ids` [segments, length]."""
    tokens, length = counts.free_tokens, FREE_CONTEXT
    if max_length < length + 1 + tokens or ids.shape[1] <= length:
        return FreeRunningResult(None, None, None, 0, length, 0)
    ids = ids[: counts.free_prompts]
    context, cue = ids[:, :length], ids[:, length : length + 1]
    texts = [
        generate_greedily(decoder, context, cue, tokens)
        for decoder in progress_bar((source, bundle), desc="free running", unit="model", shown=progress)
    ]
    until = agreement(*texts)
    return FreeRunningResult(
        float(until.double().mean()),
        float(until.double().quantile(0.5)),
        float((until == tokens).double().mean()),
        len(ids),
        length,
        tokens,
    )


def agreement(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Tokens of each row of [B, n] before the two differ, n where they never do; int64 [B]."""
    return (first == second).long().cumprod(1).sum(1)


def retrieval_right(drill: Drill, text: str) -> bool:
    """Whether an answer begins with exactly the digits asked for."""
    found = re.match(r"\s*(\d+)", text)
    return found is not None and found[1] == drill.expected


CITIES = """
    Amsterdam Athens Berlin Boston Cairo Chicago Dublin Geneva Havana Lisbon London Madrid Milan Montreal Moscow Oslo
    Paris Prague Rome Seattle Stockholm Sydney Tokyo Toronto Vienna Warsaw
""".split()  # noqa: SIM905 (words are easier to read so)
FACT = "\nThe special magic number for {city} is {number}.\n"
QUESTION = "What is the special magic number for {city}?"
ANSWER = "The special magic number for {city} is"
_PROSE = "<<<prose>>>"


class NumberBook:
    """Writes prompts of any length that hide a number in prose.

    Args:
        tokenizer: with a chat template that takes messages of plain text; see `has_plain_template`.
        prose: token ids of held-out text, the filler; repeated where it is too short.
        seed: the seed of cities, numbers and filler.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prose: list[int], seed: int):
        self.tokenizer, self.prose, self.random = tokenizer, prose, random.Random(seed)
        self.head, self.tail = _template(tokenizer)
        # Questions of one length can be asked in one batch.
        lengths = {city: len(self.encode(self._cue(city))) for city in CITIES}
        self.cue_length = statistics.mode(lengths.values())
        self.cities = [city for city, length in lengths.items() if length == self.cue_length]

    def _cue(self, city: str) -> str:
        return (self.tail + ANSWER).format(city=city)

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return token_ids(self.tokenizer, text)

    @property
    def room(self) -> int:
        """Tokens that a question and its answer take."""
        return self.cue_length + RETRIEVAL_ANSWER_TOKENS

    def fits(self, context: int) -> bool:
        """Whether a number fits into that number of tokens."""
        return context > len(self.encode(self.head)) + len(self.encode(FACT.format(city="Stockholm", number=10000)))

    def drill(self, context: int, depth: float) -> Drill:
        """A conversation whose first `context` tokens hold the number after a share `depth` of the prose.

        Raises:
            UsageError: there is no room for the number.
        """
        city, number = self.random.choice(self.cities), str(self.random.randrange(10000, 100000))
        head, fact = self.encode(self.head), self.encode(FACT.format(city=city, number=number))
        length = context - len(head) - len(fact)
        if length < 1:
            raise UsageError(f"{context:,} tokens have no room for a number in prose; ask with longer contexts.")
        begin = self.random.randrange(max(1, len(self.prose) - length + 1))
        body = [self.prose[(begin + i) % len(self.prose)] for i in range(length)]
        place = round(depth * length)
        cue = self.encode(self._cue(city))
        return Drill(head + body[:place] + fact + body[place:], cue, number, depth)

    def drills(self, context: int, count: int) -> list[Drill]:
        """`count` of them, the depths in turn."""
        return [self.drill(context, RETRIEVAL_DEPTHS[i % len(RETRIEVAL_DEPTHS)]) for i in range(count)]


def has_plain_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether there is a chat template and it renders a message of plain text word for word."""
    return bool(tokenizer.chat_template) and _template(tokenizer) is not None


def _template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Text before the prose, and after it with a place for the city; None where the template does not do it."""
    message = {"role": "user", "content": f"Read this text.\n\n{_PROSE}\n\n{QUESTION}"}
    try:
        text = Conversations(tokenizer, parse_special=True).text([message], answer=True)
    except UsageError:
        return None
    head, found, tail = text.partition(_PROSE)
    before, asked, after = tail.partition(QUESTION)
    if not found or not asked:
        return None
    escaped = [part.replace("{", "{{").replace("}", "}}") for part in (before, after)]
    return head, escaped[0] + QUESTION + escaped[1]
