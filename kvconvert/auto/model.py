"""A whole model that is run with some layers' caches simulated, and its divergence from itself without them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvconvert.auto import Measurements
from kvconvert.calibration.simulated_attention import AttentionCall, attention_calls, simulated_caches
from kvconvert.data.text import TokenData
from kvconvert.errors import NumericError
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.quantizer import all_finite

# Tokens that run through the model at once, and bytes for the exact model's log-probabilities.
BATCH_TOKENS, GPU_BATCH_TOKENS = 2048, 16384
REFERENCE_BYTES, GPU_REFERENCE_BYTES = 2**30, 4 * 2**30
SCORED_AT_ONCE = 1024  # tokens whose distributions are compared at once: bounds the temporaries
SAME_MODEL = 1e-6  # divergence of a run that starts at a later layer, beyond rounding


@dataclass(frozen=True)
class ExactText:
    """The model's results on a text without any cache being quantized.

    Attributes:
        ids: int64 [rows, length].
        positions: int64 [scored], the tokens after which distributions are compared.
        log_probs: float32 [rows, scored, vocabulary]; empty where only layers' inputs are wanted.
        inputs: the inputs of each decoder layer, [rows, length, hidden], in the model's dtype.
        embeddings: what each decoder layer got as `position_embeddings`, or None.
    """

    ids: Tensor
    positions: Tensor
    log_probs: Tensor
    inputs: list[Tensor] = field(repr=False)
    embeddings: list[Any] = field(repr=False)


class SimulatedModel:
    """A causal language model whose attention is `SIMULATED_ATTENTION`.

    Args:
        model: in evaluation mode, on its device.
        layers: its decoder layers in order, or none where they are not known: every run then starts at the first.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module] = ()) -> None:
        self.model, self.layers = model, list(layers)
        self.device = model.device
        self.starts_late = False
        self._tuples = False
        self._keeps_positions = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def read(self, ids: Tensor, first: int, every: int = 1) -> ExactText:
        """Run the model as it is.

        Args:
            ids: int64 [rows, length].
            first: the first token after which distributions are compared; `length` for none.
            every: the stride between tokens after which distributions are compared.

        Raises:
            NumericError: the model computes NaN or infinity.
        """
        rows, length = ids.shape
        vocabulary = self.model.config.get_text_config().vocab_size
        wanted = rows * (length - first) * vocabulary * 4
        stride = max(every, -(-wanted // (GPU_REFERENCE_BYTES if self.device.type == "cuda" else REFERENCE_BYTES)))
        positions = torch.arange(first, length, stride, device=self.device)
        inputs: list[list[Tensor]] = [[] for _ in self.layers]
        embeddings: list[Any] = [None] * len(self.layers)
        log_probs = []
        with ExitStack() as hooks:
            for index, layer in enumerate(self.layers):
                hooks.callback(
                    layer.register_forward_pre_hook(
                        self._keeper(inputs[index], embeddings, index), with_kwargs=True
                    ).remove
                )
            if self.layers:
                hooks.callback(self.layers[0].register_forward_hook(self._note_kind).remove)
            for batch in self._batches(rows, length):
                log_probs.append(self._log_probs(ids[batch], positions))
        text = ExactText(ids, positions, torch.cat(log_probs), [torch.cat(parts) for parts in inputs], embeddings)
        if self.layers and len(positions):
            self._try_late_start(text)
        return text

    @torch.no_grad()
    def divergence(self, text: ExactText, caches: Mapping[int, LayerFormat], first: int | None = None) -> float:
        """Mean KL(exact || simulated) in nats per token with these layers' caches quantized.

        Args:
            text: from `read`.
            caches: by layer.
            first: the first layer that differs from the model as it was read; None for the first of `caches`.

        Raises:
            NumericError: the model computes NaN or infinity.
        """
        first = min(caches, default=0) if first is None else first
        return self._divergence(text, caches, first if self.starts_late else 0)

    @torch.no_grad()
    def attention_call(self, text: ExactText, layer: int) -> AttentionCall:
        """The arguments of one layer's attention, over all rows."""
        rows, length = text.ids.shape
        calls = []
        for batch in self._batches(rows, length):
            with attention_calls(layer) as found, ExitStack() as skipped:
                if self.starts_late:
                    skipped.enter_context(self._starting_at(text, layer, batch))
                    skipped.enter_context(self._skipping(self.layers[layer + 1 :], None))
                self._logits(text.ids[batch], torch.arange(1, device=self.device))
            calls.append(found[layer])
        tensors = (torch.cat([getattr(call, name) for call in calls]) for name in ("queries", "keys", "values"))
        masks = [call.mask for call in calls]
        whole = masks[0] if masks[0] is None or masks[0].shape[0] == 1 else torch.cat(masks)
        return AttentionCall(*tensors, whole, calls[0].arguments)

    def _divergence(self, text: ExactText, caches: Mapping[int, LayerFormat], first: int) -> float:
        rows, length = text.ids.shape
        total = 0.0
        for batch in self._batches(rows, length):
            with simulated_caches(caches), self._starting_at(text, first, batch):
                found = self._logits(text.ids[batch], text.positions)
            for exact, logits in zip(text.log_probs[batch], found, strict=True):
                for reference, scored in zip(exact.split(SCORED_AT_ONCE), logits.split(SCORED_AT_ONCE), strict=True):
                    difference = reference - scored.float().log_softmax(-1)
                    total += float((reference.exp() * difference).sum(dtype=torch.float64))
        if total != total:
            raise NumericError("The model computes NaN or infinity on the calibration text; check the source model.")
        return max(0.0, total / (rows * len(text.positions)))

    def _try_late_start(self, text: ExactText) -> None:
        """Layers before a quantized one compute what they did; unless the model hands more from layer to layer."""
        self.starts_late = True
        self.starts_late = self._divergence(text, {}, len(self.layers) - 1) < SAME_MODEL

    def _batches(self, rows: int, length: int) -> list[slice]:
        size = max(1, (GPU_BATCH_TOKENS if self.device.type == "cuda" else BATCH_TOKENS) // length)
        return [slice(start, start + size) for start in range(0, rows, size)]

    def _logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Logits after some tokens, [rows, positions, vocabulary]."""
        keep = {"logits_to_keep": positions} if self._keeps_positions else {}
        logits = self.model(input_ids=ids.to(self.device), use_cache=False, return_dict=True, **keep).logits
        return logits if keep else logits[:, positions]

    def _log_probs(self, ids: Tensor, positions: Tensor) -> Tensor:
        if not len(positions):
            self._logits(ids, torch.arange(1, device=self.device))
            return torch.empty(len(ids), 0, 0)
        scores = torch.stack([row.float().log_softmax(-1) for row in self._logits(ids, positions)])
        if not all_finite(scores):
            raise NumericError("The model computes NaN or infinity on the calibration text; check the source model.")
        return scores

    @staticmethod
    def _keeper(into: list[Tensor], embeddings: list[Any], index: int) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            embeddings[index] = kwargs.get("position_embeddings")
            into.append(args[0] if args else kwargs["hidden_states"])

        return keep

    def _note_kind(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._tuples = isinstance(output, tuple)

    @contextmanager
    def _starting_at(self, text: ExactText, first: int, batch: slice) -> Iterator[None]:
        """Layers before `first` are not computed; the last of them hands over what it gave on the text."""
        if not first:
            yield
            return
        with self._skipping(self.layers[:first], text.inputs[first][batch]):
            yield

    @contextmanager
    def _skipping(self, layers: Sequence[nn.Module], output: Tensor | None) -> Iterator[None]:
        """Let layers return a given output, or their input where there is none."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            hidden = output if output is not None else args[0] if args else kwargs["hidden_states"]
            return (hidden,) if self._tuples else hidden

        try:
            for layer in layers:
                layer.forward = forward
            yield
        finally:
            for layer in layers:
                layer.__dict__.pop("forward", None)


@dataclass(frozen=True)
class SearchRun:
    """The model and text that a search measures with.

    Attributes:
        model: the whole source model.
        text: held-out tokens, on which divergences are measured.
        store: where measurements are committed.
        say: shows a message.
        progress: show a bar.
    """

    model: SimulatedModel
    text: TokenData
    store: Measurements
    say: Callable[[str], None]
    progress: bool

    @property
    def dtype(self) -> str:
        """Name of the model's dtype."""
        return str(self.model.model.dtype).removeprefix("torch.")
