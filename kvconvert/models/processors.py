"""Processors of vision-language models, with or without torchvision, and prompts with images for them.

transformers processes images through torchvision where it is installed, else through Pillow; its video processors need
torchvision. A processor of both is loaded without its video part where torchvision is missing, and then refuses videos
instead of ignoring them.

Processors are tried with pictures before they are used, in a process that may take little. Settings of a processor say
how large pictures become, in how many parts, and of how many tokens, by many names and in combinations that only its
code knows. One that makes gigabytes of a small picture is refused.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import re
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name
from transformers.utils import is_torchvision_available, is_vision_available
from transformers.utils.import_utils import DummyObject

from kvconvert.errors import (
    CheckpointError,
    MissingError,
    UnsupportedModelError,
    UsageError,
    first_line,
    listed,
    printable,
    unreadable,
)
from kvconvert.io.disk import PROCESSOR_FILES
from kvconvert.io.json_text import MAX_JSON, read_json
from kvconvert.io.regular import open_regular
from kvconvert.models.configuration import placeholder_ids
from kvconvert.models.prompts import MARK, Conversations, added_around, without_marks
from kvconvert.models.templates import panics_as_errors, shared_renderer

logger = logging.getLogger(__name__)

_VIDEO = "video_processor"


def has_processor(directory: Path) -> bool:
    """Whether a model's directory holds a processor, not only a tokenizer."""
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def load_processor(directory: Path) -> ProcessorMixin:
    """The processor of a vision-language model.

    Raises:
        UsageError: Pillow is not installed, or torchvision is not and this processor needs it.
        CheckpointError: there is no processor, transformers cannot load it, or it makes too much of a picture.
    """
    if not has_processor(directory):
        raise CheckpointError(
            f"{directory} has no processor ({' or '.join(PROCESSOR_FILES)}), so this model's images cannot be "
            "processed; fetch the model again."
        )
    if not is_vision_available():
        raise MissingError("Reading images needs Pillow; run pip install '.[images]' in a clone of kvconvert.")
    check_tokenizer(directory)
    for key in _CLASSES:
        _check_class(directory, key)
    try:
        with panics_as_errors():
            if is_torchvision_available():
                processor = AutoProcessor.from_pretrained(directory, trust_remote_code=False)
            else:
                processor = _load_without_torchvision(directory)
        _check_template(processor)
        _check_template(processor.tokenizer)
    except Exception as error:  # as for tokenizers
        reason = first_line(" ".join(str(error).split()))
        if isinstance(error, ImportError):
            missing = "torchvision" if "torchvision" in str(error).lower() else None
            remedy = "needs torchvision; run pip install torchvision" if missing else f"needs more packages: {reason}"
            raise MissingError(f"The processor of {directory} {remedy}.") from error
        _check_vocabulary(directory, _named_tokenizer(directory))
        raise CheckpointError(f"{directory} has no processor that transformers can load ({reason}).") from error
    _check_vocabulary(directory, type(processor.tokenizer))
    _keep_all_merges(processor.tokenizer, directory)
    if (reason := why_refused(_encoders(processor, directory))) is not None:
        raise CheckpointError(
            f"The processor of {directory} is not applied to any picture ({reason}); use another copy of it."
        )
    return processor


def _encoders(processor: ProcessorMixin, directory: Path) -> list[Callable[[Any], Any]]:
    """What makes inputs of a picture: its processor alone, and with the text that stands for a picture if known."""
    encoders: list[Callable[[Any], Any]] = [lambda picture: processor.image_processor(picture, return_tensors="pt")]
    with suppress(UsageError, UnsupportedModelError):
        prompts = ImagePrompts(processor, AutoConfig.from_pretrained(directory, trust_remote_code=False))
        text = prompts.image  # rendered here: the process that renders answers one at a time
        encoders.append(lambda picture: prompts.encode(text, [picture]))
    return encoders


