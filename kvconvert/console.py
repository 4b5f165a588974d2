"""Generation on a console: how tokens are chosen, and one prompt or a conversation, printed while tokens arrive."""

from __future__ import annotations

import copy
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from kvconvert.choice import Choice
from kvconvert.data.images import read_image
from kvconvert.errors import NO_IMAGES, NO_SYSTEM, KvconvertError, UsageError, counted, first_line
from kvconvert.models import CACHE
from kvconvert.models.chat import ChatPrompts
from kvconvert.models.configuration import context_length
from kvconvert.models.devices import choose_device, compute_dtype
from kvconvert.models.processors import tokenizer_of
from kvconvert.models.prompts import encode_text
from kvconvert.models.templates import shared_renderer
from kvconvert.runtime import load
from kvconvert.runtime.engine.request import TextStream
from kvconvert.runtime.engine.sampling import check_settings
from kvconvert.runtime.hf.generation import BundleModel
from kvconvert.runtime.hf.load import generation_settings

if TYPE_CHECKING:
    from PIL.Image import Image

# Fields of generation_config.json that tokens printed as they come cannot follow.
_NOT_APPLIED = ("num_beams", "num_return_sequences", "guidance_scale", "token_healing")
# Control characters that a model may make, as a terminal shows them: it would obey them. Line breaks stay.
_CONTROLS = {n: "" if n == 13 else ascii(chr(n))[1:-1] for n in (*range(32), *range(127, 160)) if n not in (9, 10)}
IMAGE_COMMAND, RESET, BYE, HELP = "/image", "/reset", "/bye", "/help"


class Printer(BaseStreamer):
    """Prints text while its tokens arrive, and stops before a stop text; control characters reach no terminal.

    Attributes:
        text: everything printed, as the model gave it.
        stopped: whether a stop text was found, or the user ended the answer.
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
        print(piece.translate(_CONTROLS) if sys.stdout.isatty() else piece, end="", flush=True)


class Stopped(StoppingCriteria):
    """Ends generation once a printer has found a stop text; transformers' takes one that begins in the prompt."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """Whether each sequence is finished, bool [batch]."""
        return torch.full(input_ids.shape[:1], self._printer.stopped, device=input_ids.device)


