"""What a layer's modules read in the source model, kept, beside what they read in the model quantized so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from kvconvert.convert.hidden_states import HiddenPart, HiddenStates
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.models.structure import LayerStructure

T = TypeVar("T")


@dataclass
class RunnerInputs:
    """`kvconvert.calibration.protocol.PairedInputs` of a runner's layer.

    What a writer to the residual stream reads of the quantized model's data is kept, too, and then what it computes of
    it: later runs begin there, without the attention or the MLP before it.

    Attributes:
        runner: of the model.
        index, structure: of the layer.
        quantized: its input in the model quantized so far.
        keep: puts a tensor where there is room for all tokens' inputs.
    """

    runner: LayerRunner
    index: int
    structure: LayerStructure
    quantized: HiddenStates | HiddenPart
    keep: Callable[[Tensor], Tensor]
    _kept: dict[str, list[Tensor]] = field(default_factory=dict)
    _read: dict[str, list[Tensor]] = field(default_factory=dict)  # by writers
    _written: dict[str, list[Tensor]] = field(default_factory=dict)
    _ends: dict[str, Callable[[Tensor], Any]] = field(default_factory=dict)
    _number: int = 0  # of the batch that runs

    @contextmanager
    def recording(self, layer: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Keep what these modules read, and under "" what the layer gives."""
        with ExitStack() as hooks:
            for name in filter(None, names):

                def record(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                    self._kept.setdefault(name, []).append(self.keep(args[0].detach()))

                hooks.callback(layer.get_submodule(name).register_forward_pre_hook(record).remove)

            def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
                output = output[0] if isinstance(output, tuple) else output
                self._kept.setdefault("", []).append(self.keep(output.detach()))

            hooks.callback(layer.register_forward_hook(end).remove)
            for writer in self.structure.writers:
                hooks.enter_context(self._finding_end(layer, writer))
            yield

    @contextmanager
    def _finding_end(self, layer: nn.Module, writer: str) -> Iterator[None]:
        """Find out whether what a writer computes is what the module around it gives."""
        written: list[Tensor] = []

        def write(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            written[:] = [output]

        def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if output is written[0]:
                self._ends[writer] = lambda tensor: tensor
            elif isinstance(output, tuple) and output[0] is written[0] and not any(x is not None for x in output[1:]):
                self._ends[writer] = lambda tensor, others=output[1:]: (tensor, *others)
            else:
                self._ends.pop(writer, None)
            written.clear()

        hooks = (
            layer.get_submodule(writer).register_forward_hook(write),
            layer.get_submodule(writer.rpartition(".")[0]).register_forward_hook(end),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def of(self, layer: nn.Module, kept: str, names: Sequence[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """What was kept under a name, and what modules read now, batch by batch."""
        last = names[-1]
        with self._resuming(layer):
            for found in self._counted(self.runner.inputs_of(layer, names, self.quantized, self.index)):
                if last in self._ends:
                    self._read.setdefault(last, []).append(self.keep(found[last]))
                yield self._kept[kept][self._number].to(found[last].device), found

    def outputs(self, layer: nn.Module) -> Iterator[Tensor]:
        """The input of the next layer in the quantized model, batch by batch; the layer is as `of` left it."""
        with self._resuming(layer):
            for *_, output in self._counted(self.runner.forward(layer, self.quantized, self.index)):
                yield output

    def release(self) -> None:
        """Give up what was kept of the source model."""
        self._kept.clear()

    def _counted(self, batches: Iterable[T]) -> Iterator[T]:
        self._number = 0
        for batch in batches:
            yield batch
            self._number += 1

    @contextmanager
    def _resuming(self, layer: nn.Module) -> Iterator[None]:
        """Let modules around writers whose inputs are known compute the writer alone."""
        replaced = []
        for name, batches in self._read.items():
            writer, module = layer.get_submodule(name), layer.get_submodule(name.rpartition(".")[0])
            written = self._written.setdefault(name, [])
            module.forward = partial(self._resume, writer, batches, written, self._ends[name])
            replaced.append(module)
        try:
            yield
        finally:
            for module in replaced:
                del module.forward

    def _resume(
        self,
        writer: nn.Module,
        read: list[Tensor],
        written: list[Tensor],
        end: Callable[[Tensor], Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """What the module around a writer gives for the batch that runs."""
        number, device = self._number, writer.weight.device
        if number == len(written):
            written.append(self.keep(writer(read[number].to(device))))
            read[number] = written[number]  # its memory is no longer needed
        return end(written[number].to(device))