def tokenizer_of(processor: ProcessorMixin | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model (CheckpointError: transformers cannot load one; MissingError: it needs packages)."""
    check_tokenizer(directory)
    _check_class(directory, "tokenizer_class")
    try:
        with panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
            if not isinstance(tokenizer, PreTrainedTokenizerBase):  # its configuration may name any class
                raise TypeError(f"a {type(tokenizer).__name__} is none")
            _check_template(tokenizer)
            tokenizer("a")  # some settings are looked at only here
    except Exception as error:  # any value of its files may be none that its reader expects; parsers raise Exception
        reason = f"{type(error).__name__}: {first_line(error)}"
        _check_vocabulary(directory, _named_tokenizer(directory))
        if not (directory / "tokenizer.json").is_file():  # transformers then lists what it tried, line by line
            reason = "there is no tokenizer.json, and no older file that sentencepiece or tiktoken, installed, convert"
        elif isinstance(error, ImportError):
            reason = first_line(" ".join(str(error).split()))
            raise MissingError(f"The tokenizer of {directory} needs more packages: {reason}.") from error
        raise CheckpointError(
            f"{directory} has no tokenizer that transformers can load ({reason}); fetch the model's tokenizer again."
        ) from error
    _check_vocabulary(directory, type(tokenizer))
    _keep_all_merges(tokenizer, directory)
    made = getattr(tokenizer, "backend_tokenizer", None)
    if made is not None and not (directory / "tokenizer.json").is_file():
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".json") as file:
            file.write(made.to_str())
            file.flush()
            _try_tokenizer(directory, Path(file.name))
    return tokenizer


def check_tokenizer(directory: Path) -> None:
    """Refuse (CheckpointError) a tokenizer.json by which short texts take seconds, gigabytes, or many tokens.

    Files of the tokenizer that may not be read are refused by name: transformers calls them damaged or absent. So is a
    path that only Python finds, which writes it in the locale's encoding, where others do it in UTF-8.
    """
    if not str(directory).isascii() and (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise CheckpointError(
            f"{printable(str(directory))} is not found by all libraries where the locale's encoding is {encoding}; set "
            "PYTHONUTF8=1, or give the directory a name in ASCII."
        )
    try:
        os.fspath(directory).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{printable(str(directory))} has a name that is not UTF-8 text, which some libraries do not find; rename "
            "it."
        ) from error
    for file in sorted(directory.glob("*token*")):
        try:
            if file.is_file():
                file.open("rb").close()
        except OSError as error:
            raise CheckpointError(unreadable(file, error)) from error
    path = directory / "tokenizer.json"
    if path.is_file():
        _try_tokenizer(path, path.resolve())
    for path in (directory / name for name in ("tokenizer_config.json", "special_tokens_map.json")):
        if path.is_file():
            _check_special(path)
    for path in directory.glob("*tekken*.json"):
        _check_tekken(path)
    for path in (*directory.glob("*.model"), *directory.glob("*.tiktoken")):
        if path.is_file() and path.stat().st_size < MAX_JSON and _LONG_LINE.search(path.read_bytes()):
            raise CheckpointError(_TOO_LONG.format(path))


# Settings that may name any class of transformers, whose `from_pretrained` is then called, what it has to be, and files
# that state them, of which the first one counts.
_CLASSES: dict[str, type] = {"tokenizer_class": PreTrainedTokenizerBase, "processor_class": ProcessorMixin}
_STATING = (*PROCESSOR_FILES, "video_preprocessor_config.json", "tokenizer_config.json", "config.json")


def _check_class(directory: Path, key: str) -> None:
    """Refuse (CheckpointError) settings by which transformers would load something other than a tokenizer or a
    processor: a model, or a retriever, which reads and fetches what its own settings name.
    """
    name = None
    for path in (directory / name for name in _STATING if (directory / name).is_file()):
        stated = _read_object(path)
        if name is None and (name := stated.get(key)) is not None:
            found = getattr(transformers, name, None) if isinstance(name, str) else None
            # A stand-in for a class whose packages are missing, and what is no class, refuse by themselves.
            if isinstance(found, type) and not (issubclass(found, _CLASSES[key]) or isinstance(found, DummyObject)):
                raise CheckpointError(f"{path} says that {key} is {name}, which is none; fetch the file again.")


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a file of settings (CheckpointError: there is none)."""
    try:
        stated = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(path, error)) from error
    if not isinstance(stated, dict):
        raise CheckpointError(f"{path} holds no JSON object; fetch the file again.")
    return stated


