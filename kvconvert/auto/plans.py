"""From measurements of single layers to a plan of the whole model.

The divergence of small errors adds up to first order, so that the exact allocation of the sum is where the search
begins. Where errors of several layers, or of keys and values, work together, the sum misleads. Whole plans are
therefore measured: the allocation itself, the best plans with the same choice in every layer, allocations in which
keys, values, earlier or later layers weigh more, and then, beginning at the best of them, exchanges of bytes between
two layers, those first that cost least by the sum. What is measured decides.

Every combination of a key's and a value's candidate is another variant of the attention kernels, which a machine has to
compile. So plans are made of few of them: of those in the exact allocation, one after another is dropped whose absence
costs least, as long as the sum stays within `TOLERANCE` of the least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kvconvert.auto.allocation import Option, allocate
from kvconvert.auto.layers import SearchedLayer
from kvconvert.methods.auto import Candidate

UNIFORM = 3  # plans with the same choice in every layer that are measured
TOLERANCE = 0.02  # of the least sum, given for fewer combinations of candidates
TILT = 3.0  # how much more one kind of error counts in an allocation that is tried

Pair = tuple[Candidate, Candidate]
Plan = tuple[Pair, ...]
Losses = Sequence[Mapping[str, float]]


class MeasuredPlan(NamedTuple):
    """A plan for all layers, its divergence as the sum of its parts and as measured, and how many were measured."""

    plan: Plan
    predicted: float
    measured: float
    tried: int


@dataclass(frozen=True)
class PlanSearch:
    """The choice of a plan.

    Attributes:
        layers: of the model.
        losses: by layer and candidate's name.
        budget: bytes, as costs are.
        measure: divergence of the whole model with a plan.
        repairs: how many plans may be measured after the first.
    """

    layers: Sequence[SearchedLayer]
    losses: Losses
    budget: int
    measure: Callable[[Plan], float]
    repairs: int

    def run(self) -> MeasuredPlan:
        """The best plan that was measured."""
        found: dict[Plan, float] = {}

        def measure(plan: Plan) -> float:
            if plan not in found:
                found[plan] = self.measure(plan)
            return found[plan]

        best = self._allocated(self.losses)
        measure(best)
        for plan in self._others():
            if len(found) > self.repairs:
                break
            measure(plan)
        best = min(found, key=lambda plan: (found[plan], self.predicted(plan)))
        improving = True
        while improving and len(found) <= self.repairs:
            improving = False
            for plan in self._exchanges(best):
                if len(found) > self.repairs:
                    break
                if plan not in found and measure(plan) < found[best]:
                    best, improving = plan, True
                    break
        return MeasuredPlan(best, self.predicted(best), found[best], len(found))

    def predicted(self, plan: Plan) -> float:
        """The sum of a plan's parts."""
        return sum(
            losses[key.name] + losses[value.name] for losses, (key, value) in zip(self.losses, plan, strict=True)
        )

    def cost(self, plan: Plan) -> int:
        """Bytes of a plan."""
        return sum(
            layer.costs[key.name] + layer.costs[value.name]
            for layer, (key, value) in zip(self.layers, plan, strict=True)
        )

    @cached_property
    def combinations(self) -> frozenset[Pair]:
        """Those that plans are made of, uniform ones aside."""
        best = self._best_of(self.losses, None)
        most, used = self.predicted(best) * (1 + TOLERANCE), frozenset(best)
        while len(used) > 1:
            fewer = [(self.predicted(plan), used - {pair}) for pair, plan in self._without(used)]
            if not fewer or (least := min(fewer, key=lambda entry: entry[0]))[0] > most:
                break
            used = least[1]
        return used

    def _without(self, used: frozenset[Pair]) -> Iterator[tuple[Pair, Plan]]:
        """Each combination, and the best plan that lacks it, if there is one; in an order of their own."""
        for pair in sorted(used, key=lambda pair: (pair[0].name, pair[1].name)):
            plan = self._best_of(self.losses, used - {pair})
            if plan is not None:
                yield pair, plan

    def _allocated(self, losses: Losses) -> Plan:
        return self._best_of(losses, self.combinations)

    def _best_of(self, losses: Losses, allowed: frozenset[Pair] | None) -> Plan | None:
        """The plan of smallest sum made of these combinations, or of any; None where none fits the budget."""
        pairs = [self._pairs(layer, allowed) for layer in self.layers]
        options = [
            [Option(sum(layer.costs[c.name] for c in pair), sum(own[c.name] for c in pair)) for pair in some]
            for layer, own, some in zip(self.layers, losses, pairs, strict=True)
        ]
        chosen = allocate(options, self.budget) if all(pairs) else None
        if chosen is None:
            return None
        return tuple(some[i] for some, i in zip(pairs, chosen.options, strict=True))

    @staticmethod
    def _pairs(layer: SearchedLayer, allowed: frozenset[Pair] | None) -> list[Pair]:
        return [pair for pair in layer.pairs() if allowed is None or pair in allowed]

    def _others(self) -> Iterator[Plan]:
        """Uniform plans, the best by the sum of their parts first, then tilted allocations."""
        common = [pair for pair in self.layers[0].pairs() if all(pair in layer.pairs() for layer in self.layers)]
        uniform = [(pair,) * len(self.layers) for pair in common]
        fitting = [plan for plan in uniform if self.cost(plan) <= self.budget]
        yield from sorted(fitting, key=self.predicted)[:UNIFORM]
        half = len(self.layers) // 2
        for tilted in (
            lambda number, name: name.startswith("K"),
            lambda number, name: name.startswith("V"),
            lambda number, name: number < half,
            lambda number, name: number >= half,
        ):
            yield self._allocated(
                [
                    {name: loss * (TILT if tilted(number, name) else 1) for name, loss in losses.items()}
                    for number, losses in enumerate(self.losses)
                ]
            )

    def _exchanges(self, plan: Plan) -> list[Plan]:
        """Plans in which one layer's choice differs, or two layers', the least loss by the sum first."""
        room = self.budget - self.cost(plan)
        moves = []  # (layer, pair, bytes more, loss more)
        for number, (layer, losses, now) in enumerate(zip(self.layers, self.losses, plan, strict=True)):
            for pair in self._pairs(layer, self.combinations):
                if (pair[0] == now[0]) != (pair[1] == now[1]):
                    more = sum(layer.costs[c.name] for c in pair) - sum(layer.costs[c.name] for c in now)
                    worse = sum(losses[c.name] for c in pair) - sum(losses[c.name] for c in now)
                    moves.append((number, pair, more, worse))
        ranked = [(worse, (move,)) for move in moves if move[2] <= room and (worse := move[3]) != 0]
        gains = [move for move in moves if move[3] < 0]
        savings = [move for move in moves if move[2] < 0]
        ranked += [
            (gain[3] + saving[3], (gain, saving))
            for gain in gains
            for saving in savings
            if gain[0] != saving[0] and gain[2] + saving[2] <= room
        ]
        ranked.sort(key=lambda entry: entry[0])
        plans = []
        for _, changes in ranked[: 4 * self.repairs]:
            changed = list(plan)
            for number, pair, *_ in changes:
                changed[number] = pair
            plans.append(tuple(changed))
        return plans
