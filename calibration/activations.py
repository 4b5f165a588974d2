"""Activation statistics of a decoder layer for the weight searches, gathered by hooks in one pass over the data.

Means and second moments cover every calibration token. Inputs that a search evaluates again and again are a sample
of at most `LOSS_TOKENS` tokens: evenly spaced whole sequences for attention, which mixes tokens, and else every n-th
token. So memory does not grow with the data, and the sample depends only on the number and length of sequences.

A routed expert computes only the tokens that the router selects for it, so the inputs of each expert are gathered
separately, at most `EXPERT_TOKENS` of them as a sample. An expert with fewer than `MIN_EXPERT_TOKENS` is run on
a sample of the tokens of all the layer's experts instead, as if the router had selected it for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.errors import NumericError
from kvconvert.models.structure import LayerStructure

LOSS_TOKENS = 2048  # on the reference model 1024, 2048 and 4096 tokens lead to the same KL within 2%
EXPERT_TOKENS = 512
MIN_EXPERT_TOKENS = 32  # benchmarks/RESULTS.md: with 16 tokens of its own an expert is worse, with 32 better


@dataclass
class ActivationStatistics:
    """Activations of one layer as the searches need them. Keys are names of Linears (or routers).

    Attributes:
        mean_abs: mean |x| per input channel over all tokens, [in]; one entry per distinct input, under its first
            reader.
        second_moment: E[x x^T] within each group of inputs, float32 [in / group_size, group_size, group_size]; same
            keys.
        remaining: where rounding is compensated, what a squared error of each input channel then costs, [in], same
            keys: see `Factor.remaining`. Searches take it instead of tokens and second moments.
        sequences: inputs of the attention module, [n, T, hidden].
        tokens: inputs of other modules at sampled tokens, [n, in], under the same keys as `mean_abs`.
        attention_kwargs: the attention module's other arguments for each of these sequences, as a batch of one.
        routed: number of calibration tokens that the router selected each expert for.
    """

    mean_abs: dict[str, Tensor] = field(default_factory=dict)
    second_moment: dict[str, Tensor] = field(default_factory=dict)
    remaining: dict[str, Tensor] = field(default_factory=dict)
    sequences: Tensor | None = None
    tokens: dict[str, Tensor] = field(default_factory=dict)
    attention_kwargs: tuple[dict[str, Any], ...] = ()
    routed: tuple[int, ...] = ()

    def sequence_chunks(self, tokens: int) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """`sequences` with their arguments, as many at a time as have the same ones and about `tokens` tokens."""
        for some in same_argument_chunks(self.attention_kwargs, max(1, tokens // self.sequences.shape[1])):
            yield self.sequences[some], self.attention_kwargs[some.start]


def same_argument_chunks(arguments: Sequence[dict[str, Any]], most: int) -> Iterator[slice]:
    """Neighbors that have the same arguments, `most` at a time."""
    start = 0
    for stop in range(1, len(arguments) + 1):
        same = stop < len(arguments) and same_arguments(arguments[start], arguments[stop])
        if not same or stop - start == most:
            yield slice(start, stop)
            start = stop


def same_arguments(one: Any, other: Any) -> bool:
    """Whether two arguments of a module, or dictionaries of them, hold equal tensors and equal other things."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):  # layers that share keys hand on one that is no dict
        return one.keys() == other.keys() and all(same_arguments(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_arguments, one, other))
    return not isinstance(one, Tensor) and bool(one == other)


