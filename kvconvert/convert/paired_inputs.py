"""What a layer's modules read in the source model, kept, beside what they read in the model quantized so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kvconvert.convert.hidden_states import HiddenPart, HiddenStates
from kvconvert.convert.layer_runner import LayerRunner


@dataclass
class RunnerInputs:
    """`kvconvert.calibration.protocol.PairedInputs` of a runner's layer.

    Attributes:
        runner: of the model.
        index: of the layer.
        quantized: its input in the model quantized so far.
        keep: puts a tensor where there is room for all tokens' inputs.
    """

    runner: LayerRunner
    index: int
    quantized: HiddenStates | HiddenPart
    keep: Callable[[Tensor], Tensor]
    _kept: dict[str, list[Tensor]] = field(default_factory=dict)

    @contextmanager
    def recording(self, layer: nn.Module, names: Sequence[str]) -> Iterator[None]:
        """Keep what these modules read."""
        with ExitStack() as hooks:
            for name in names:

                def record(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                    self._kept.setdefault(name, []).append(self.keep(args[0].detach()))

                hooks.callback(layer.get_submodule(name).register_forward_pre_hook(record).remove)
            yield

    def of(self, layer: nn.Module, names: Sequence[str]) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
        """What was kept of them, and what they read now, batch by batch."""
        batches = self.runner.inputs_of(layer, names, self.quantized, self.index)
        for number, found in enumerate(batches):
            yield {name: (self._kept[name][number].to(y.device), y) for name, y in found.items()}
