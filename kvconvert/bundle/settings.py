"""Settings in JSON files that would make a loader run code, fetch something, or read files that nobody verified.

transformers and its relatives follow such settings while they read a configuration, a tokenizer or a processor. A
bundle holds none of them: the exporter leaves them out, the reader refuses them, at any depth of any file. An entry
that is null, false or empty asks for nothing and is accepted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

# Implementations that transformers itself brings. Every other name is a kernel that it fetches and runs, those of
# flash attention included where the package is not installed.
ATTENTION = ("eager", "sdpa", "flex_attention")
EXPERTS = ("eager", "batched_mm", "grouped_mm")

_CHOICES = {
    "attn_implementation": ATTENTION,
    "_attn_implementation": ATTENTION,
    "_attn_implementation_internal": ATTENTION,
    "experts_implementation": EXPERTS,
    "_experts_implementation": EXPERTS,
    "_experts_implementation_internal": EXPERTS,
}

_FORBIDDEN = {
    # code
    "auto_map",
    "custom_generate",
    "custom_pipelines",
    "trust_remote_code",
    "use_kernels",
    "kernel_config",
    # another model or tokenizer, by path or Hub id
    "audio_tokenizer",
    "audio_tokenizer_name_or_path",
    "base_model_name_or_path",
    # files that take the place of those that were verified
    "configuration_files",
    "fast_tokenizer_files",
    "gguf_file",
    "init_inputs",
    "transformers_weights",
    # quantizers with settings of their own; the one of config.json is compared with the manifest
    "compression_config",
    "quantization_config",
}

# Model names of timm that are addresses.
_ADDRESS = re.compile(r"\s*(hf[-_]hub|local[-_]dir)\s*:", re.IGNORECASE)

# Files with tokens by name and nothing else; some are large.
_VOCABULARIES = re.compile(r"(tokenizer|vocab.*|added_tokens|tekken|model\.safetensors\.index)\.json")


def is_settings(name: str) -> bool:
    """Whether a file of a bundle, by its name there, is JSON that loaders follow."""
    return name.endswith(".json") and _VOCABULARIES.fullmatch(PurePosixPath(name).name) is None


def unsafe_settings(value: Any, at: str = "") -> Iterator[tuple[str, str, Any]]:
    """Entries that a bundle must not hold: (dotted path, what is allowed there, what was found).

    Args:
        value: a JSON value; of config.json without its own `quantization_config`.
        at: path of `value`.
    """
    if isinstance(value, dict):
        for key, entry in value.items():
            path = f"{at}.{key}" if at else key
            if (allowed := _allowed(key, entry)) is not None:
                yield path, allowed, entry
            else:
                yield from unsafe_settings(entry, path)
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from unsafe_settings(entry, f"{at}[{index}]")


def safe_settings(value: Any) -> Any:
    """A copy of a JSON value without the entries that `unsafe_settings` finds."""
    if isinstance(value, dict):
        return {key: safe_settings(entry) for key, entry in value.items() if _allowed(key, entry) is None}
    return [safe_settings(entry) for entry in value] if isinstance(value, list) else value


def _allowed(key: str, value: Any) -> str | None:
    """What an entry may be, if it is not that."""
    if key in _CHOICES:
        names = value.values() if isinstance(value, dict) else [value]
        fine = all(name is None or (isinstance(name, str) and name in _CHOICES[key]) for name in names)
        return None if fine else f"absent or one of {', '.join(_CHOICES[key])}"
    if key in _FORBIDDEN and value:
        return "absent (bundles carry no code and name no other files)"
    if key.endswith(("_file", "_files")) and any("/" in name or "\\" in name for name in _texts(value)):
        return "the name of a file in the bundle"
    if isinstance(value, str | list) and any(_ADDRESS.match(text) for text in _texts(value)):
        return "no address"
    return None


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]