class ActivationRecorder:
    """Gathers `ActivationStatistics` from a layer while calibration sequences run through it, in batches of any size.

    Args:
        structure: names of the layer's parts.
        num_samples, seq_len: sequences that will run through the layer, and tokens in each.
        group_size: the group size of the weights' inputs; None records no second moments, which only clips need.
        first_sample: the sequence with which this process begins.
        ranks: processes that share the sequences; all get the statistics of all.
        routed: `count_routed`, where several processes share a layer with routed experts.
    """

    def __init__(
        self,
        structure: LayerStructure,
        num_samples: int,
        seq_len: int,
        group_size: int | None,
        first_sample: int = 0,
        ranks: Ranks = ALONE,
        routed: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        self.structure, self.group_size, self.ranks = structure, group_size, ranks
        self.seq_len = seq_len
        self.num_tokens = num_samples * seq_len
        wanted = min(num_samples, max(1, LOSS_TOKENS // seq_len))
        self._wanted = {i * num_samples // wanted for i in range(wanted)}
        self._stride = -(-self.num_tokens // LOSS_TOKENS)
        self._abs: dict[str, Tensor] = {}
        self._moment: dict[str, Tensor] = {}
        self._tokens: dict[str, list[Tensor]] = {}
        self._sequences: list[Tensor] = []
        # Sequences (under "") and tokens of each point, those of earlier ranks included while data runs.
        self._seen: dict[str, int] = {"": first_sample}
        self._before = {point: first_sample * seq_len for point in input_points(structure) if not self._routes(point)}
        self._attention_kwargs: list[dict[str, Any]] = []
        self._strides: dict[str, int] = {}
        for point, (before, total) in (routed or {}).items():
            self._before[point], self._strides[point] = before, self._final_stride(point, total)
        self._routed: tuple[int, ...] = ()

    @contextmanager
    def attached(self, layer: nn.Module) -> Iterator[None]:
        """Hooks on the layer, removed on exit; before that, experts with few tokens run on a sample of the layer's."""
        with ExitStack() as hooks:
            for point in input_points(self.structure):
                handle = layer.get_submodule(point).register_forward_pre_hook(self._linear_hook(point))
                hooks.callback(handle.remove)
            attention = layer.get_submodule(self.structure.attention)
            hooks.callback(attention.register_forward_pre_hook(self._attention_hook, with_kwargs=True).remove)
            experts = self.structure.experts
            if experts is not None:
                module = layer.get_submodule(experts.module)
                hooks.callback(module.register_forward_pre_hook(self._pool_hook, with_kwargs=True).remove)
            self._seen |= self._before
            yield
            self._combine(layer)
            if experts is not None:
                self._run_rare_experts(layer)

    def _linear_hook(self, point: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().flatten(0, -2).float()
            found = [(self._abs, x.abs().sum(0))]
            if self.group_size is not None:
                groups = x.unflatten(-1, (-1, self.group_size)).transpose(0, 1)  # [groups, tokens, group_size]
                found.append((self._moment, groups.transpose(1, 2) @ groups))
            for sums, values in found:
                sums[point] = sums[point] + values.double() if point in sums else values.double()
            seen = self._seen.get(point, 0)
            self._seen[point] = seen + x.shape[0]
            if self._routes(point):
                experts = self.structure.experts
                # The other searches need no more than the moments.
                if point == experts.linears(experts.owner(point))[-1]:
                    self._sample(point, x, seen, EXPERT_TOKENS)
                return
            index = torch.arange(seen, seen + x.shape[0], device=x.device)
            # Each sequence starts one token later: a stride that divides their length would otherwise take the same
            # positions of all of them.
            kept = (index + index // self.seq_len) % self._stride == 0
            self._tokens.setdefault(point, []).append(x[kept])

        return record

    def _pool_hook(self, module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
        x = _pooled(args, kwargs)
        point = self.structure.experts.module
        self._sample(point, x, self._seen.get(point, 0), LOSS_TOKENS)
        self._seen[point] = self._seen.get(point, 0) + x.shape[0]

    def _sample(self, point: str, x: Tensor, seen: int, most: int) -> None:
        """Add to a sample of every n-th token, thinned out whenever it grows beyond `most`."""
        stride = self._strides.get(point, 1)
        kept = torch.cat([*self._tokens.get(point, []), x[(-seen) % stride :: stride]])
        while len(kept) > most:
            kept, stride = kept[::2], 2 * stride
        self._tokens[point], self._strides[point] = [kept], stride

    def _routes(self, point: str) -> bool:
        """Whether a point reads the tokens of one expert."""
        return self.structure.experts is not None and self.structure.experts.owner(point) is not None

    def _final_stride(self, point: str, total: int) -> int:
        """The stride to which `_sample` thins out that number of tokens."""
        most = LOSS_TOKENS if point == self.structure.experts.module else EXPERT_TOKENS
        stride = 1
        while -(-total // stride) > most:
            stride *= 2
        return stride

    def _combine(self, layer: nn.Module) -> None:
        """Give every rank what all have gathered."""
        ranks, points = self.ranks, input_points(self.structure)
        if ranks.size == 1:
            return
        experts = self.structure.experts
        pools = () if experts is None else (experts.module,)
        own = [self._seen.get(point, 0) - self._before[point] for point in (*points, *pools)]
        seen = zip((*points, *pools), ranks.sum_(torch.tensor(own)).tolist(), strict=True)
        self._seen = {point: count for point, count in seen if count}
        for point in points:
            if point not in self._seen:
                continue
            weight, size = layer.get_submodule(point).weight, self.group_size
            width = weight.shape[1]
            found = [(self._abs, (width,))]
            if size is not None:
                found.append((self._moment, (width // size, size, size)))
            for sums, shape in found:
                if point not in sums:  # an expert that only other ranks' tokens reach
                    sums[point] = weight.new_zeros(shape, dtype=torch.float64)
                ranks.sum_(sums[point])
        sampled = [point for point in points if not self._routes(point)]
        if experts is not None:
            sampled += [*pools, *(experts.linears(number)[-1] for number in range(experts.count))]
        for point in sampled:
            if point in self._seen:
                reader = experts.linears(0)[0] if point in pools else point
                width = layer.get_submodule(reader).weight.shape[1]
                empty = next(layer.parameters()).new_zeros(0, width)
                self._tokens[point] = [ranks.gather(torch.cat([empty, *self._tokens.get(point, [])]))]
        self._sequences = ranks.gather_list(self._sequences)
        self._attention_kwargs = ranks.gather_list(self._attention_kwargs)

    def _run_rare_experts(self, layer: nn.Module) -> None:
        experts = self.structure.experts
        self._routed = tuple(self._seen.get(experts.linears(e)[0], 0) for e in range(experts.count))
        tokens = torch.cat(self._tokens[experts.module])
        for number, count in enumerate(self._routed):
            if count < MIN_EXPERT_TOKENS:
                for name in experts.linears(number):
                    for gathered in (self._abs, self._moment, self._tokens, self._seen, self._strides):
                        gathered.pop(name, None)
                layer.get_submodule(experts.module).compute(number, tokens)

    def _attention_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = dict(kwargs)
        hidden = args[0] if args else kwargs.pop("hidden_states")
        first = self._seen.get("", 0)
        keep = [i for i in range(hidden.shape[0]) if first + i in self._wanted]
        self._sequences.append(hidden[keep].detach().float().clone())
        self._seen[""] = first + hidden.shape[0]
        self._attention_kwargs += [kwargs] * len(keep)

    def result(self) -> ActivationStatistics:
        """The gathered activations; raises NumericError where one of them is NaN or infinite."""
        for point, total in self._abs.items():
            if not total.isfinite().all():
                raise NumericError(
                    f"the input of {point} holds NaN or infinity on the calibration data; check the source model."
                )
        return ActivationStatistics(
            mean_abs={point: (total / self._seen[point]).float() for point, total in self._abs.items()},
            second_moment={point: (total / self._seen[point]).float() for point, total in self._moment.items()},
            sequences=torch.cat(self._sequences),
            tokens={point: torch.cat(parts) for point, parts in self._tokens.items()},
            attention_kwargs=tuple(self._attention_kwargs),
            routed=self._routed,
        )


def _pooled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The tokens that a layer's experts get, [n, hidden]."""
    x = (args[0] if args else kwargs["hidden_states"]).detach().float()
    return x[x.ne(0).any(-1)]  # where scores are applied before the experts, tokens that go elsewhere are zeros


def count_routed(
    layer: nn.Module, structure: LayerStructure, replay: Callable[[], None], ranks: Ranks
) -> dict[str, tuple[int, int]]:
    """Tokens that the experts together, and each expert's Linears, get from earlier ranks and from all of them.

    They decide on the tokens of each expert's sample, so that it is that of a single process.

    Args:
        layer: decoder layer, without hooks.
        structure: its names; with experts.
        replay: runs this process's data through the layer.
        ranks: that share the data.
    """
    experts = structure.experts
    points = [experts.module, *(name for number in range(experts.count) for name in experts.linears(number))]
    counts = dict.fromkeys(points, 0)

    def counter(point: str) -> Callable[..., None]:
        def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            counts[point] += len(_pooled(args, kwargs)) if point == experts.module else args[0].shape[:-1].numel()

        return add

    with ExitStack() as hooks:
        for point in points:
            module = layer.get_submodule(point)
            hooks.callback(module.register_forward_pre_hook(counter(point), with_kwargs=True).remove)
        replay()
    every = ranks.gather(torch.tensor([list(counts.values())]))
    return dict(zip(points, zip(every[: ranks.rank].sum(0).tolist(), every.sum(0).tolist(), strict=True), strict=True))


def input_points(structure: LayerStructure) -> tuple[str, ...]:
    """One module per distinct input of the layer's Linears: those of norms, and those of each expert apart."""
    points = dict.fromkeys(shared_point(structure, linear) for linear in structure.linears)
    return tuple(points | dict.fromkeys(point_of(structure, linear) for linear in structure.linears))


def point_of(structure: LayerStructure, linear: str) -> str:
    """The input point that a Linear reads: an expert's gate and up projection read the expert's own tokens."""
    number = None if structure.experts is None else structure.experts.owner(linear)
    if number is None:
        return shared_point(structure, linear)
    gate, *_, down = structure.experts.linears(number)
    return down if linear == down else gate


def shared_point(structure: LayerStructure, linear: str) -> str:
    """The first reader of the norm that a Linear reads, which gets every token; the Linear itself without a norm."""
    return next((group.readers[0] for group in structure.norm_groups if linear in group.readers), linear)
