"""Probes of what a low-bit cache loses first: exact lookups among facts that resemble one another.

A prompt is read page by page through the cache, all of its facts end with a page, and the question comes after them, so
that whatever is looked up is in quantized pages. Several answers are asked for in one reply, and a first one is given,
which shows their form. They are fed to the model together with the prompt (teacher forcing), in a single pass: an
answer is right if each of its tokens is the most likely one, that is, if greedy generation would give it.

What a bundle keeps of its source's abilities, and one sentence that says what it is fit for.

The rule: a bundle is fit for what it does at least nine tenths as well as its source. Retrieval and probes are
judged by the share of right answers, if `MIN_PROMPTS` prompts or more were asked and the source answers a fifth or
more; what seems lost is unclear while the interval of the loss holds zero.
Continuing text is judged by the inverse of perplexity, the mean probability of the text's tokens, over `MIN_TOKENS` or
more of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from kvconvert.errors import UsageError, listed
from kvconvert.fidelity.retrieval import NAMES, RetrievalResult
from kvconvert.fidelity.scoring import Decoder, bootstrap_mean, feed, read_prompt
from kvconvert.io.progress import progress_bar
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.models.prompts import Conversations, token_ids

ASKED = 6  # answers of a prompt
ROOM = 208  # tokens of question and answers
COLORS = "amber azure coral cyan green indigo ivory khaki lilac olive pink purple red silver white yellow".split()  # noqa: SIM905
ANIMALS = """
    badger beaver eagle falcon ferret goose heron lizard monkey otter panther rabbit raven seal tiger wolf
""".split()  # noqa: SIM905
VERBS = "build check clear count draw fetch find load merge move parse read send sort split write".split()  # noqa: SIM905
NOUNS = "block cache field frame group image layer list page path query record shape table token word".split()  # noqa: SIM905
WORDS = """
    angle axis base color count depth end factor height index key kind label length limit mode name offset order place
    rate scale shift size source start state step target time title total unit value weight width
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Conversation:
    """A conversation in words.

    Attributes:
        turns: (user, assistant) pairs that came before.
        facts: the facts of the last user's message, all of it that is to be remembered.
        question: its rest.
        reply: the answer of the assistant, as (given, expected) in turns.
        is_plain: a text to be continued, which no chat template changes.
    """

    turns: tuple[tuple[str, str], ...]
    facts: str
    question: str
    reply: tuple[tuple[str, str], ...]
    is_plain: bool = False


@dataclass(frozen=True)
class ProbePrompt:
    """A conversation in tokens, its answers included.

    Attributes:
        ids: all of them.
        read: how many are read page by page, before those of the question.
        answers: (start, stop) of each answer in `ids`.
    """

    ids: list[int]
    read: int
    answers: tuple[tuple[int, int], ...]


# Writes a conversation of a size: items, or words of the prose given.
Write = Callable[[random.Random, int, Sequence[str]], Conversation]


@dataclass(frozen=True)
class Probe:
    """One ability.

    Attributes:
        name: in reports.
        ability: what a model that passes can do, in words that follow "fit for".
        write: writes a conversation.
    """

    name: str
    ability: str
    write: Write


def _numbers(rng: random.Random, count: int) -> list[str]:
    return [str(number) for number in rng.sample(range(10_000, 100_000), count)]