def _keep_all_merges(tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Switch off what makes a tokenizer's ids differ from one time to the next: merges left out at random, for training
    alone. Every tokenization here has to be repeatable, and fingerprints are made of it.
    """
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if dropout := getattr(model, "dropout", None):
        logger.warning(
            "The tokenizer of %s leaves out merges at random (dropout %g), as for training; all are applied here.",
            printable(str(directory)),
            dropout,
        )
        model.dropout = None


# Files from which transformers makes a tokenizer of any class.
_ANY_CLASS = re.compile(r"tokenizer\.json|.*(tekken\.json|tokenizer\.model|tiktoken\.model).*|.*\.tiktoken", re.DOTALL)


def _check_vocabulary(directory: Path, kind: type | None) -> None:
    """Refuse (CheckpointError) a tokenizer without its vocabulary, where some classes make one of a few tokens.

    Args:
        directory: the model's directory.
        kind: the class of the tokenizer; None where it is not known.
    """
    files: dict[str, str] = getattr(kind, "vocab_files_names", {})
    if kind is None or not files or any(_ANY_CLASS.fullmatch(name) for name in os.listdir(directory)):
        return
    needed = [name for use, name in files.items() if use.endswith(("vocab_file", "merges_file"))] or ["tokenizer.json"]
    if missing := [name for name in needed if not (directory / name).is_file()]:
        either = "" if missing == ["tokenizer.json"] else " and no tokenizer.json"
        raise CheckpointError(
            f"{directory} has no {listed(missing, 'or')}{either}, from which {kind.__name__} is made; fetch the "
            "model's tokenizer again."
        )


def _named_tokenizer(directory: Path) -> type | None:
    """The class that a tokenizer's settings name, where transformers has it, and no stand-in for it."""
    with suppress(OSError, ValueError, ImportError):
        name = get_tokenizer_config(directory, local_files_only=True).get("tokenizer_class")
        found = tokenizer_class_from_name(name) if isinstance(name, str) else None
        return None if isinstance(found, DummyObject) else found  # whose attributes raise
    return None


# Bytes of a token as base64, which transformers cuts in two at each place; special tokens of which it makes names.
_MOST_BASE64, _MOST_SPECIAL = 2**12, 2**16
_LONG_LINE = re.compile(rb"^[A-Za-z0-9+/=]{%d}" % _MOST_BASE64, re.MULTILINE)
_TOO_LONG = "{} has a token of more than " + f"{_MOST_BASE64} letters; fetch the model's tokenizer again."


# How many special tokens there are besides those that files describe, and those that are only named, of which
# transformers compares each with all.
_COUNTS = ("extra_ids", "offset")
_NAMED_SPECIAL = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
_MOST_NAMED = 2**15


def _check_special(path: Path) -> None:
    """Refuse (CheckpointError) settings of a tokenizer that ask for far more special tokens than any model has."""
    stated = _read_object(path)
    counts = {name: value for name in _COUNTS if isinstance(value := stated.get(name), int)}
    counts |= {name: len(value) for name in _NAMED_SPECIAL if isinstance(value := stated.get(name), list | dict)}
    counts["its fields"] = len(stated)  # of which each that ends in _token is one
    for name, count in counts.items():
        if count > _MOST_NAMED:
            raise CheckpointError(
                f"{path} states {count:,} special tokens in {name}, more than {_MOST_NAMED:,}; fetch the model's "
                "tokenizer again."
            )


def _check_tekken(path: Path) -> None:
    """Refuse (CheckpointError) a vocabulary of Mistral's that takes much more time or memory than its size to read."""
    try:
        stated = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(path, error)) from error
    config, vocabulary = (stated.get(key) if isinstance(stated, dict) else None for key in ("config", "vocab"))
    special = config.get("default_num_special_tokens") if isinstance(config, dict) else None
    if isinstance(special, int) and special > _MOST_SPECIAL:
        raise CheckpointError(
            f"{path} states {special:,} special tokens, more than {_MOST_SPECIAL:,}; fetch the model's tokenizer again."
        )
    entries = vocabulary if isinstance(vocabulary, list) else []
    tokens = [entry.get("token_bytes") for entry in entries if isinstance(entry, dict)]
    if any(len(token) > _MOST_BASE64 for token in tokens if isinstance(token, str)):
        raise CheckpointError(_TOO_LONG.format(path))


# Digests of files that were tried, and not refused.
_tried: set[bytes] = set()


