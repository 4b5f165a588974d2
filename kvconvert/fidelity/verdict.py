"""What a bundle keeps of its source's abilities, and one sentence that says what it is fit for.

The rule: a bundle is fit for what it does at least nine tenths as well as its source. Recall and probes are judged by
the share of right answers, if `MIN_PROMPTS` prompts or more were asked and the source answers a fifth or more; what
seems lost is unclear while the interval of the loss holds zero.
Continuing text is judged by the inverse of perplexity, the mean probability of the text's tokens, over `MIN_TOKENS` or
more of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvconvert.errors import listed
from kvconvert.fidelity.bootstrap import bootstrap_mean
from kvconvert.fidelity.probes import PROBES, Prompt, ask
from kvconvert.fidelity.recall import PasskeyResult
from kvconvert.fidelity.scoring import Decoder

KEPT = 0.9  # of what the source does, at least
MIN_SOURCE = 0.2
MIN_PROMPTS = 8
MIN_TOKENS = 512
PILOT = 3  # prompts of which the source has to answer something before the others are asked
TEXT, RECALL = "continuing text", "retrieving a number from prose"
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
    prompts: Mapping[str, Sequence[Prompt]],
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
    """What source and bundle can do.

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


def abilities(probes: Mapping[str, ProbeResult], passkey: PasskeyResult | None) -> list[Ability]:
    """Recall and probes, as far as they were asked."""
    found = [Ability(p.ability, p.source, p.bundle, p.kept, _by_chance(p.loss_interval)) for p in probes.values()]
    if passkey is not None and passkey.source is not None and passkey.bundle is not None:
        kept = _kept(passkey.source, passkey.bundle, passkey.prompts)
        by_chance = _by_chance(passkey.loss_interval)
        found.insert(0, Ability(RECALL, passkey.source, passkey.bundle, kept, by_chance))
    return found


def losses(found: Sequence[Ability]) -> list[str]:
    """One clause for each of which a bundle loses more than a tenth, and not by chance."""
    return [
        f"{each.name} ({each.bundle:.0%} right, the source {each.source:.0%})"
        for each in found
        if each.kept is not None and each.kept < KEPT and not each.by_chance
    ]


def verdict(found: Sequence[Ability], text: tuple[float, float] | None, tokens: int) -> str | None:
    """The sentence; None where nothing was measured.

    Args:
        found: of recall and probes.
        text: perplexities of source and bundle; None if not measured.
        tokens: scored for them.
    """
    kept = {each.name: each.kept for each in found}
    if text is not None:
        kept = {TEXT: text[0] / text[1] if tokens >= MIN_TOKENS else None} | kept
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
