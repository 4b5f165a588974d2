"""Covering subsets: few configurations in which all combinations of any two (or three) values occur."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations


def covering(rows: Sequence[Mapping[str, Hashable]], strength: int = 2, first: Sequence[int] = ()) -> list[int]:
    """Indices of rows that together have every combination of `strength` values that any row has, in order.

    A combination is of values of different axes; rows may lack axes. The greedy choice, the row with most combinations
    that are still missing and of equals the first, is deterministic and within a logarithm of the smallest subset. The
    rows `first` are chosen beforehand.
    """
    have = [set(combinations(sorted(row.items(), key=lambda item: item[0]), min(strength, len(row)))) for row in rows]
    missing = set().union(*have).difference(*(have[index] for index in first))
    # Gains only shrink, so that a stale entry which still leads after an update is the best.
    queue = [(-len(own), index) for index, own in enumerate(have)]
    heapq.heapify(queue)
    chosen = list(first)
    while missing:
        _, index = heapq.heappop(queue)
        gain = len(have[index] & missing)
        if gain and queue and (-gain, index) > queue[0]:
            heapq.heappush(queue, (-gain, index))
        elif gain:
            chosen.append(index)
            missing -= have[index]
    return sorted(chosen)