def _digest(path: Path) -> bytes:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def _try_tokenizer(named: Path, path: Path) -> None:
    if (digest := _digest(path)) in _tried:
        return
    if reason := shared_renderer().try_tokenizer(path):
        raise CheckpointError(f"{named} is not applied to any text ({reason}); use another copy of the tokenizer.")
    if _digest(path) == digest:
        _tried.add(digest)


def _check_template(owner: ProcessorMixin | PreTrainedTokenizerBase) -> None:
    """Refuse (TypeError) a chat template that is neither text nor several texts by name."""
    template = getattr(owner, "chat_template", None)
    texts = template.values() if isinstance(template, dict) else [template]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError(f"its chat template is {template!r:.40} and no text")


def _load_without_torchvision(directory: Path) -> ProcessorMixin:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    processor_class = PROCESSOR_MAPPING.get(type(config), None)
    if processor_class is None or _VIDEO not in processor_class.get_attributes():
        return AutoProcessor.from_pretrained(directory, trust_remote_code=False)
    bases = (_ImagesOnly, processor_class, _WithoutVideoPart)
    images_only = type(processor_class.__name__, bases, {"__doc__": processor_class.__doc__})
    return images_only.from_pretrained(directory, video_processor=None)


class _ImagesOnly:
    """Mixed into the class of a processor whose video part cannot be loaded."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return [name for name in super().get_attributes() if name != _VIDEO]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("videos") is not None:
            raise MissingError(
                "Processing videos needs torchvision, which is not installed; run pip install torchvision."
            )
        return super().__call__(*args, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        # SmolVLM's own reads settings of the video part even without a video.
        return ProcessorMixin.apply_chat_template(self, *args, **kwargs)


class _WithoutVideoPart(ProcessorMixin):
    """Between such a class and transformers' own, which does not accept None for a part."""

    def __init__(self, *args: Any, video_processor: None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


_MARK = "kvconvert-mark"


class ImagePrompts:
    """Renders conversations with images for one model.

    Args:
        processor: the model's own.
        config: the configuration of the model.
        parse_special: take special tokens that are spelled in messages for the tokens themselves, not for text.

    Attributes:
        processor: the model's own.
        visual_ids: ids of placeholder tokens of images and videos.
        templated: whether the processor has a chat template.
    """

    def __init__(self, processor: ProcessorMixin, config: PretrainedConfig, parse_special: bool = False) -> None:
        self.processor = processor
        self._conversations = Conversations(processor.tokenizer, processor, parse_special)
        try:
            self.visual_ids = placeholder_ids(config, "visual")
        except UnsupportedModelError as error:
            raise UnsupportedModelError(
                f"The config of this {config.model_type} model names no placeholder token of images, so prompts with "
                "images cannot be written for it; use its processor directly."
            ) from error
        self.templated = bool(getattr(processor, "chat_template", None))
        self._config = config

    @cached_property
    def image(self) -> str:
        """The placeholder of an image in plain text."""
        return self._image(self._config)

    def text(self, messages: Sequence[dict[str, Any]], plain: bool = False, answer: bool = False) -> str:
        """Messages as one text in which each image is a placeholder.

        Args:
            messages: in transformers' form, with parts of type "text" and "image".
            plain: concatenate the contents, without the chat template.
            answer: add the generation prompt, so that the model's answer follows.
        """
        if self.templated and not plain:
            return self._conversations.text(messages, answer)
        contents = [message["content"] for message in messages]
        contents = [[{"type": "text", "text": c}] if isinstance(c, str) else c for c in contents]
        return "\n".join(
            "".join(self.image if part["type"] == "image" else part.get("text", "") for part in parts)
            for parts in contents
        )

    def join(self, texts: Iterable[str]) -> str:
        """Texts separated by the end-of-sequence token, with which a rendered conversation may already end."""
        separator = self.processor.tokenizer.eos_token or "\n"
        *before, last = texts
        return "".join(text if text.endswith(separator) else text + separator for text in before) + last

    def encode(self, text: str, images: Sequence[Any]) -> dict[str, Tensor]:
        """Arguments of the model's forward for one text and its images."""
        tokenizer = self.processor.tokenizer
        begun = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        _, after = ([], []) if begun else added_around(tokenizer)
        try:
            inputs = self.processor(
                text=[text],
                images=[list(images)] if images else None,
                return_tensors="pt",
                add_special_tokens=not begun,
                verbose=False,  # of a text that will be cut
            )
        except Exception as error:  # any setting of a processor may be none that an image can be processed by
            reason = first_line(" ".join(str(error).split()) or type(error).__name__)
            raise UsageError(f"The model's processor refuses the text with {len(images)} images ({reason}).") from error
        # PaliGemma's processor makes labels for training as well.
        made = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and name != "labels"}
        if not all(bool(x.isfinite().all()) for x in made.values() if x.is_floating_point()):
            raise UsageError(
                f"The model's processor makes NaN or infinity of the {len(images)} images; use another copy of it."
            )
        ids = made["input_ids"]
        if after and ids[0, -len(after) :].tolist() == after:  # what follows continues the text
            made = {name: x[:, : -len(after)] if x.shape == ids.shape else x for name, x in made.items()}
        return without_marks(tokenizer, text, made) if MARK in text else made

    def visual(self, ids: Tensor) -> Tensor:
        """Which of the ids are placeholders of images or videos, bool of the same shape."""
        return torch.isin(ids, torch.tensor(self.visual_ids))

    def _image(self, config: PretrainedConfig) -> str:
        """The chat template's text for an image; without a template, the processor's token and those around it."""
        if self.templated:
            parts = [{"type": "text", "text": _MARK}]
            try:
                without = self.text([{"role": "user", "content": parts}]).partition(_MARK)[0]
                with_image = self.text([{"role": "user", "content": [{"type": "image"}, *parts]}])
            except UsageError:  # a template for text alone, with which the model can still be asked without images
                without = with_image = ""
            written = with_image.partition(_MARK)[0]
            if written.startswith(without) and len(written) > len(without):
                return written[len(without) :]
        token = getattr(self.processor, "image_token", None)
        if token is None:
            token = self.processor.tokenizer.convert_ids_to_tokens(self.visual_ids[0])
        token = getattr(token, "content", token)
        enclosing = [getattr(config, f"vision_{side}_token_id", None) for side in ("start", "end")]
        if None in enclosing:
            return token
        start, end = self.processor.tokenizer.convert_ids_to_tokens(enclosing)
        return f"{start}{token}{end}"


