"""The requests of traffic.py and vllm_serving.py, which import nothing else in common."""

from __future__ import annotations

import math
import random

SAMPLING = {"temperature": 0.8, "top_p": 0.95}


def lengths(dice: random.Random, count: int, least: int, most: int, total: int) -> list[int]:
    """Log-uniform numbers of tokens between two bounds, scaled so that they sum up to `total`."""
    drawn = [math.exp(dice.uniform(math.log(least), math.log(most))) for _ in range(count)]

    def scaled(factor: float) -> list[int]:
        return [max(least, min(most, int(length * factor))) for length in drawn]

    low, high = 0.0, most / least
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(scaled(middle)) <= total else (low, middle)
    found = scaled(low)
    for index in range(total - sum(found)):
        found[index % count] += 1
    return found


def mixed_load(seed: int, scale: int, vocabulary: int, draw: int = 0) -> list[tuple[list[int], int]]:
    """Random prompts and how many tokens each is answered with.

    Args:
        seed: the seed of lengths and tokens.
        scale: divides the number of prompts and all lengths.
        vocabulary: tokens are below.
        draw: other tokens of the same lengths, of which no prefix was seen before.
    """
    dice, count = random.Random(seed), 160 // scale
    prompts = lengths(dice, count, 128 // scale, 10_000 // scale, 366_374 // scale**2)
    answers = lengths(dice, count, 32 // scale, 360 // scale, 23_545 // scale**2)
    dice = random.Random(f"{seed} {draw}")
    return [
        (dice.choices(range(5, vocabulary), k=prompt), answer) for prompt, answer in zip(prompts, answers, strict=True)
    ]