class Console:
    """A loaded bundle that streams what it generates to the standard output.

    Args:
        bundle: directory, or Hub id.
        max_new_tokens: of each answer.
        device: "cpu" or "cuda"; None takes a GPU if there is one.
        dtype: "float32", "bfloat16" or "float16"; None takes the model's own on a GPU, and on a CPU what `load` does.
        choice: how tokens are chosen.
        system: message before every conversation, for models with a chat template.
        parse_special: take special tokens that are spelled in messages for the tokens themselves, not for text.
        head_bits: see `load`.
    """

    def __init__(
        self,
        bundle: str | Path,
        max_new_tokens: int,
        device: str | None = None,
        *,
        dtype: str | None = None,
        choice: Choice | None = None,
        system: str | None = None,
        parse_special: bool = False,
        head_bits: int | None = None,
    ) -> None:
        place = choose_device(device)
        shared_renderer().start()  # beside loading
        stated = None if dtype is None else compute_dtype(dtype, place, None)
        self.model: PreTrainedModel
        # On a GPU a model computes in its own dtype, on a CPU in what `load` finds best there.
        wanted = stated or ("auto" if place.type == "cuda" else None)
        self.model, processor = load(bundle, dtype=wanted, head_bits=head_bits)
        self.model.to(place)
        self.tokenizer: PreTrainedTokenizerBase = tokenizer_of(processor)
        self.prompts = ChatPrompts(processor, self.model.config, parse_special=parse_special)
        self.max_new_tokens = max_new_tokens
        self.choice = choice or Choice()
        self.system = system
        self.positions: int | None = context_length(self.model.config)
        stated = self.choice.config(self.model.generation_config).to_dict()
        settings = generation_settings(stated, self.model.config, self.tokenizer).without(_NOT_APPLIED)
        if warning := settings.warning("kvconvert generate"):
            print(f"Warning: {warning}", file=sys.stderr)
        check_settings(self.model, settings.values)
        self.generation_config = GenerationConfig(**{"num_beams": 1, "num_return_sequences": 1} | settings.values)
        if self.choice.seed is not None:
            torch.manual_seed(self.choice.seed)

    def complete(self, prompt: str, images: Iterable[Path] = (), raw: bool = False) -> None:
        """Stream the answer to a prompt, or its continuation.

        A model with a chat template is given the prompt as a message in it, after the images. Without a template, or
        with `raw`, the text is continued as it is; a vision-language model without a template gets its placeholder for
        an image before the text.

        Raises:
            UsageError: the prompt is empty or does not fit the model's positions, or the model does not support images.
            DataError: a file that is missing or no image.
        """
        opened = self._open(images)
        if opened or (self.prompts.templated and not raw):
            messages = [*self._begin(), self.prompts.message("user", prompt, len(opened))]
            inputs = self.prompts.encode(messages, opened)
        else:
            self._begin()
            inputs = {"input_ids": torch.tensor([encode_text(self.tokenizer, prompt)])}
        if isinstance(self.model, BundleModel):
            self.model.prompts.prepares = False  # no other prompt follows
        self._generate(inputs, None)

    def _begin(self) -> list[dict[str, Any]]:
        """The messages with which every conversation begins (UsageError: a system message without a template)."""
        if self.system is None:
            return []
        if not self.prompts.templated:
            raise UsageError(NO_SYSTEM)
        return [self.prompts.message("system", self.system)]

    def chat(self, lines: Iterator[str], images: Iterable[Path] = ()) -> None:
        """Answer line after line until the input ends.

        With a chat template each turn renders the whole conversation, otherwise the text simply grows. The cache of
        the previous turn is continued wherever it holds the beginning of the new text; a turn with images is processed
        from the beginning, because in some models the positions after an image depend on all images before it.

        Args:
            lines: the user's turns; `/help` says which lines are commands, `/reset` forgets all before it, `/bye` ends
                the conversation, and for a vision-language model `/image FILE` gives an image to the next turn.
            images: given to the first line.
        """
        interactive = sys.stdin.isatty()
        templated = self.prompts.templated
        messages = self._begin()
        if not templated:
            print("This tokenizer has no chat template: the conversation is plain text.", file=sys.stderr)
        image = "" if self.prompts.images is None else f", {IMAGE_COMMAND} FILE gives an image to the next line"
        commands = f"Ctrl-C ends an answer, {RESET} forgets what was said, {BYE} leaves{image}."
        if interactive:
            print(commands, file=sys.stderr)
        waiting, shown = self._open(images), []
        sequence = torch.empty(1, 0, dtype=torch.long)
        cache: Any = None
        while True:
            line = next(lines, BYE).strip()
            if line == BYE:
                return
            if line == RESET:
                messages, waiting, shown = self._begin(), [], []
                sequence, cache = sequence[:, :0], None
                continue
            names_image = line.split(maxsplit=1)[:1] == [IMAGE_COMMAND]
            if names_image and self.prompts.images is not None:
                waiting += self._named(line, interactive)
                continue
            if names_image or re.fullmatch(r"/[a-z]+", line):
                unknown = "This model reads no images. " if names_image else f"There is no command {line}. "
                unknown = "" if line == HELP else unknown
                print(f"{unknown}{commands}", file=sys.stderr)
                continue
            if not line:
                continue
            messages.append(self.prompts.message("user", line, len(waiting)))
            shown += waiting
            if self.prompts.images is None and not templated:
                inputs = {"input_ids": self._append(sequence, line)}
            else:
                inputs = self.prompts.encode(messages, shown)
            ids = inputs["input_ids"]
            if cache is not None and (waiting or not _continues(ids, sequence, cache.get_seq_length())):
                cache = None
            # The images are already in the cache that is continued.
            sequence, cache, answer = self._generate(inputs if cache is None else {"input_ids": ids}, cache, True)
            waiting = []
            messages.append(self.prompts.message("assistant", answer))

    def _open(self, images: Iterable[Path]) -> list[Image]:
        images = list(images)
        if images and self.prompts.images is None:
            raise UsageError(NO_IMAGES)
        return [read_image(path, None, "`images`") for path in images]

    def _named(self, line: str, interactive: bool) -> list[Image]:
        """The image that a line names; on a terminal a mistake costs only a message."""
        try:
            if line == IMAGE_COMMAND:
                raise UsageError(f"{IMAGE_COMMAND} needs the path of an image.")
            return [read_image(line.split(maxsplit=1)[1], None, IMAGE_COMMAND)]
        except KvconvertError as error:
            if not interactive:
                raise
            print(f"Error: {error}", file=sys.stderr)
            return []

    def _append(self, sequence: Tensor, line: str) -> Tensor:
        if sequence.shape[1] == 0:
            return torch.tensor([encode_text(self.tokenizer, line)])
        added = self.tokenizer("\n" + line, return_tensors="pt", add_special_tokens=False).input_ids
        return torch.cat([sequence, added], dim=1)

    def _generate(self, inputs: dict[str, Tensor], cache: Any, interruptible: bool = False) -> tuple[Tensor, Any, str]:
        """Stream a continuation of ids [1, T], which Ctrl-C ends if it is `interruptible`; returns the whole sequence,
        the cache, which lacks its end, and the text that was printed.
        """
        count, length = self.max_new_tokens, inputs["input_ids"].shape[1]
        if not length:
            raise UsageError("The model's chat template writes nothing of the conversation; see `raw`.")
        if self.positions is not None:
            if length >= self.positions:
                raise UsageError(
                    f"The text has {counted(length, 'token')}, but this model has {self.positions:,} "
                    "positions; give a shorter one."
                )
            count = min(count, self.positions - length)
        device, dtype = self.model.device, self.model.dtype
        inputs = {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in inputs.items()}
        ids = inputs.pop("input_ids")
        vocabulary = self.model.config.get_text_config(decoder=True).vocab_size
        if self.prompts.images is None and int(ids.max()) >= vocabulary:
            raise UsageError(
                f"The tokenizer gives the token {int(ids.max())}, and the model's ids are 0 to {vocabulary - 1}; leave "
                "out what it stands for, or fetch the tokenizer that belongs to the model."
            )
        printer = Printer(self.tokenizer, self.choice.stop)
        config = copy.deepcopy(self.generation_config)
        padding = config.pad_token_id
        padding = self.tokenizer.eos_token_id if padding is None else padding
        config.update(max_new_tokens=count, pad_token_id=padding, return_dict_in_generate=True)
        seen = any(x.is_floating_point() for x in inputs.values())
        try:
            with _without_warnings(), _interrupting(printer) if interruptible else nullcontext():
                result = self.model.generate(
                    ids,
                    **inputs | {"attention_mask": torch.ones_like(ids)},
                    generation_config=config,
                    **{CACHE: cache},
                    streamer=printer,
                    tokenizer=self.tokenizer,  # for the stop strings of a generation config
                    **({"stopping_criteria": [Stopped(printer)]} if self.choice.stop or interruptible else {}),
                )
            if count < self.max_new_tokens and result.sequences.shape[1] == self.positions:
                print(f"\n(The model's {self.positions:,} positions are full.)", file=sys.stderr)
        except ValueError as error:
            if not seen:
                raise
            raise UsageError(
                f"The model refuses what its processor made of images ({first_line(error)}); fetch the bundle again."
            ) from error
        return result.sequences.cpu(), result[CACHE], printer.text


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Keep transformers' warnings out of text that is printed token by token."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def _interrupting(printer: Printer) -> Iterator[None]:
    """Let Ctrl-C end an answer after its next token; what was generated stays in the cache. A second one ends all."""

    def end(signum: int, frame: object) -> None:
        printer.stopped = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _continues(ids: Tensor, sequence: Tensor, cached: int) -> bool:
    """Whether the cached beginning of `sequence` is also the beginning of `ids`, with something left to compute."""
    return ids.shape[1] > cached and torch.equal(ids[:, :cached], sequence[:, :cached])