def _pairs(rng: random.Random, count: int, first: Sequence[str], second: Sequence[str], between: str) -> list[str]:
    """Names of two words each, of which other names have one as well; with a number where words do not suffice."""
    pairs = [f"{a}{between}{b}" for a in first for b in second]
    names = [f"{pair}{between}{i}" if i else pair for i in range(-(-count // len(pairs))) for pair in pairs]
    return rng.sample(names, count)


def _reply(answers: Iterable[tuple[str, str]], begin: str = "", between: str = "\n") -> tuple[tuple[str, str], ...]:
    """Answers one after another, the first of which is given: it shows their form."""
    (asked, shown), *others = answers
    given = [begin + asked + shown + between + others[0][0], *(between + asked for asked, _ in others[1:])]
    return tuple(zip(given, (expected for _, expected in others), strict=True))


def write_json(rng: random.Random, size: int, prose: Sequence[str]) -> Conversation:
    """An object of `size` keys, each of two words that other keys have as well, with numbers of five digits."""
    keys = _pairs(rng, size, COLORS, ANIMALS, "-")
    value = dict(zip(keys, _numbers(rng, size), strict=True))
    asked = rng.sample(keys, ASKED + 1)
    facts = "This is a JSON object.\n\n{\n" + "".join(f'  "{key}": "{value[key]}",\n' for key in keys)
    question = f'  "end": ""\n}}\n\nWhat are the values of {listed(asked)}? Answer with a JSON object of these keys.'
    answers = ((f'  "{key}": "', value[key]) for key in asked)
    return Conversation((), facts, question, _reply(answers, begin="{\n", between='",\n'))


def write_assignments(rng: random.Random, size: int, prose: Sequence[str]) -> Conversation:
    """`size` assignments of numbers of five digits to names that differ in a number."""
    names = [f"name_{i}" for i in rng.sample(range(1, max(100, 2 * size)), size)]
    value = dict(zip(names, _numbers(rng, size), strict=True))
    asked = rng.sample(names, ASKED + 1)
    facts = "These are assignments.\n\n" + "".join(f"{name} = {value[name]}\n" for name in names)
    question = f"\nWhat are the values of {listed(asked)}? Answer with these assignments."
    return Conversation((), facts, question, _reply((f"{name} =", f" {value[name]}") for name in asked))


def write_chains(rng: random.Random, size: int, prose: Sequence[str]) -> Conversation:
    """Nine numbers, each assigned to a variable and that to another one, in `size` words of prose."""
    names = rng.sample(WORDS, 2 * (ASKED + 3))
    chains = list(zip(names[::2], names[1::2], _numbers(rng, ASKED + 3), strict=True))
    asked = rng.sample(chains, ASKED + 1)
    facts = [
        text
        for first, second, number in chains
        for text in (f"\nlet {first} = {number}\n", f"\nlet {second} = {first}\n")
    ]
    text = _hidden(rng, facts, prose, size)
    question = f"\n\nWhat are {listed([second for _, second, _ in asked])}? Follow each to its number."
    return Conversation(
        (),
        f"Read this text.\n\n{text}",
        question,
        _reply((f"let {second} =", f" {first} = {number}") for first, second, number in asked),
    )


def write_needles(rng: random.Random, size: int, prose: Sequence[str]) -> Conversation:
    """Numbers of nine people, stated in `size` words of prose."""
    people = rng.sample(NAMES, ASKED + 3)
    value = dict(zip(people, _numbers(rng, len(people)), strict=True))
    facts = [f"\nThe secret code of {name} is {value[name]}.\n" for name in people]
    text = _hidden(rng, facts, prose, size)
    asked = rng.sample(people, ASKED + 1)
    question = f"\n\nWhat are the secret codes of {listed(asked)}?"
    return Conversation(
        (),
        f"Read this text.\n\n{text}",
        question,
        _reply((f"The secret code of {name} is", f" {value[name]}") for name in asked),
    )


def write_turns(rng: random.Random, size: int, prose: Sequence[str]) -> Conversation:
    """Numbers stated in the first and in the second turn, `size` words of prose in each, and asked for in a third."""
    people = rng.sample(NAMES, 5)
    what = ("locker", "room")
    values = _numbers(rng, 2 * len(people))
    said, stated = [], {}
    for turn, kind in enumerate(what):
        mine = dict(zip(people, values[turn * len(people) :], strict=False))
        stated |= {(kind, name): number for name, number in mine.items()}
        facts = [f"\nThe {kind} number of {name} is {number}.\n" for name, number in mine.items()]
        said.append(_hidden(rng, facts, prose, size))
    asked = rng.sample(sorted(stated), ASKED + 1)
    question = f"What are {listed([f'the {kind} number of {name}' for kind, name in asked])}?"
    reply = _reply((f"The {kind} number of {name} is", f" {stated[kind, name]}") for kind, name in asked)
    turns = (
        (f"Remember this text.\n\n{said[0]}", "I will remember it."),
        (f"Remember this one, too.\n\n{said[1]}", "I will remember both."),
    )
    return Conversation(turns, "", question, reply)


def _hidden(rng: random.Random, facts: Sequence[str], prose: Sequence[str], size: int) -> str:
    """Sentences put at random places of a passage of `size` words; prose that is too short for it begins again."""
    begin = rng.randrange(len(prose))
    words = [prose[(begin + i) % len(prose)] for i in range(size)]
    for place, fact in sorted(zip((rng.randrange(len(words) + 1) for _ in facts), facts, strict=True), reverse=True):
        words.insert(place, fact)
    return " ".join(words)


def write_code(rng: random.Random, size: int, prose: Sequence[str]) -> Conversation:
    """A module of `size` functions, and the beginning of one that calls them with arguments named like parameters."""
    names = _pairs(rng, size, VERBS, NOUNS, "_")
    parameters = {name: ", ".join(rng.sample(WORDS, 3)) for name in names}
    facts = "".join(f"def {name}({parameters[name]}):\n    ...\n\n\n" for name in names)
    question = "def main():\n    # Call functions from above; variables have the names of the parameters.\n"
    asked = rng.sample(names, ASKED + 1)
    reply = _reply((f"    {name}(", f"{parameters[name]})") for name in asked)
    return Conversation((), facts, question, reply, is_plain=True)


JSON = Probe("json", "looking up values in a JSON object", write_json)
ASSIGNMENTS = Probe("assignments", "looking up values of assignments", write_assignments)
CHAINS = Probe("chains", "following chains of assignments", write_chains)
NEEDLES = Probe("needles", "finding several numbers in prose", write_needles)
TURNS = Probe("turns", "recalling earlier turns", write_turns)
CODE = Probe("code", "continuing code", write_code)
PROBES = (JSON, ASSIGNMENTS, CHAINS, NEEDLES, TURNS, CODE)


class Writer:
    """Writes prompts of a length in the words of a model.

    Args:
        tokenizer: the model's tokenizer; its chat template is used if it renders messages word for word.
        prose: token ids of held-out text, the filler.
        seed: the seed of everything that is chosen.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prose: Sequence[int], seed: int):
        self.tokenizer, self.seed = tokenizer, seed
        self.prose = tokenizer.decode(prose, skip_special_tokens=True).split()
        self.start = "" if tokenizer.bos_token is None else tokenizer.bos_token
        self.is_templated = bool(tokenizer.chat_template) and self._template_is_plain()

    def prompts(self, probe: Probe, length: int, count: int) -> list[ProbePrompt]:
        """`count` prompts of a probe, whose facts take as much of the first `length` tokens as they can."""
        return [self.prompt(probe, length, number) for number in range(count)]

    def prompt(self, probe: Probe, length: int, number: int) -> ProbePrompt:
        """Prompt `number` of a probe; see `prompts`."""

        def conversation(size: int) -> Conversation:
            return probe.write(random.Random(f"{self.seed} {probe.name} {number}"), size, self.prose)

        def fits(size: int) -> bool:
            text, question = self._rendered(conversation(size))
            return len(self._encode(text[:question])) <= length

        size, beyond = ASKED + 1, 2 * ASKED
        while fits(beyond):
            size, beyond = beyond, 2 * beyond
        while beyond - size > 1:
            middle = (size + beyond) // 2
            size, beyond = (middle, beyond) if fits(middle) else (size, middle)
        written = conversation(size)
        text, _ = self._rendered(written)
        spans = []
        for given, expected in written.reply:
            begin = len(text) + len(given)
            text += given + expected
            spans.append((begin, len(text)))
        ids = self._encode(text)
        answers = tuple((self._token_at(text, ids, begin), self._token_at(text, ids, end)) for begin, end in spans)
        return ProbePrompt(ids, min(length, answers[0][0] - 1), answers)

    def _rendered(self, conversation: Conversation) -> tuple[str, int]:
        """The text up to the reply, and where the last question begins in it."""
        user = conversation.facts + conversation.question
        if conversation.is_plain:
            text = self.start + user
        elif self.is_templated:
            text = self._templated(conversation)
        else:
            text = self.start + "\n\n".join([*(said for turn in conversation.turns for said in turn), user, ""])
        return text, text.rindex(conversation.question)

    def _templated(self, conversation: Conversation) -> str:
        messages = []
        for user, assistant in (*conversation.turns, (conversation.facts + conversation.question, None)):
            messages.append({"role": "user", "content": user})
            if assistant is not None:
                messages.append({"role": "assistant", "content": assistant})
        return Conversations(self.tokenizer, parse_special=True).text(messages, answer=True)

    def _template_is_plain(self) -> bool:
        """Whether a conversation of two turns stands in the rendered text word for word."""
        said = Conversation((("One\n {2}", "Three."),), "Four\n\n", "Five?", ())
        try:
            text = self._templated(said)
        except UsageError:
            return False
        places = [text.find(words) for words in ("One\n {2}", "Three.", "Four\n\nFive?")]
        return places[0] >= 0 and places == sorted(places)

    def _encode(self, text: str) -> list[int]:
        return token_ids(self.tokenizer, text)

    def _token_at(self, text: str, ids: list[int], place: int) -> int:
        """Index of the token that a character of the text begins, or lies in."""
        before = self._encode(text[:place])
        return next((i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), len(before))


def probe_tokens(context: int) -> int:
    """Tokens that a prompt's facts may take in a context: whole pages, less room for answers."""
    return max(0, context - ROOM) // PAGE_SIZE * PAGE_SIZE


@torch.no_grad()
def ask(
    decoder: Decoder, prompts: Sequence[ProbePrompt], batch: int = 1, progress: str | None = None
) -> list[list[bool]]:
    """Which answers of each prompt a decoder gives.

    Args:
        decoder: model and cache.
        prompts: the prompts of one probe or of several.
        batch: prompts at a time, where as much of them is read.
        progress: name of a bar on stderr; None shows none.
    """
    right: list[list[bool]] = [[] for _ in prompts]
    groups: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        groups.setdefault(prompt.read, []).append(index)
    shown = progress is not None and len(prompts) > 0
    with progress_bar(total=len(prompts), desc=progress or "", unit="prompt", shown=shown) as bar:
        for read, group in groups.items():
            for chosen in (group[i : i + batch] for i in range(0, len(group), batch)):
                longest = max(len(prompts[i].ids) for i in chosen)
                # What follows the last answer changes none of them.
                ids = torch.tensor([prompts[i].ids + [0] * (longest - len(prompts[i].ids)) for i in chosen])
                cache = decoder.new_cache()
                read_prompt(decoder, cache, ids[:, :read], PAGE_SIZE)
                likeliest = feed(decoder, cache, ids[:, read:]).logits.argmax(-1).cpu()
                for row, index in enumerate(chosen):
                    for start, stop in prompts[index].answers:
                        given = likeliest[row, start - 1 - read : stop - 1 - read].tolist()
                        right[index].append(given == prompts[index].ids[start:stop])
                bar.update(len(chosen))
    return right


KEPT = 0.9  # of what the source does, at least
MIN_SOURCE = 0.2
MIN_PROMPTS = 8
MIN_TOKENS = 512
PILOT = 3  # prompts of which the source has to answer something before the others are asked
TEXT, RETRIEVAL = "continuing text", "retrieving a number from prose"
ABILITIES = {probe.name: probe.ability for probe in PROBES}


@dataclass(frozen=True)
class ProbeResult:
    """Answers to one probe.

    Attributes:
        ability: in words.
        source, bundle: share of right answers; `bundle` is None where the source gave none in the first `PILOT`
            prompts, and no more was asked.
        loss_interval: bootstrap interval, over prompts, of `source` - `bundle`; None with one prompt.
        kept: `bundle` / `source`; None where too little was measured, or the source does too little, to judge.
        prompts, answers: how many.
        tokens: read before the question.
    """

    ability: str
    source: float
    bundle: float | None
    loss_interval: tuple[float, float] | None
    kept: float | None
    prompts: int
    answers: int
    tokens: int

    @classmethod
    def of(
        cls, ability: str, source: Sequence[Sequence[bool]], bundle: Sequence[Sequence[bool]], tokens: int, seed: int
    ) -> ProbeResult:
        """From the answers to each prompt that are right; without any of the bundle it was not asked."""
        before, answers = _shares(source), sum(map(len, source))
        share = float(before.mean())
        if not bundle:
            return cls(ability, share, None, None, None, len(source), answers, tokens)
        after = _shares(bundle)
        interval = bootstrap_mean(before - after, seed).bounds
        given = float(after.mean())
        kept = _kept(share, given, len(source))
        return cls(ability, share, given, interval, kept, len(source), answers, tokens)


def measure_probes(
    source: Decoder,
    bundle: Decoder,
    prompts: Mapping[str, Sequence[ProbePrompt]],
    seed: int,
    batch: int = 1,
    progress: bool = False,
) -> dict[str, ProbeResult]:
    """Ask source and bundle the same prompts, by probe; the bundle only where the source can answer something."""
    found = {}
    for name, asked in prompts.items():
        bars = [f"{name}, {who}" if progress else None for who in ("source", "bundle")]
        right = ask(source, asked[:PILOT], batch, bars[0])
        answered: list[list[bool]] = []
        if any(map(any, right)):
            right += ask(source, asked[PILOT:], batch, bars[0])
            answered = ask(bundle, asked, batch, bars[1])
        found[name] = ProbeResult.of(ABILITIES[name], right, answered, asked[0].read, seed)
    return found


@dataclass(frozen=True)
class Ability:
    """An ability of source and bundle.

    Attributes:
        name: in words.
        source, bundle: share of right answers.
        kept: `bundle` / `source`, or None where that cannot be judged.
        by_chance: whether a loss of none lies in the interval of the loss.
    """

    name: str
    source: float
    bundle: float | None
    kept: float | None
    by_chance: bool = False


def abilities(probes: Mapping[str, ProbeResult], retrieval: RetrievalResult | None) -> list[Ability]:
    """Retrieval and probes, as far as they were asked."""
    found = [Ability(p.ability, p.source, p.bundle, p.kept, _by_chance(p.loss_interval)) for p in probes.values()]
    if retrieval is not None and retrieval.source is not None and retrieval.bundle is not None:
        kept = _kept(retrieval.source, retrieval.bundle, retrieval.prompts)
        by_chance = _by_chance(retrieval.loss_interval)
        found.insert(0, Ability(RETRIEVAL, retrieval.source, retrieval.bundle, kept, by_chance))
    return found


def losses(found: Sequence[Ability]) -> list[str]:
    """One clause for each of which a bundle loses more than a tenth, and not by chance."""
    return [
        f"{each.name} ({each.bundle:.0%} right, the source {each.source:.0%})"
        for each in found
        if each.kept is not None and each.kept < KEPT and not each.by_chance
    ]


def verdict(
    found: Sequence[Ability], text: tuple[float, float] | None, tokens: int, vocabulary: float = math.inf
) -> str | None:
    """The sentence; None where nothing was measured.

    Args:
        found: the results of retrieval and probes.
        text: perplexities of source and bundle; None if not measured.
        tokens: scored for them.
        vocabulary: tokens that the models know; a source with a perplexity above that does worse than guessing.
    """
    kept = {each.name: each.kept for each in found}
    if text is not None:
        kept = {TEXT: text[0] / text[1] if tokens >= MIN_TOKENS and text[0] <= vocabulary else None} | kept
    fit = [name for name, share in kept.items() if share is not None and share >= KEPT]
    # Rounded down: what is lost never looks like what is kept.
    lost = {name: f"{name} (keeps {int(100 * k)}%)" for name, k in kept.items() if k is not None and k < KEPT}
    chance = {each.name for each in found if each.by_chance}
    unfit = [words for name, words in lost.items() if name not in chance]
    unclear = [words for name, words in lost.items() if name in chance]
    unknown = [name for name, share in kept.items() if share is None]
    said = [f"fit for {listed(fit)}"] if fit else []
    said += [f"not fit for {listed(unfit)}"] if unfit else []
    said += [f"unclear with so few prompts: {listed(unclear)}"] if unclear else []
    said += [f"not judged: {listed(unknown)}"] if unknown else []
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}." if said else None


def _by_chance(loss: tuple[float, float] | None) -> bool:
    return loss is not None and loss[0] <= 0


def _kept(source: float, bundle: float, prompts: int) -> float | None:
    return bundle / source if source >= MIN_SOURCE and prompts >= MIN_PROMPTS else None


def _shares(right: Sequence[Sequence[bool]]) -> torch.Tensor:
    return torch.tensor([sum(answers) / len(answers) for answers in right], dtype=torch.float64)
