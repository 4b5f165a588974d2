"""A decoder layer of random weights that computes in float64 while it is watched: where structure is found and proved.

The layer is the model's own class with its own configuration. A layer's function does not depend on how many experts
stand behind a router, so all experts of a layer share one expert's weights. Norms, softmax, and routers that ask for
float32 get float64 instead: what a change of weights preserves, it preserves to ten digits.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from kvconvert.calibration.attention_sample import attention_observed
from kvconvert.convert.input_capture import compute_buffers
from kvconvert.models.experts import SeparateExperts

PRESERVED = 1e-8  # largest change of an output that counts as none, relative to the largest output
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


@dataclass
class Call:
    """One call of a module.

    Attributes:
        input, output: the first tensor that it got, and gave; None where there is none.
        is_unary: the input was its only argument that is a tensor or holds some.
        is_first: the input was its only argument without a name, or is called hidden_states.
    """

    input: Tensor | None
    output: Tensor | None
    is_unary: bool
    is_first: bool


@dataclass
class Observation:
    """The record of a layer's way to `output`.

    Attributes:
        output: the output of the layer, [1, tokens, hidden].
        calls: the calls of each module, in the order of the first calls.
        attention: for each call of transformers' attention interface, the module and its query, key and value
            [1, heads, tokens, channels].
    """

    output: Tensor
    calls: dict[str, list[Call]] = field(default_factory=dict)
    attention: list[tuple[str, Tensor, Tensor, Tensor]] = field(default_factory=list)


class Experiment:
    """A layer with random weights, and random tokens for it.

    Args:
        layer: on the meta device, with separate experts; it is copied.
        owner: the model that it belongs to, which computes buffers.
        arguments: the layer's arguments besides the hidden states.
        tokens, hidden: shape of these.
    """

    def __init__(
        self, layer: nn.Module, owner: PreTrainedModel, arguments: Mapping[str, Any], tokens: int, hidden: int
    ) -> None:
        self._random = torch.Generator().manual_seed(0)
        self._owner = owner
        self.layer = copy.deepcopy(layer).eval()
        self._give_weights()
        compute_buffers(self.layer, owner, torch.device("cpu"), self._unknown_buffer)
        self.layer.double().requires_grad_(False)
        self.input = self.draw(1, tokens, hidden)
        self.arguments = _doubled(dict(arguments))
        self.observed = self.run()

    @torch.no_grad()
    def takes_batches(self) -> bool:
        """Whether sequences side by side, with the arguments of one, give what each gives by itself."""
        other = self.draw(*self.input.shape)
        try:
            both = self._compute(torch.cat([self.input, other]))
        except RuntimeError:
            return False
        expected = torch.cat([self.observed.output, self._compute(other)])
        return both.shape == expected.shape and _close_to(both, expected)

    def is_called(self, linears: Sequence[str]) -> bool:
        """Whether the layer computes, and its model initializes it, through nothing but calls of these Linears."""
        own = {name: self.layer.get_submodule(name) for name in linears}
        try:
            for name, linear in own.items():
                self.layer.set_submodule(name, _Called(linear))
            with torch.no_grad():
                self._compute(self.input)
                for module in self.layer.modules():
                    self._owner._init_weights(module)
        except AttributeError:
            return False
        finally:
            for name, linear in own.items():
                self.layer.set_submodule(name, linear)
        return True

    def draw(self, *shape: int) -> Tensor:
        """Normally distributed numbers, float64."""
        return torch.randn(shape, dtype=torch.float64, generator=self._random)

    def factors(self, count: int) -> Tensor:
        """Positive factors over several orders of magnitude, so that bounds of what lies between show."""
        return (1.5 * self.draw(count)).exp()

    def _give_weights(self) -> None:
        for experts in [module for module in self.layer.modules() if isinstance(module, SeparateExperts)]:
            first, *others = experts.experts()
            for expert in others:
                for role, linear in first.items():
                    expert[role] = linear
        made: dict[int, nn.Parameter] = {}
        for module in self.layer.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(self._weight(name, parameter), requires_grad=False)
                module._parameters[name] = made[id(parameter)]

    def _weight(self, name: str, parameter: Tensor) -> Tensor:
        if parameter.ndim == 2:  # a vector's numbers along diagonals take no room, where a matrix may take gigabytes
            vector = self.draw(sum(parameter.shape)).mul_(1.4 / math.sqrt(parameter.shape[1]))
            return vector.as_strided(parameter.shape, (1, 1))
        drawn = self.draw(*parameter.shape)
        if parameter.ndim > 2:
            return drawn.mul_(1.4 / math.sqrt(max(1, parameter[0].numel())))
        return drawn.mul_(0.3).add_(1.0 if name == "weight" else 0.1)

    def _unknown_buffer(self, name: str, buffer: Tensor) -> Tensor:
        """A buffer that only checkpoints hold."""
        return self.draw(*buffer.shape) if buffer.is_floating_point() else torch.zeros_like(buffer, device="cpu")

    def run(self, hidden: Tensor | None = None, cut: Callable[[str], bool] | None = None) -> Observation:
        """Run the layer.

        Args:
            hidden: its input; None takes `input`.
            cut: whether gradients flow no further back than to the output of this module.
        """
        seen = Observation(self.input)
        with ExitStack() as stack:
            for name, module in self.layer.named_modules():
                if name:
                    hook = _recorder(seen, name, cut is not None and cut(name))
                    stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
                    stack.enter_context(attention_observed(module, _attention_recorder(seen, name)))
            stack.enter_context(torch.set_grad_enabled(cut is not None))
            seen.output = self._compute(self.input if hidden is None else hidden)
        return seen

    def compute(self, module: nn.Module, hidden: Tensor, **arguments: Any) -> Tensor:
        """A module's output for a tensor; the first one where there are several."""
        with _float64():
            output = module(hidden.clone(), **arguments)
        return output[0] if isinstance(output, tuple) else output

    def _compute(self, hidden: Tensor) -> Tensor:
        return self.compute(self.layer, hidden, **self.arguments)

    def preserves(self, changes: Mapping[str, Tensor], compared: Mapping[str, Tensor] | None = None) -> bool:
        """Whether the layer computes the same with other values of parameters.

        Args:
            changes: these values, by name.
            compared: those that it is compared with; None stands for its own.
        """
        return _close_to(self._with(changes), self.observed.output if compared is None else self._with(compared))

    @torch.no_grad()
    def _with(self, values: Mapping[str, Tensor]) -> Tensor:
        """The layer's output with other values of parameters."""
        parameters = dict(self.layer.named_parameters())
        own = {name: parameters[name].data for name in values}
        try:
            for name, value in values.items():
                parameters[name].data = value
            return self._compute(self.input)
        finally:
            for name, value in own.items():
                parameters[name].data = value


