"""From what a layer does to its structure: groups that read a norm, pairs, values, what is kept, each with its proof.

Nothing here knows an architecture. Linears belong to a norm if they read its output, channel by channel in proportion;
a Linear feeds another one if gradients reach from one to the other without passing a third. Whether a scale or a
rotation may pass is not concluded from that: the layer computes with it (`Experiment.preserves`).
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvconvert.convert.discovery.experiment import Call, Experiment
from kvconvert.errors import UnsupportedModelError
from kvconvert.models.configuration import head_dim, is_latent, key_value_heads
from kvconvert.models.experts import SeparateExperts
from kvconvert.models.structure import LayerStructure, NormGroup, Projection, RoutedExperts, ScalingPair

NO_VALUES = "the layer has no keys and values"
LATENT = "latent attention makes keys and values from a shared latent vector"
SAME = "keys serve as values"
NO_VALUE_LINEAR = "no Linear makes the values alone"
GATED = "a gate weighs each channel of the values before the output projection"
STREAM = "they read the residual stream itself, which no norm precedes"
NO_WEIGHT = "the norm has no weight that could be scaled"
OTHERS_READ = "a scale of the norm changes what the layer computes"
NONLINEAR = "what lies between them is not linear in its channels"
VALUES_CHANGED = "values do not reach the output projection as they leave their own"
NORM_BETWEEN = "a norm over each head lies between the state and the output projection"
APART = "the router, without whose choice the experts cannot be compared, reads another input"
UNREACHED = "nothing that could be scaled makes their input alone"
MORE = "what reads the norm takes more than its output, so that candidates cannot be compared"
ROUTER = "the router is scaled with its norm and never quantized"
ROUTER_APART = "the router is never quantized"
SHARED_GATE = "the shared expert's gate is scaled with its norm only"
FEW = "it makes a few numbers per token, such as how fast a state forgets"
CONVOLUTION = "a short convolution over neighbouring tokens"
UNCALLED = "its weight is used otherwise than by calling it"
UNEVEN = "its outputs cannot be packed by eight"
NO_LINEAR = "its weight is not that of a Linear"
HOLDS = "it holds the experts"
FEW_OUTPUTS = 128  # at most, and a sixteenth of the inputs
_CLOSE = 1e-9
_LARGE = 100.0
_MOST_ROWS = 8  # outputs of one Linear that reach one input of the next, where a scale may pass


class Finder:
    """Finds the structure of one layer.

    Args:
        experiment: with the layer.
        config: text configuration of the layer, see `layer_config`.
        name: the name of the layer, for messages.
    """

    def __init__(self, experiment: Experiment, config: PretrainedConfig, name: str) -> None:
        self.experiment, self.config, self.name = experiment, config, name
        self.layer = experiment.layer
        self.modules = dict(self.layer.named_modules())
        self.calls = experiment.observed.calls
        self.kept: dict[str, str] = {}
        found = [(path, module) for path, module in self.modules.items() if isinstance(module, SeparateExperts)]
        if len(found) > 1:
            raise UnsupportedModelError(f"{name} has two modules of experts, {found[0][0]} and {found[1][0]}.")
        self.experts = None
        if found:
            path, module = found[0]
            self.experts = RoutedExperts(path, module.layout.num_experts, *module.roles)

    def structure(self) -> LayerStructure:
        """Names and what may be done to them."""
        attention, output = self._mixer()
        groups = self._norm_groups(attention)
        grouped = {reader for group in groups for reader in group.readers}
        pairs = self._pairs(grouped, output)
        query, key, value, fold, scaling = self._values(output, grouped, pairs)
        heads, kv_heads, channels = self._shape()
        attended = {part.linear for part in (query, key, value) if part is not None}
        self._keep_the_rest(attended, groups, attention)
        groups = tuple(group for group in groups if not self.kept.keys() >= {*group.readers})
        groups += self._others({output, *grouped, *attended, *self.kept}, pairs)
        # A scale is chosen by what rounding its reader costs.
        pairs = tuple(
            ScalingPair(pair.up, pair.down, self.kept[pair.down]) if pair.down in self.kept else pair for pair in pairs
        )
        if value is not None:
            scaling = scaling or self.kept.get(output)
        return LayerStructure(
            attention=attention,
            query=query,
            key=key,
            value=value,
            output=output,
            norm_groups=groups,
            pairs=pairs,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=channels,
            key_dim=self._key_dim(channels),
            attends_once=len(self.experiment.observed.attention) < 2,
            fold_unsupported_reason=fold,
            value_scaling_unsupported_reason=scaling,
            unquantized=self.kept,
            experts=self.experts,
            adds_to_stream=self._adds(output, pairs, groups),
        )

    # What there is.

    def _is_expert(self, name: str) -> bool:
        return self.experts is not None and self.experts.owner(name) is not None

    @cached_property
    def linears(self) -> dict[str, Call]:
        """Linears that were called, with their first call, in the order of calls."""
        return {name: calls[0] for name, calls in self.calls.items() if _is_linear(self.modules[name])}

    @cached_property
    def matrices(self) -> dict[str, Call]:
        """These, and other modules that may multiply what they read by a weight [outputs, inputs]."""
        found = {}
        for name, calls in self.calls.items():
            weight, x = getattr(self.modules[name], "weight", None), calls[0].input
            if isinstance(weight, Tensor) and weight.ndim == 2 and x is not None and x.shape[-1] == weight.shape[1]:
                found[name] = calls[0]
        return found

    def _mixer(self) -> tuple[str, str]:
        """The module that mixes tokens, and the Linear that reads what it computes."""
        called = self.experiment.observed.attention
        name = called[0][0] if called else self._found_mixer()
        place = name
        while True:
            inside = [
                linear for linear in self.linears if linear.startswith(f"{place}.") and not self._is_expert(linear)
            ]
            if inside or not place:
                break
            place = place.rpartition(".")[0]
        if not self.calls[name][0].is_first:
            raise UnsupportedModelError(f"{self.name}.{name} takes its input otherwise than as hidden_states.")
        if not inside:
            raise UnsupportedModelError(f"{self.name}.{name} has no Linear that reads what it computes.")
        return name, inside[-1]

    def _found_mixer(self) -> str:
        """The outermost module whose outputs depend on earlier tokens; where tokens do not meet, the first block."""
        changed = self.experiment.input.clone()
        changed[:, 0] += 1
        other = self.experiment.run(changed).calls
        outermost: list[str] = []
        for name in self.modules:
            if name in self.calls and name in other and not name.startswith(tuple(f"{o}." for o in outermost)):
                outermost.append(name)
        for name in outermost:
            call, changed_call = self.calls[name][0], other[name][0]
            if call.output is None or call.input is None or call.output.ndim < 3:
                continue
            same = _close(call.input[:, 1:], changed_call.input[:, 1:])
            if same and not _close(call.output[:, 1:], changed_call.output[:, 1:]):
                return name
        blocks = [name for name in outermost if any(linear.startswith(f"{name}.") for linear in self.linears)]
        if not blocks:
            raise UnsupportedModelError(f"{self.name} has no block with a Linear.")
        return blocks[0]

    def _shape(self) -> tuple[int, int, int]:
        """Query heads, KV heads, and channels of a value."""
        for _, query, _, value in self.experiment.observed.attention:
            return query.shape[1], value.shape[1], value.shape[-1]
        return self.config.num_attention_heads, key_value_heads(self.config), head_dim(self.config)

    def _key_dim(self, channels: int) -> int | None:
        """Channels of a key where it has others than a value."""
        dims = {key.shape[-1] for _, _, key, _ in self.experiment.observed.attention}
        return next((dim for dim in dims if dim != channels), None)

    # Norms and their readers.

    def _norm_groups(self, attention: str) -> tuple[NormGroup, ...]:
        groups: list[NormGroup] = []
        free = dict(self.matrices)
        for norm, calls in self.calls.items():
            weight, output = getattr(self.modules[norm], "weight", None), calls[0].output
            if not isinstance(weight, Tensor) or weight.ndim != 1 or output is None or len(calls) > 1:
                continue
            if output.shape[-1] != weight.numel():
                continue
            readers = [name for name, call in free.items() if self._reads(name, call, output)]
            if readers:
                group = self._group(norm, readers, output, attention)
                groups.append(group)
                free = {name: call for name, call in free.items() if name not in group.readers}
        groups += self._groups_without_norm(free, attention)
        order = {name: number for number, name in enumerate(self.calls)}
        return tuple(sorted(groups, key=lambda group: order.get(group.readers[0], 0)))

    def _reads(self, name: str, call: Call, output: Tensor) -> bool:
        x, output = call.input.flatten(0, -2), output.flatten(0, -2)
        if x.shape[-1] != output.shape[-1]:
            return False
        if self._is_expert(name):  # tokens that a router chose, which it may have scored
            unit, units = nn.functional.normalize(x, dim=-1), nn.functional.normalize(output, dim=-1)
            return bool(((unit @ units.T).abs().amax(-1) > 1 - _CLOSE).all())
        return x.shape == output.shape and _proportional(x, output)

    def _group(self, norm: str, readers: list[str], output: Tensor, attention: str) -> NormGroup:
        # Another norm of the same tensor gives numbers in proportion, too, which do not follow this one's weight.
        same = [name for name in readers if self._is_expert(name) or _same_numbers(self.matrices[name].input, output)]
        for chosen in (readers, same) if 0 < len(same) < len(readers) else (readers,):
            for offset in (False, True):
                if self._may_scale(norm, chosen, offset):
                    names, inspected, reason = self._readers(chosen, output, attention)
                    return NormGroup(norm, names, inspected, offset, reason)
        names, inspected, _ = self._readers(readers, output, attention)
        return NormGroup(norm, names, inspected, unsupported_reason=OTHERS_READ)

    def _readers(
        self, readers: list[str], read: Tensor, attention: str
    ) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
        """All readers, those first that get every token; the modules to be compared; why they cannot be."""
        routed = [name for name in readers if self._is_expert(name)]
        whole = [name for name in readers if name not in routed]
        if routed:
            whole.sort(key=lambda name: not self._chooses(name))
        places = [self._outermost(name, read) for name in whole]
        reason = None
        if routed:
            block = self._outermost(self.experts.module, read)
            places.append(block)
            if not whole:
                whole, reason = [block], APART
                self.kept[block] = HOLDS
        # Outputs of other widths (of a sparse indexer) cannot be added.
        inspected = tuple(name for name in dict.fromkeys(places) if self._width(name) == self._width(places[0]))
        if reason is None and not all(name == attention or self._runs_alone(name) for name in inspected):
            reason = MORE
        if routed:
            linears = [self.experts.linears(number)[:-1] for number in range(self.experts.count)]
            whole += [name for pair in linears for name in pair]
        return tuple(whole), inspected, reason

    def _width(self, name: str) -> int:
        output = self.calls[name][0].output
        return 0 if output is None else output.shape[-1]

    def _outermost(self, reader: str, read: Tensor) -> str:
        """The outermost module around a reader that reads the same."""
        parts = reader.split(".")
        for count in range(1, len(parts)):
            name = ".".join(parts[:count])
            calls = self.calls.get(name, ())
            if any(call.input is not None and _same_numbers(call.input, read) for call in calls):
                return name
        return reader

    @torch.no_grad()
    def _runs_alone(self, name: str) -> bool:
        """Whether a module computes what it computed from its input alone, of one sequence."""
        call = self.calls[name][0]
        if not call.is_unary or call.output is None:
            return False
        try:
            output = self.experiment.compute(self.modules[name], call.input.reshape(1, -1, call.input.shape[-1]))
        except TypeError:  # it takes more than tensors
            return False
        return isinstance(output, Tensor) and _same_numbers(output, call.output)

    def _may_scale(self, norm: str, readers: list[str], offset: bool) -> bool:
        module = self.modules[norm]
        scale = self.experiment.factors(module.weight.numel())
        changes = {f"{norm}.weight": (module.weight + float(offset)) / scale - float(offset)}
        if getattr(module, "bias", None) is not None:
            changes[f"{norm}.bias"] = module.bias / scale
        for name in readers:
            changes[f"{name}.weight"] = self.modules[name].weight * scale
        return self.experiment.preserves(changes)

    def _groups_without_norm(self, free: dict[str, Call], attention: str) -> list[NormGroup]:
        """Linears that read the residual stream: what reaches them from the layer's input without passing another."""
        groups = []
        for name, call in free.items():
            if self._is_expert(name) or name not in self._from_stream:
                continue
            if any(name in group.readers for group in groups):
                continue
            same = [other for other, c in free.items() if self._is_fed(other, c, call.input)]
            names, inspected, _ = self._readers(same, call.input, attention)
            norm = next((path for path in self.calls if self._is_bare_norm(path, call.input)), None)
            groups.append(NormGroup(norm, names, inspected, unsupported_reason=NO_WEIGHT if norm else STREAM))
        return groups

    def _is_fed(self, name: str, call: Call, read: Tensor) -> bool:
        """Whether a matrix reads this tensor: all of it, or an expert its share."""
        return self._reads(name, call, read) if self._is_expert(name) else _same_numbers(call.input, read)

    def _others(self, named: set[str], pairs: tuple[ScalingPair, ...]) -> tuple[NormGroup, ...]:
        """Linears that nothing else names: they are quantized, and no scale reaches their input."""
        named = named | {name for pair in pairs for name in (pair.up.linear, pair.down)}
        groups = [
            NormGroup(None, (name,), (name,), unsupported_reason=UNREACHED)
            for name in self.linears
            if name not in named and not self._is_expert(name)
        ]
        if self.experts is not None:
            linears = [self.experts.linears(number) for number in range(self.experts.count)]
            firsts = tuple(name for names in linears for name in names[:-1])
            if not named >= {*firsts}:
                self.kept[self.experts.module] = HOLDS
                readers = (self.experts.module, *firsts)
                groups.append(NormGroup(None, readers, readers[:1], unsupported_reason=UNREACHED))
            lasts = [down for *_, down in linears if down not in named]
            groups += [NormGroup(None, (down,), (down,), unsupported_reason=UNREACHED) for down in lasts]
        return tuple(groups)

    def _is_bare_norm(self, name: str, read: Tensor) -> bool:
        module, call = self.modules[name], self.calls[name][0]
        if any(True for _ in module.parameters()) or call.input is None or call.output is None:
            return False
        return _same_numbers(call.output, read) and not _same_numbers(call.input, read)

    # From Linear to Linear.

    @cached_property
    def _graph(self) -> tuple[dict[str, list[Call]], list[tuple[str, Tensor, Tensor, Tensor]], Tensor]:
        """Calls with gradients that reach back to the nearest matrices, the attention's tensors, the layer's input."""
        hidden = self.experiment.input.clone().requires_grad_()
        matrices = set(self.matrices)
        seen = self.experiment.run(hidden, cut=matrices.__contains__)
        return seen.calls, seen.attention, hidden

    @torch.enable_grad()
    def _sources(self, target: Tensor) -> dict[str, Tensor]:
        """Matrices whose outputs reach a sum over a tensor, with the sum's derivative, latest calls first."""
        calls, _, hidden = self._graph
        if not target.requires_grad:
            return {}
        leaves = {name: calls[name][-1].output for name in self.matrices if calls[name][-1].output is not None}
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        leaves[""] = hidden
        weights = self.experiment.draw(*target.shape).abs() + 0.5
        found = torch.autograd.grad((target * weights).sum(), [*leaves.values()], retain_graph=True, allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        reached = {name: grad for name, grad in pairs if grad is not None and grad.any()}
        return dict(reversed(reached.items()))

    @cached_property
    def _predecessors(self) -> dict[str, list[str]]:
        calls = self._graph[0]
        return {name: list(self._sources(calls[name][-1].input)) for name in self.matrices}

    @cached_property
    def _from_stream(self) -> set[str]:
        return {name for name, sources in self._predecessors.items() if "" in sources}

    def _pairs(self, grouped: set[str], output: str) -> tuple[ScalingPair, ...]:
        found: list[ScalingPair] = []
        for down in self.linears:
            if down in grouped or (down == output and self.experiment.observed.attention):
                continue
            pair = self._pair(down)
            if pair is None or (pair.unsupported_reason is not None and down == output):
                continue
            if self._is_expert(down):
                numbers = range(self.experts.count)
                names = [self.experts.linears(number) for number in numbers]
                role = self.experts.linears(0).index(pair.up.linear)
                found += [ScalingPair(Projection(n[role]), n[-1], pair.unsupported_reason) for n in names]
            else:
                found.append(pair)
        return tuple(sorted(found, key=lambda pair: self._is_expert(pair.down)))

    def _pair(self, down: str) -> ScalingPair | None:
        """The projection from which a scale may pass to a Linear, or the nearest one and why it may not."""
        width = self.modules[down].in_features
        ups = [name for name in self._predecessors[down] if name in self.linears]
        ups = [name for name in ups if self._is_expert(name) == self._is_expert(down)]
        x = self._graph[0][down][-1].input
        reaching = self._sources(x[..., 1])
        for up in ups:
            rows = set(reaching[up].flatten(0, -2).any(0).nonzero().flatten().tolist()) if up in reaching else set()
            if not 0 < len(rows) <= _MOST_ROWS:
                continue
            for part in _parts(up, self.modules[up].out_features, width):
                row = int(part.rows(torch.arange(self.modules[up].out_features))[1])
                if row in rows and self._may_move(part, down):
                    return ScalingPair(part, down)
        fitting = [up for up in ups if self.modules[up].out_features % width == 0]
        return ScalingPair(Projection(fitting[0]), down, NONLINEAR) if fitting else None

    def _may_move(
        self, part: Projection, down: str, reader_scale: Tensor | None = None, scale: Tensor | None = None
    ) -> bool:
        up = self.modules[part.linear]
        scale = self.experiment.factors(self.modules[down].in_features) if scale is None else scale
        changes = {f"{down}.weight": self.modules[down].weight * (scale if reader_scale is None else reader_scale)}
        for kind in ("weight", "bias"):
            own = getattr(up, kind, None)
            if own is not None:
                changed = own.clone()
                rows = part.rows(own)
                part.write(changed, rows / scale.view(-1, *[1] * (own.ndim - 1)))
                changes[f"{part.linear}.{kind}"] = changed
        return self.experiment.preserves(changes)

    # Query, key, value.

    def _values(
        self, output: str, grouped: set[str], pairs: tuple[ScalingPair, ...]
    ) -> tuple[Projection | None, Projection | None, Projection | None, str | None, str | None]:
        """Projections, and why values may be neither rotated nor scaled in the weights."""
        _, attention, _ = self._graph
        if not attention:
            moves = output in grouped or any(pair.down == output for pair in pairs)
            return None, None, None, NO_VALUES, None if moves else self._between(output)
        query, key, value = (self._projection(tensor) for tensor in attention[0][1:])
        if value is None:
            return query, key, None, NO_VALUE_LINEAR, NO_VALUE_LINEAR
        if key is not None and key == value:
            return query, key, None, SAME, SAME
        heads, kv_heads, channels = self._shape()
        rows = value.rows(torch.arange(self.modules[value.linear].out_features))
        inputs = self.modules[output].in_features
        if len(rows) != kv_heads * channels or inputs != heads * channels:
            return query, key, value, VALUES_CHANGED, VALUES_CHANGED
        repeats = heads // kv_heads
        scale = self.experiment.factors(kv_heads * channels)
        spread = scale.view(kv_heads, 1, channels).expand(kv_heads, repeats, channels).flatten()
        scales = self._may_move(value, output, spread, scale)
        turns = self._may_turn(value, output, channels)
        fold = LATENT if is_latent(self.config) else None if turns else GATED if scales else VALUES_CHANGED
        return query, key, value, fold, None if scales else VALUES_CHANGED

    def _projection(self, tensor: Tensor) -> Projection | None:
        """The rows of a Linear that make a tensor; of several Linears the one that makes most of it."""
        found = {name: grad for name, grad in self._sources(tensor).items() if name in self.linears}
        if not found:
            return None
        used = {name: grad.flatten(0, -2).any(0) for name, grad in found.items()}
        name = max(used, key=lambda name: int(used[name].sum()))
        return projection(name, used[name])

    def _may_turn(self, value: Projection, output: str, channels: int) -> bool:
        """Whether a rotation of each head's values may stand in the weights."""
        turn = torch.linalg.qr(self.experiment.draw(channels, channels)).Q
        changes = {f"{output}.weight": (self.modules[output].weight.unflatten(1, (-1, channels)) @ turn).flatten(1)}
        large = {}  # a rotation alone leaves values within most bounds that they may be clamped to
        for kind in ("weight", "bias"):
            own = getattr(self.modules[value.linear], kind, None)
            if own is not None:
                name = f"{value.linear}.{kind}"
                large[name], changes[name] = own.clone(), own.clone()
                rows = _LARGE * value.rows(own)
                value.write(large[name], rows)
                rows = rows.unflatten(0, (-1, channels))
                rows = turn.T @ rows if kind == "weight" else rows @ turn
                value.write(changes[name], rows.flatten(0, 1))
        return self.experiment.preserves(changes, large)

    def _between(self, output: str) -> str:
        """Why no scale may pass to the output projection of a layer without attention."""
        x = self.calls[output][0].input
        for name, calls in self.calls.items():
            weight, made = getattr(self.modules[name], "weight", None), calls[0].output
            if isinstance(weight, Tensor) and weight.ndim == 1 and made is not None and _same_numbers(made, x):
                return NORM_BETWEEN
        return NONLINEAR

    # What is kept.

    def _chooses(self, name: str) -> bool:
        """Whether a matrix gives each token a number for each expert."""
        return self.experts is not None and self.modules[name].weight.shape[0] == self.experts.count

    def _kept_linear(self, name: str, grouped: set[str], beside: set[str], attention: str) -> str | None:
        """Why a Linear is not quantized that chooses experts, or makes but a few numbers for each token."""
        outputs, inputs = self.modules[name].weight.shape
        if name in beside and self._chooses(name):
            return ROUTER
        if name in beside and outputs == 1:
            return SHARED_GATE
        if self._chooses(name) and not name.startswith(f"{attention}."):
            return ROUTER_APART
        if name in grouped and outputs <= FEW_OUTPUTS and 8 * outputs <= inputs:
            return FEW
        return UNEVEN if outputs % 8 else None

    def _keep_the_rest(self, attended: set[str], groups: tuple[NormGroup, ...], attention: str) -> None:
        grouped = {name for group in groups for name in group.readers}
        beside = {name for group in groups if any(map(self._is_expert, group.readers)) for name in group.readers}
        for name, module in self.modules.items():
            own = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim > 1]
            if not own or self._is_expert(name) or "norm" in type(module).__name__.lower():
                continue
            if name in self.linears:
                reason = UNEVEN if module.out_features % 8 else None
                if name not in attended:
                    reason = self._kept_linear(name, grouped, beside, attention)
            elif isinstance(module, nn.Conv1d):
                reason = CONVOLUTION
            elif _is_linear(module):
                reason = UNCALLED
            else:
                reason = ROUTER if name in beside else NO_LINEAR
            if reason is not None:
                self.kept[name] = reason
        chosen = [name for name in self.linears if name not in self.kept]
        if not self.experiment.is_called(chosen):
            uncalled = [name for name in chosen if not self.experiment.is_called([name])]
            if any(map(self._is_expert, uncalled)):
                raise UnsupportedModelError(
                    f"The model of {self.name} initializes {self.experts.module} as fused experts."
                )
            self.kept |= dict.fromkeys(uncalled, UNCALLED)

    # The residual stream.

    def _adds(self, output: str, pairs: tuple[ScalingPair, ...], groups: tuple[NormGroup, ...]) -> bool:
        """Whether the output projection and the one down projection add to the stream as they are."""
        if self.experts is not None or len(pairs) != 1 or len(groups) != 2:
            return False
        if any(group.norm is None for group in groups):
            return False
        first, second = (self.calls[group.norm][0].input for group in groups)
        added = [self.calls[name][0].output for name in (output, pairs[0].down)]
        after = self.experiment.observed.output
        if any(part is None or part.shape != first.shape for part in (second, *added, after)):
            return False
        return _close(first + added[0], second) and _close(second + added[1], after)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def projection(linear: str, rows: Tensor) -> Projection | None:
    """A Linear's projection that consists of these rows (bool [outputs]); None where they are not spread evenly."""
    if rows.all():
        return Projection(linear)
    starts = rows & ~rows.roll(1)
    starts[0] = rows[0]
    repeats = int(starts.sum())
    if repeats == 0 or len(rows) % repeats:
        return None
    period = rows.view(repeats, -1)
    if (period != period[0]).any():
        return None
    chosen = period[0].nonzero().flatten().tolist()
    blocks = [chosen[0], len(chosen), period.shape[1] - chosen[-1] - 1]
    if chosen[-1] - chosen[0] + 1 != len(chosen):
        return None
    unit = math.gcd(*blocks)
    return Projection(linear, tuple(block // unit for block in blocks if block), 1 if blocks[0] else 0, repeats=repeats)


def _parts(linear: str, outputs: int, width: int) -> list[Projection]:
    """The ways in which a Linear may hold the inputs of another: alone, block after block, or in turns."""
    if outputs == width:
        return [Projection(linear)]
    count = outputs // width
    if outputs % width or count > 4:
        return []
    order = [1, *range(count - 1, 1, -1), 0]
    return [Projection(linear, (1,) * count, index, repeats) for repeats in (1, width) for index in order]


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same rows in the same order, whatever their shapes."""
    if one.shape[-1] == 0 or one.numel() != other.numel():
        return False
    return _close(one.reshape(-1), other.reshape(-1))


def _close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= _CLOSE * other.abs().max())


def _proportional(x: Tensor, y: Tensor) -> bool:
    """Whether each channel of x [tokens, channels] is a constant times that of y."""
    factor = (x * y).sum(0) / (y * y).sum(0)
    return bool(factor.all()) and bool((x - y * factor).abs().max() <= _CLOSE * x.abs().max())
