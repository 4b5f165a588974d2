"""Decoding steps recorded before the first token is due: kernels are compiled, and graphs made, over a pretended cache.

A recording depends on how many sequences there are and on how much work there is room for, not on what is stored. So a
short prompt is read into a cache of its own, whose sequences then claim to be long: their page tables name the same
page again and again. That takes the memory of one page per sequence and no time at any length.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from kvconvert.runtime.cache.sequence import Sequence, Side
from kvconvert.runtime.cache.store import Group

# Lengths at which steps are recorded grow by this factor; room for work doubles, and not at the same lengths for all.
FACTOR = 1.5
# Seconds after which there is a bar.
DELAY = 1.0


@torch.no_grad()
def prepare_steps(model: Any, tokens: Sequence_[int], longest: int) -> int:
    """Record the decoding steps of a batch that begins with so many tokens and ends with the longest at `longest`.

    Steps of caches that compress prompts as a whole are recorded for short prompts alone, and layers with states of
    their own not at all.

    Args:
        model: of a bundle (`runtime/hf/generation.py`), on a GPU.
        tokens: of each row's prompt, at least 1.
        longest: tokens of the longest row in the end.

    Returns:
        how many graphs were recorded.
    """
    captured, begin = model.captured, max(tokens)
    # Recordings hold at every position, and a learned embedding of positions has none beyond its last.
    last = (getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or longest + 1) - 1
    before = captured.recorded
    lengths = [begin]
    while lengths[-1] < longest:
        lengths.append(min(longest, int(lengths[-1] * FACTOR) + 1))
    cache = model.new_kv_cache()
    with tqdm(total=len(lengths) + 1, desc="Preparing decoding steps", delay=DELAY, leave=False, disable=None) as bar:
        groups = _read_short_prompt(model, cache, tokens)
        bar.update()
        one = torch.zeros(len(tokens), 1, dtype=torch.int64, device=model.device)
        for length in lengths:
            for group, sequences, logical in groups:
                _pretend(group, sequences, logical, [n + length - begin for n in tokens], length)
            if not captured.serves({"past_key_values": cache, "input_ids": one}):
                break
            model(input_ids=one, position_ids=one + min(length, last), past_key_values=cache)
            bar.update()
    return captured.recorded - before


def _read_short_prompt(model: Any, cache: Any, tokens: Sequence_[int]) -> list[tuple[Group, tuple[Sequence, ...], int]]:
    """Read a prompt of at most a page beyond all windows; each group with its sequences and positions afterwards."""
    schemes = [group.scheme for group in cache.groups]
    page = max(s.exact_tokens + s.page_size for s in schemes) + 1
    counts = [min(n, page) for n in tokens]
    width = max(counts)
    first = torch.tensor([width - n for n in counts], device=model.device)
    mask = (torch.arange(width, device=model.device) >= first[:, None]).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache.expect_whole_prompt()
    model(input_ids=torch.zeros_like(mask), attention_mask=mask, position_ids=positions, past_key_values=cache)
    return [(group, group.sequences, group.logical) for group in cache.groups]


def _pretend(group: Group, before: tuple[Sequence, ...], logical: int, tokens: list[int], longest: int) -> None:
    """Let sequences, which stood like this at position `logical`, claim to have as many pages as so many tokens fill.

    Their residual windows stay as they are, so that they may claim to have up to a page of tokens more.
    """
    size, scheme = group.page_size, group.scheme
    exact = scheme.exact_tokens
    group.logical = group.attended = longest + size
    found = []
    for row, (sequence, count) in enumerate(zip(before, tokens, strict=True)):
        more = 0
        if group.policy.flushes and not group.policy.selects and sequence.keys.pages and sequence.values.pages:
            fewest = min(len(sequence.keys.pages), len(sequence.values.pages))
            more = max(0, (count - exact) // size - fewest)
        sides = [Side(s.buffered, s.pages + s.pages[-1:] * more) for s in (sequence.keys, sequence.values)]
        end = group.logical - more * size
        moved = sequence.shift(end - logical)
        positions = moved.positions.append(end, more * size)
        pretended = replace(moved, keys=sides[0], values=sides[1], positions=positions)
        # Only what a sliding window leaves.
        found.append(group.without_outsiders(row, pretended, [], []))
    group.waiting = 0
    group.sequences = tuple(found)
    for store in group.stores:
        store.sequences = group.sequences
    group.touch()
