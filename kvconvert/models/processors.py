"""Processors of vision-language models, with or without torchvision.

transformers processes images through torchvision where it is installed, else through Pillow; its video processors need
torchvision. A processor of both is loaded without its video part where torchvision is missing, and then refuses videos
instead of ignoring them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, AutoTokenizer, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available, is_vision_available

from kvconvert.errors import CheckpointError, UsageError

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_VIDEO = "video_processor"


def has_processor(directory: Path) -> bool:
    """Whether a model's directory holds a processor, not only a tokenizer."""
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def load_processor(directory: Path) -> ProcessorMixin:
    """The processor of a vision-language model.

    Raises:
        UsageError: Pillow is not installed, or torchvision is not and this processor needs it.
        CheckpointError: there is no processor, or transformers cannot load it.
    """
    if not has_processor(directory):
        raise CheckpointError(
            f"{directory} has no processor ({' or '.join(PROCESSOR_FILES)}), so this model's images cannot be "
            "processed; fetch the model again."
        )
    if not is_vision_available():
        raise UsageError("Reading images needs Pillow; run pip install '.[images]' in a clone of kvconvert.")
    try:
        if is_torchvision_available():
            return AutoProcessor.from_pretrained(directory, trust_remote_code=False)
        return _load_without_torchvision(directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        if isinstance(error, ImportError):
            missing = "torchvision" if "torchvision" in reason.lower() else None
            remedy = "needs torchvision; run pip install torchvision" if missing else f"needs more packages: {reason}"
            raise UsageError(f"The processor of {directory} {remedy}.") from error
        raise CheckpointError(f"{directory} has no processor that transformers can load ({reason}).") from error


def tokenizer_of(processor: ProcessorMixin | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer of a processor, or the tokenizer itself."""
    return getattr(processor, "tokenizer", processor)


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; CheckpointError where transformers cannot load one."""
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0].rstrip('.')}"
        if not (directory / "tokenizer.json").is_file():  # transformers then lists what it tried, line by line
            reason = "there is no tokenizer.json, and no older file that sentencepiece or tiktoken, installed, convert"
        raise CheckpointError(
            f"{directory} has no tokenizer that transformers can load ({reason}); fetch the model's tokenizer again."
        ) from error


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
            raise UsageError(
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
