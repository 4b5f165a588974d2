"""The interface of a calibration pass.

The pipeline takes decoder layers one at a time. For each it makes a `LayerWork` and takes every pass through the same
four steps: `prepare` (changes that need no data), `observe` (hooks while calibration data runs through the layer),
`solve`, `apply`. Then it takes the `result` and commits it. A pass does not depend on files, models or the command
line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.calibration.weight_grid import WeightGrid
from kvconvert.errors import NumericError
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.awq import WeightsRecipe
from kvconvert.models.structure import LayerStructure


class PairedInputs(Protocol):
    """Inputs of a layer's modules in the source model, and in the model whose layers so far are quantized."""

    def recording(self, layer: nn.Module, names: Sequence[str]) -> AbstractContextManager[None]:
        """Keep what these modules read, and under "" what the layer gives, while the source model's data runs."""

    def of(self, layer: nn.Module, kept: str, names: Sequence[str]) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """For every batch, what was kept, and what modules read now that the quantized model's data runs.

        Args:
            layer: decoder layer. Its modules up to `names`, of which the last may be a writer to the residual stream,
                change no more afterwards.
            kept: one of the recorded names.
            names: names of modules, in the order in which they run; the layer runs as far as the last of them.

        Yields:
            float32 [n, T, channels], and by name the same.
        """


@dataclass
class LayerWork:
    """One decoder layer while the passes work on it.

    Attributes:
        name: the name of the layer in the checkpoint, for messages ("model.layers.3").
        layer: the layer in float32, the passes' own copy: they change its parameters in place.
        structure: names of its parts.
        num_samples, seq_len: calibration sequences, all of equal length; they run through the layer in order.
        first_sample: the sequence with which this process begins, where several share the sequences.
        routed: `activations.count_routed`, where several processes share a layer with routed experts.
        ranks: those processes; combines what they observed. Passes use it in `observe`, `solve` and `apply` only, and
            in the same order on every rank.
        dtype: in which the converted model's norms and biases will be stored and loaded.
        cache: how its cache will store keys and values, as far as passes have chosen; None where it stays as it is.
        replay: runs this process's calibration data once more through the layer in its current state.
        paired: the same data beside that of the quantized model, where the recipe's passes need both; else None.
        visual: which tokens stand for images, bool [num_samples, seq_len]; None where there are none.
        changing_rope: why the angles of its RoPE are not the same at all lengths, as the end of a sentence, or None.
        bits: width of each quantized Linear's weights, by its name within the layer.
        grids: the grids of Linears (names within the layer) whose weights a pass has replaced by values of these grids.
            Weights of experts may be mapped from files, so that passes write into them and never replace their memory.
    """

    name: str
    layer: nn.Module
    structure: LayerStructure
    num_samples: int
    seq_len: int
    dtype: torch.dtype
    cache: LayerFormat | None = None
    replay: Callable[[], None] | None = None
    paired: PairedInputs | None = None
    visual: Tensor | None = None
    changing_rope: str | None = None
    grids: dict[str, WeightGrid] = field(default_factory=dict)
    bits: Mapping[str, int] = field(default_factory=dict)
    first_sample: int = 0
    routed: Mapping[str, tuple[int, int]] | None = None
    ranks: Ranks = ALONE


@dataclass
class PassResult:
    """The outcome of a pass for one layer.

    Attributes:
        plan: tensors for the bundle's KV plan, by names that the methods declare (`kvconvert.methods.PLAN_TENSORS`).
        statistics: plain numbers, strings, lists and dicts of them.
        reasons: per Linear (name within the layer), what was not done to it and why.
        scheme: fields of the layer's KV scheme that the pass chose.
        notes: clauses that say what could not be calibrated and why.
    """

    plan: dict[str, Tensor] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    scheme: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerJob:
    """A recipe's job in one decoder layer of a model, resolved once.

    Attributes:
        index, name: index and name of the layer; the name is the loaded model's ("model.layers.3").
        weights: how Linears are quantized.
        scheme: the scheme of the layer's cache; None where it is left alone.
        search: what calibration chooses of it.
        structure: names of the layer's parts; None where they are unknown.
        reason: why the scheme differs from the recipe's, or "".
        heads, key_dim, value_dim: KV heads, and channels of a head's keys and values, as they are stored.
        is_latent: whether keys are latents and values RoPE parts (MLA), of which no pass knows.
        bits: width of each quantized Linear's weights, by its name within the layer.
        scorer: `calibration.kvzip.FittedScorer` of the layer, where the scheme predicts scores and it is fitted.
    """

    index: int
    name: str
    weights: WeightsRecipe
    scheme: KVScheme | None
    search: KVCalibration
    structure: LayerStructure | None
    reason: str = ""
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    is_latent: bool = False
    bits: Mapping[str, int] = field(default_factory=dict)
    scorer: Any = None


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer of a finished calibration, as far as decisions about all layers need it.

    Attributes:
        nominal: the recipe's scheme for the layer.
        scheme: what its passes made of it.
        plan: what they measured, by name.
    """

    nominal: KVScheme
    scheme: KVScheme
    plan: Mapping[str, Tensor]


class Resolution(NamedTuple):
    """Fields of a layer's scheme that are decided when every layer is measured, and what to record of it."""

    scheme: dict[str, Any]
    statistics: dict[str, Any]


class CalibrationPass:
    """One method's calibration of one layer; a new object for every layer. Every step is optional.

    Attributes:
        name: the name of the method.
        reads_sample: it evaluates candidates on `of`'s sampler's sample of the finished layer's attention.
        reads_random: it also observes the random tokens that follow the text (`LayerWork.num_samples` sequences).
    """

    name: ClassVar[str]
    reads_sample: ClassVar[bool] = False
    reads_random: ClassVar[bool] = False

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> CalibrationPass | None:
        """The pass that a job asks for, or None where it asks for none.

        Args:
            job: the job of a layer with a known structure.
            sampler: takes a sample of the layer's attention for the passes that ask for one (`reads_sample`).
        """
        return None

    @classmethod
    def resolve(cls, layers: Mapping[int, MeasuredLayer], search: KVCalibration) -> dict[int, Resolution]:
        """Decide what depends on the measurements of all layers; a pure function of the measurements."""
        return {}

    def sequences_read(self, samples: int, length: int) -> int:
        """How many of the calibration sequences of this length `solve` and `apply` read; time grows with no others."""
        return samples

    def prepare(self, work: LayerWork) -> None:
        """Change the layer's weights, but not its function, before any data runs through it."""

    def observe(self, work: LayerWork) -> AbstractContextManager[None]:
        """Hooks on the layer, in place while calibration data runs through it, removed afterwards."""
        return nullcontext()

    def solve(self, work: LayerWork) -> None:
        """Choose parameters from what was observed; changes nothing."""

    def apply(self, work: LayerWork) -> None:
        """Change the layer, or the format of its cache, by the chosen parameters."""

    def result(self) -> PassResult:
        """Return what to record."""
        return PassResult()


def significant(value: float | Tensor) -> float:
    """A measured number as statistics record it: six significant digits."""
    return float(f"{float(value):.6g}")


def require_finite(statistics: dict[str, Tensor], what: str, work: LayerWork) -> None:
    """Refuse statistics of a layer's attention that are not numbers; `what` they describe is named in the message.

    Raises:
        NumericError: NaN or infinity among them.
    """
    for name, values in statistics.items():
        if not values.isfinite().all():
            raise NumericError(
                f"The {what} of {work.name}.{work.structure.attention} hold NaN or infinity on the calibration data "
                f"({name}); check the source model's weights."
            )
