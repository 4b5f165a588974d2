"""Recall as a chat model is asked: a five-digit number stated once in prose, and a question in the chat template.

The prose is read page by page through the cache first, so that the number, and whatever the model made of it, is in
quantized pages when the question comes. The answer is begun for the model, up to the number: what is asked is whether
the number is found, not whether the model obeys.
"""

from __future__ import annotations

import random
import statistics

from transformers import PreTrainedTokenizerBase

from kvconvert.errors import UsageError
from kvconvert.fidelity.recall import PASSKEY_ANSWER_TOKENS, PASSKEY_DEPTHS, Drill

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
        seed: of cities, numbers and filler.
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
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def room(self) -> int:
        """Tokens that a question and its answer take."""
        return self.cue_length + PASSKEY_ANSWER_TOKENS

    def fits(self, context: int) -> bool:
        """Whether a number has room in so many tokens."""
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
            raise UsageError(f"{context} tokens have no room for a number in prose; ask with longer contexts.")
        begin = self.random.randrange(max(1, len(self.prose) - length + 1))
        body = [self.prose[(begin + i) % len(self.prose)] for i in range(length)]
        place = round(depth * length)
        cue = self.encode(self._cue(city))
        return Drill(head + body[:place] + fact + body[place:], cue, number, depth)

    def drills(self, context: int, count: int) -> list[Drill]:
        """`count` of them, the depths in turn."""
        return [self.drill(context, PASSKEY_DEPTHS[i % len(PASSKEY_DEPTHS)]) for i in range(count)]


def has_plain_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether there is a chat template and it renders a message of plain text word for word."""
    return bool(tokenizer.chat_template) and _template(tokenizer) is not None


def _template(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """What stands before the prose, and after it with a place for the city; None where the template does not do it."""
    message = {"role": "user", "content": f"Read this text.\n\n{_PROSE}\n\n{QUESTION}"}
    try:
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception:  # templates raise jinja2 errors of any kind
        return None
    head, found, tail = text.partition(_PROSE)
    before, asked, after = tail.partition(QUESTION)
    if not found or not asked:
        return None
    escaped = [part.replace("{", "{{").replace("}", "}}") for part in (before, after)]
    return head, escaped[0] + QUESTION + escaped[1]