MEMORY = 2**31  # bytes more than this process has
SECONDS = 20  # of a processor
# Small, as large as photographs are sent, and as long as servers take.
PICTURES = ((64, 48), (1200, 1000), (1500, 30))
_FINE, _MUCH = 0, 3


def why_refused(encoders: list[Callable[[Any], Any]]) -> str | None:
    """Why pictures take too much, in words, or None.

    The trial is a fork of this process: it has the processor, and starts at once. Errors of the processor itself are no
    reason: where it is used they are said, and some processors take no picture of these sizes.

    Args:
        encoders: make a model's inputs of a picture in RGB.
    """
    from PIL import Image

    pictures = [Image.new("RGB", size, (200, 60, 20)) for size in PICTURES]
    with warnings.catch_warnings():
        # There may be threads, of which the fork has none and needs none.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        status = _MUCH
        try:
            status = _try(encoders, pictures)
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    if os.WIFSIGNALED(ended):
        late = os.WTERMSIG(ended) in (signal.SIGPROF, signal.SIGALRM)
        return f"it takes more than {SECONDS} seconds for a picture" if late else "it ends the process on a picture"
    return None if os.WEXITSTATUS(ended) == _FINE else f"it takes more than {MEMORY >> 30} GiB for a picture"


def _try(encoders: list[Callable[[Any], Any]], pictures: list[Any]) -> int:
    import torch

    torch.set_num_threads(1)  # threads of the other process are none of this one's
    with open(os.devnull, "w", encoding="ascii") as nothing:
        for stream in (1, 2):
            os.dup2(nothing.fileno(), stream)
    for kind in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(kind, signal.SIG_DFL)
    if sys.platform == "linux":  # elsewhere there is no such limit
        with open("/proc/self/statm", encoding="ascii") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 6 * SECONDS)
    for encode, picture in itertools.product(encoders, pictures):
        try:
            encode(picture)
        except Exception as error:  # of whatever kind, and raised from others
            if _is_memory(error):
                return _MUCH
    return _FINE


def _is_memory(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
