"""How a console's tokens are chosen, and how their text is printed while they arrive."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from kvconvert.errors import UsageError
from kvconvert.runtime import Sampling
from kvconvert.runtime.engine.text import TextStream


@dataclass(frozen=True)
class Choice:
    """How tokens are chosen. What is None is as in the model's generation_config.json; that is greedy where the file
    says nothing of sampling.

    Attributes:
        temperature: divides the logits; 0 always takes the most likely token.
        top_p: only the most likely tokens whose probabilities sum up to it may be drawn.
        top_k: only so many of the most likely tokens may be drawn; 0 allows all.
        seed: of the random numbers.
        stop: texts before which an answer ends.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k")}
        given = {name: value for name, value in given.items() if value is not None}
        Sampling(**given)  # refuses what is out of range
        if self.temperature == 0 and (len(given) > 1 or self.seed is not None):
            raise UsageError(
                "A temperature of 0 takes the most likely token and draws none; leave `top_p`, `top_k` and "
                "`seed` out, or raise the temperature."
            )
        if "" in self.stop:
            raise UsageError("`stop` is empty text, which is found everywhere; give the text that ends an answer.")

    def config(self, own: GenerationConfig) -> GenerationConfig:
        """The model's own generation config, changed by what is given (UsageError: a seed without sampling)."""
        config = copy.deepcopy(own)
        if self.temperature == 0:
            config.update(do_sample=False, temperature=None, top_p=None, top_k=None)
        else:
            given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
            given = {name: value for name, value in given.items() if value is not None}
            config.update(**given, **({"do_sample": True} if given else {}))
        if self.seed is not None and not config.do_sample:
            raise UsageError("Nothing is drawn here, so `seed` changes nothing; give a `temperature` above 0 as well.")
        return config


class Printer(BaseStreamer):
    """Prints text while its tokens arrive, and stops before a stop text.

    Attributes:
        text: everything printed.
        stopped: whether a stop text was found.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer, self._stop = tokenizer, stop
        self._stream: TextStream | None = None
        self.text, self.stopped = "", False

    def put(self, value: Tensor) -> None:
        """Take the prompt first, then token after token."""
        if self._stream is None:
            self._stream = TextStream(self._tokenizer, value.flatten().tolist(), self._stop)
            return
        for token in value.flatten().tolist():
            if not self.stopped:
                piece, self.stopped = self._stream.push(token)
                self._print(piece)

    def end(self) -> None:
        """Print what was held back, and end the line."""
        if self._stream is not None and not self.stopped:
            self._print(self._stream.finish())
        print(flush=True)

    def _print(self, piece: str) -> None:
        self.text += piece
        print(piece, end="", flush=True)


class Stopped(StoppingCriteria):
    """Ends generation once a printer has found a stop text."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Whether each sequence is finished, bool [batch]."""
        return torch.full(input_ids.shape[:1], self._printer.stopped, device=input_ids.device)