class _Called(nn.Module):
    """A Linear without a weight, as packed ones are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.__dict__["linear"] = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def _close_to(output: Tensor, expected: Tensor) -> bool:
    return bool((output - expected).abs().max() <= PRESERVED * expected.abs().max())


def _recorder(seen: Observation, name: str, cuts: bool) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        values = (*args, *kwargs.values())
        tensors = [value for value in values if isinstance(value, Tensor)]
        holders = [value for value in values if isinstance(value, list | tuple | dict) and value]
        result = output[0] if isinstance(output, tuple) and output else output
        result = result if isinstance(result, Tensor) else None
        if cuts and result is not None and isinstance(output, Tensor):
            result = result.detach().requires_grad_()
            output = result.clone()
        # The layer may change in place what it hands on.
        first = tensors[0] if tensors else None
        if not torch.is_grad_enabled():
            first, result = (None if tensor is None else tensor.clone() for tensor in (first, result))
        is_first = len(args) == 1 or (not args and isinstance(kwargs.get("hidden_states"), Tensor))
        call = Call(first, result, len(tensors) == 1 and not holders, is_first)
        seen.calls.setdefault(name, []).append(call)
        return output

    return hook


def _attention_recorder(seen: Observation, name: str) -> Callable[[Tensor, Tensor, Tensor], None]:
    return lambda query, key, value: seen.attention.append((name, query, key, value))


class _Doubles(TorchFunctionMode):
    """Computes in float64 where float32 or less is asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        args = tuple(map(_wider, args))
        return func(*args, **{name: _wider(value) for name, value in (kwargs or {}).items()})


def _wider(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _FLOATS else value


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles():
            yield
    finally:
        torch.set_default_dtype(before)


def _doubled(value: Any) -> Any:
    """Arguments of a layer with tensors of float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(_doubled(part) for part in value)
    if type(value) is dict:
        return {key: _doubled(part) for key, part in value.items()}
    return value
