"""GGUF files, the form in which llama.cpp keeps models, read through transformers' own conversion.

transformers turns a file's metadata into a configuration and a tokenizer, and its tensors into those of its own model:
it renames them, undoes llama.cpp's order of the rows of queries and keys, and joins experts. Its loader does that for a
whole file at once; here the same functions are called for the tensors that are wanted, which are dequantized by the
`gguf` package. Files of the model beside the GGUF file (config.json, tokenizer.json, ...) take precedence over what the
metadata says.

The header is walked before the package `gguf` reads it, which trusts every count and every length.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import mmap
import os
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvconvert.errors import CheckpointError, MissingError, UnsupportedModelError, first_line, printable, unreadable
from kvconvert.io.json_text import read_json
from kvconvert.io.records import MAX_LAYERS, TensorInfo
from kvconvert.io.regular import open_regular
from kvconvert.io.tensorfile import DTYPE_NAMES
from kvconvert.models.configuration import bounded_modules, check_values, make_config, model_class
from kvconvert.models.formats.format import Encoded
from kvconvert.models.weight_files import check_links

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
# Factors of llama3's scaled RoPE, which transformers keeps in the configuration and does not read from a GGUF file.
_ROPE_FACTORS = "rope_freqs.weight"
# Numbers that the metadata may state, of which transformers reads some for each architecture, and what is in the names
# of those in its configurations.
_STATED = {
    ".rope.freq_base": "theta",
    ".rope.scaling.factor": "factor",
    ".rope.scale_linear": "factor",
    ".attention.sliding_window": "sliding_window",
    ".attn_logit_softcapping": "attn_logit_softcapping",
    ".final_logit_softcapping": "final_logit_softcapping",
    ".attention.layer_norm_epsilon": "eps",
    ".attention.layer_norm_rms_epsilon": "eps",
}
# Blocks of the models whose query_pre_attn_scalar is hidden_size / num_attention_heads, which no field says.
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3_text": 62}
_MOST = {".block_count": MAX_LAYERS, ".expert_count": 2**12}
# Names in `tokenizer.ggml.pre` of models that split texts as GPT-2 does.
_GPT2_SPLITS = {"gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "modern-bert", "exaone4"}
# Kinds of tokens that are matched whole: control tokens, and those of the user.
_CONTROL, _ADDED = 3, (3, 4)
_BESIDE = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.*",
    "LICENSE*",
    "README.md",
)


@dataclass(frozen=True)
class GgufFile:
    """An opened file.

    Attributes:
        directory: temporary, holds config.json and the tokenizer; it is removed with this object.
        config: transformers' configuration.
        weight_map: the file's name, by its own names of the tensors.
        encoded: tensors of transformers' model, by its names, made from those of the file.
        stored_as: types of the stored weights in a few words.
        read: gives tensors of the file by its own names, dequantized to float32.
    """

    directory: Path
    config: PretrainedConfig
    weight_map: dict[str, str]
    encoded: dict[str, Encoded]
    stored_as: str
    read: Callable[[Path, list[str]], dict[str, Tensor]]
    temporary: Any = field(repr=False)


def find_gguf(model: Path) -> Path | None:
    """The GGUF file that a path names: the file itself, or the only one in a directory without other weights.

    Raises:
        CheckpointError: a directory with several.
    """
    if model.suffix == SUFFIX and os.path.isfile(model):
        return model
    if not os.path.isdir(model) or any(model.glob("*.safetensors")):
        return None
    found = sorted(file for file in model.glob(f"*{SUFFIX}") if file.is_file())
    if len(found) > 1:
        raise CheckpointError(
            f"{model} holds {len(found)} GGUF files; give the path of one of them ({found[0]} for example), "
            "and merge a model that is split into several (llama-gguf-split --merge)."
        )
    return found[0] if found else None


def open_gguf(file: Path) -> GgufFile:
    """Read a file's metadata, and plan how its tensors become those of transformers' model.

    Raises:
        UsageError: the package `gguf` is not installed.
        CheckpointError: the file is damaged, or holds tensors of an unknown type.
        UnsupportedModelError: transformers does not read this architecture from GGUF files.
    """
    try:
        import gguf
        from transformers import modeling_gguf_pytorch_utils as conversion
    except ImportError as error:
        raise MissingError(
            f"Reading {file} needs the package gguf; run pip install '.[gguf]' in a clone of kvconvert."
        ) from error
    try:
        check_header(file)
        reader = gguf.GGUFReader(file)
        _check_places(reader)
    except OSError as error:
        raise CheckpointError(unreadable(file, error)) from error
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:
        raise CheckpointError(f"{file} is no GGUF file, or damaged ({first_line(error)}); fetch it again.") from error
    stored = {tensor.name: tensor for tensor in reader.tensors}
    architecture = _field(reader, conversion, "general.architecture", "unknown")
    # transformers reads the counts of any architecture that it knows.
    for name in reader.fields:
        most = _MOST.get(name[name.rfind(".") :])
        claim = "" if most is None else _field(reader, conversion, name, "")
        if most is not None and claim.isdecimal() and int(claim) > most:
            raise CheckpointError(
                f"{file} claims that {printable(name)[:80]} is {claim}, more than {most}; fetch it again."
            )
    found = [path for path in sorted(file.parent.iterdir()) if any(map(path.match, _BESIDE))]
    beside = [path for path in found if path.is_file()]
    if (other := next((path for path in found if path.suffix and path not in beside), None)) is not None:
        raise CheckpointError(f"{other} is no file, nor a link to one; remove it, or fetch the model again.")
    if _ROPE_FACTORS in stored and not any(path.name == "config.json" for path in beside):
        raise UnsupportedModelError(
            f"{file} holds factors of a scaled RoPE ({_ROPE_FACTORS}), which transformers does not read from GGUF "
            "files; put the config.json of the original model beside it."
        )
    check_links(file.parent, beside)
    temporary = tempfile.TemporaryDirectory(prefix="kvconvert-gguf-")
    directory = Path(temporary.name)
    for path in beside:
        shutil.copyfile(path, directory / path.name)
    try:
        with _read_once(gguf, reader):
            config = _config(file, directory, _dtype(gguf, stored))
            if not (directory / "config.json").exists():
                _check_stated(file, reader, conversion, config)
            with torch.device("meta"), bounded_modules(len(stored), _refusal):
                model = model_class(config).from_config(deepcopy(config), dtype=torch.float32, trust_remote_code=False)
            config.architectures = [type(model).__name__]
            if not (directory / "tokenizer_config.json").exists():
                if "tokenizer.ggml.tokens" not in reader.fields:
                    raise CheckpointError(
                        f"{file} holds no tokenizer; put the model's tokenizer.json and tokenizer_config.json "
                        "beside it."
                    )
                tokens = conversion.read_field(reader, "tokenizer.ggml.tokens")
                if (twice := next((token for token, count in Counter(tokens).items() if count > 1), None)) is not None:
                    raise CheckpointError(f"{file} lists the token {twice!r:.80} more than once; fetch it again.")
                kinds, scores = (conversion.read_field(reader, f"tokenizer.ggml.{n}") for n in ("token_type", "scores"))
                for name, values in (("kinds", kinds), ("scores", scores)):
                    if len(values) not in (0, len(tokens)) or not all(map(math.isfinite, values)):
                        raise CheckpointError(
                            f"{file} has {len(tokens):,} tokens and not as many finite {name}; fetch it again."
                        )
                begins = conversion.read_field(reader, "tokenizer.ggml.add_space_prefix") != [False]
                _write_tokenizer(file, directory, config, (tokens, kinds), begins)
                _warn_of_splits(file, directory, conversion.read_field(reader, "tokenizer.ggml.pre"))
            config.to_json_file(directory / "config.json", use_diff=False)
            kind = conversion.TENSOR_PROCESSORS.get(architecture, conversion.TensorProcessor)
            processor = kind(config=config.to_dict())
            names = conversion.get_gguf_hf_weights_map(model, processor)
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # any value of the metadata may be missing, or be none that its reader expects
        raise UnsupportedModelError(
            f"transformers cannot read {file}, a GGUF file of architecture {architecture} ({first_line(error)}); "
            "convert the safetensors checkpoint that it was made from."
        ) from error
    encoded = _plan(model, stored, names, processor, config.dtype)
    missing = sorted(name for name in stored if not _is_read(name, names) and name != _ROPE_FACTORS)
    if missing:
        raise UnsupportedModelError(
            f"transformers has no place for {printable(missing[0])[:80]} of {file}, a GGUF file of architecture "
            f"{architecture}; "
            "convert the safetensors checkpoint that it was made from."
        )

    def read(path: Path, wanted: list[str]) -> dict[str, Tensor]:
        try:
            values = {name: gguf.dequantize(stored[name].data, stored[name].tensor_type) for name in wanted}
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{path} holds weights that cannot be read ({first_line(error)}).") from error
        # What needs no dequantizing is a read-only view of the file.
        return {name: torch.from_numpy(np.require(value, np.float32, "CW")) for name, value in values.items()}

    kinds = sorted({tensor.tensor_type.name for tensor in stored.values()})
    stored_as = f"GGUF ({', '.join(kinds)})"
    return GgufFile(directory, config, dict.fromkeys(stored, file.name), encoded, stored_as, read, temporary)


@contextmanager
def _read_once(gguf: Any, reader: Any) -> Iterator[None]:
    """Have transformers take the file as it was read, and make each map of tensors' names once, within the block.

    By itself it reads the file for the configuration and again for the tokenizer, ten seconds each with the largest
    vocabularies, and makes the map of the whole model for each of its modules, two minutes at 80 layers.
    """
    made = {"GGUFReader": gguf.GGUFReader, "get_tensor_name_map": gguf.get_tensor_name_map}
    gguf.GGUFReader, gguf.get_tensor_name_map = lambda path: reader, cache(gguf.get_tensor_name_map)
    try:
        yield
    finally:
        vars(gguf).update(made)


def _check_places(reader: Any) -> None:
    """Refuse (ValueError) tensors whose bytes begin within the header, or are those of another one."""
    end = reader.data_offset
    for tensor in sorted(reader.tensors, key=lambda tensor: (int(tensor.data_offset), int(tensor.n_bytes))):
        if tensor.data_offset < end:
            raise ValueError(f"{printable(tensor.name)[:80]} begins before what lies in front of it ends")
        end = int(tensor.data_offset) + int(tensor.n_bytes)


def _field(reader: Any, conversion: Any, name: str, default: str) -> str:
    """The first value of the metadata under a name, as text that fits in a message."""
    try:
        found = conversion.read_field(reader, name)
    except (IndexError, ValueError, TypeError, AttributeError):  # of another type than its reader expects
        found = []
    return printable(str(found[0]))[:80] if found else default


def _refusal(file: str, field: str, expected: object, found: object) -> CheckpointError:
    return CheckpointError(
        f"{file} says that {field} is {found}, and it should be {expected}; fetch the original model's again."
    )


def _config(file: Path, directory: Path, dtype: torch.dtype) -> PretrainedConfig:
    """From the config.json beside the file, else from its metadata."""
    if (directory / "config.json").exists():
        path = directory / "config.json"
        try:
            contents = read_json(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(unreadable(path, error)) from error
        config = make_config(directory, contents, _refusal)
    else:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
        config.name_or_path = ""  # it would say where the file is, and by which path it was named
        check_values(config.to_dict(), _refusal)
    if not isinstance(getattr(config, "dtype", None), torch.dtype):
        config.dtype = dtype
    return config


def _check_stated(file: Path, reader: Any, conversion: Any, config: PretrainedConfig) -> None:
    """Refuse a file that states what its model computes with, and transformers leaves out of the configuration."""
    blocks = _SCALED_BY_HIDDEN_SIZE.get(config.model_type)
    if blocks is not None and config.num_hidden_layers == blocks:
        scale = config.hidden_size // config.num_attention_heads
        if config.query_pre_attn_scalar != scale:
            raise UnsupportedModelError(
                f"{file} has the {blocks} blocks of a model whose query_pre_attn_scalar is {scale}, which GGUF files "
                "do not say; put the config.json of the original model beside it."
            )
    numbers = [*_numbers(config.to_dict())]
    for stated in reader.fields:
        part = next((part for end, part in _STATED.items() if stated.endswith(end)), "")
        text = _field(reader, conversion, stated, "0") if part else "0"
        value = float(text)
        if value == 0 or (part == "factor" and value == 1):  # none, and one that changes nothing
            continue
        if not any(part in name and math.isclose(number, value, rel_tol=1e-4) for name, number in numbers):
            raise UnsupportedModelError(
                f"{file} says that {printable(stated)[:80]} is {text}, which transformers does not read from such GGUF "
                "files; put the config.json of the original model beside it."
            )


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """All numbers of a configuration, with their names."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, value


def _dtype(gguf: Any, stored: Mapping[str, Any]) -> torch.dtype:
    """The 16-bit type of the file; float32 where it has no other, bfloat16 where the rest is quantized."""
    types = {tensor.tensor_type for tensor in stored.values()}
    plain = gguf.GGMLQuantizationType
    for kind, dtype in ((plain.BF16, torch.bfloat16), (plain.F16, torch.float16)):
        if kind in types:
            return dtype
    return torch.float32 if types == {plain.F32} else torch.bfloat16


def _write_tokenizer(
    file: Path, directory: Path, config: PretrainedConfig, listed: tuple[Sequence[str], Sequence[int]], begins: bool
) -> None:
    """The file's tokenizer as transformers writes it; the configuration gets its special tokens.

    Args:
        file: read for the tokenizer.
        directory: written to.
        config: the configuration of the model.
        listed: tokens of the file, and their kinds.
        begins: whether the file lets texts begin with a space.
    """
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    tokenizer.save_pretrained(directory)
    # It would name the class that read the GGUF file and where.
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    for name in ("name_or_path", "gguf_file"):
        settings.pop(name, None)
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
    if _respell_special_tokens(directory / "tokenizer.json", *listed):
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # One of another kind than the file says has been given this mark of that kind, behind all tokens.
    if tokenizer.get_added_vocab().get("<unk>", 0) >= len(listed[0]):
        raise CheckpointError(
            f"The tokenizer that {file} describes gives ids beyond its {len(listed[0]):,} tokens; fetch it again."
        )
    if not begins and "".join(tokenizer.tokenize("a")).startswith("\u2581"):
        raise CheckpointError(
            f"{file} lets no text begin with a space (add_space_prefix), which transformers does not read from GGUF "
            "files; put the tokenizer.json and tokenizer_config.json of the original model beside it."
        )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(tokenizer, name, None) is not None:
            setattr(config, name, getattr(tokenizer, name))


def _warn_of_splits(file: Path, directory: Path, names: Sequence[str]) -> None:
    """Warn where the file's way to split texts has a name that transformers does not know, and takes for GPT-2's.

    Args:
        file: for the message.
        directory: holds the tokenizer that transformers has made.
        names: the file's `tokenizer.ggml.pre`, empty if it states none.
    """
    splits = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))["pre_tokenizer"]
    if (splits or {}).get("use_regex") and not _GPT2_SPLITS.issuperset(names):
        logger.warning(
            "%s is of a model that splits texts as %r, which transformers does not know: they are split as GPT-2 does, "
            "and may become other tokens. Put the tokenizer.json and tokenizer_config.json of the original model "
            "beside it.",
            file,
            printable(names[0])[:80],
        )


def _respell_special_tokens(file: Path, tokens: Sequence[str], kinds: Sequence[int]) -> bool:
    """Give special tokens beyond ASCII, or with spaces, their own ids again; whether there were any.

    transformers takes the characters of every token of such a vocabulary for bytes, does not find the special ones that
    are not spelled so, and adds them behind the model's last id, or not at all.

    Args:
        file: the tokenizer.json that transformers has made.
        tokens, kinds: tokens and their kinds of the GGUF file, which calls some of them control tokens or the user's.
    """
    contents = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    vocabulary = contents.get("model", {}).get("vocab")
    if not isinstance(vocabulary, dict):
        return False
    spelling, ids = bytes_to_unicode(), {}
    added = {token["content"]: token for token in contents["added_tokens"]}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for name, kind in itertools.zip_longest(tokens, kinds[: len(tokens)]):
        spelled = "".join(spelling[byte] for byte in name.encode())
        # Some files call ordinary words so.
        is_marked = kind in _ADDED and (name.isspace() or name[:1] + name[-1:] in ("<>", "[]"))
        if spelled == name or not (name in added or is_marked):
            continue
        if name not in vocabulary and spelled in vocabulary:
            ids[name] = vocabulary[name] = vocabulary.pop(spelled)
            token = added.setdefault(name, {"content": name, **plain, "special": kind == _CONTROL})
            token["id"] = ids[name]
    contents["added_tokens"] = sorted(added.values(), key=lambda token: token["id"])
    for name, entry in ((contents["post_processor"] or {}).get("special_tokens") or {}).items():
        if name in ids:
            entry["ids"] = [ids[name]]
    if ids:
        file.write_text(json.dumps(contents, ensure_ascii=False), encoding="utf-8")
    return bool(ids)


def _plan(
    model: nn.Module, stored: Mapping[str, Any], names: dict[str, str], processor: Any, dtype: torch.dtype
) -> dict[str, Encoded]:
    """Which tensors of the file make each of the model's, and how."""
    shapes = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    parts: dict[str, list[str]] = {}
    for own in stored:
        key = _mapped(own, names)
        if key is not None and names[key] in shapes:
            parts.setdefault(names[key], []).append(own)
    encoded = {}
    for name, members in parts.items():

        def decode(values: list[Tensor], name: str = name, members: tuple[str, ...] = tuple(members)) -> Tensor:
            made: dict[str, Any] = {"tensors": {}}
            try:
                for own, value in zip(members, values, strict=True):
                    result = processor.process(
                        weights=value.numpy(), name=own, tensor_key_mapping=names, parsed_parameters=made
                    )
                    if result.name is not None:
                        made["tensors"][name] = torch.from_numpy(np.ascontiguousarray(result.weights))
                return made["tensors"][name].to(dtype)
            except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # whatever fits not
                raise CheckpointError(
                    f"{members[0]} of the GGUF file does not fit what its metadata say of the model "
                    f"({first_line(error)}); fetch it again."
                ) from error

        # The file's own shape where a tensor is taken as it is, so that one that does not fit is seen.
        shape = [int(size) for size in reversed(stored[members[0]].shape)]
        same = len(members) > 1 or math.prod(shape) == math.prod(shapes[name])
        info = TensorInfo(dtype=DTYPE_NAMES[dtype], shape=shapes[name] if same else shape)
        encoded[name] = Encoded(info, tuple(members), decode)
    return dict(sorted(encoded.items()))


def _mapped(own: str, names: Mapping[str, str]) -> str | None:
    """The key of the map of names under which a tensor of the file is."""
    return next((key for key in (own, own.removesuffix(".weight")) if key in names), None)


def _is_read(own: str, names: Mapping[str, str]) -> bool:
    return _mapped(own, names) is not None


_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of a number, by its type
# Texts, and numbers, of all lists together, each of which costs the reader 20 to 40 microseconds and 700 bytes: the
# largest vocabularies have 262,144 tokens and 514,906 merges, and a kind and a score of each token. Of single values
# and tensors the largest models have some dozens and thousands.
MAX_ENTRIES = 800_000
MAX_FIELDS = 2**12
MAX_TENSORS = 2**14
_MAX_DIMENSIONS = 8
# Numbers that lists have: of each token its kind and its score, and besides the table of a normalizer, 240,000 bytes.
_NUMBERS_OF_TEXT, _NUMBERS_BESIDE = 4, 400_000


def check_header(file: Path) -> None:
    """Refuse a file whose header claims what the file cannot hold.

    Raises:
        OSError: the file cannot be read.
        ValueError: with the reason in a few words.
    """
    with open_regular(file) as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _Walk(content).check()


class _Walk:
    def __init__(self, content: mmap.mmap) -> None:
        self._content, self._at, self._order = content, 4, "<"
        self._numbers = self._texts = 0

    def check(self) -> None:
        if self._number("I") & 0xFFFF == 0:  # the version, in the other order of bytes
            self._order = ">"
        tensors, fields = self._number("Q"), self._number("Q")
        for count, most, what in ((fields, MAX_FIELDS, "fields"), (tensors, MAX_TENSORS, "tensors")):
            if count > most:
                raise ValueError(f"it claims {count} {what}, more than {most}")
        for _ in range(fields):
            self._text()
            self._value(self._number("I"))
        if self._numbers > _NUMBERS_BESIDE + _NUMBERS_OF_TEXT * self._texts:
            raise ValueError(f"its lists have {self._numbers:,} numbers beside {self._texts} texts")
        for _ in range(tensors):
            self._text()
            dimensions = self._number("I")
            if dimensions > _MAX_DIMENSIONS:
                raise ValueError(f"a tensor has {dimensions} dimensions")
            size = math.prod(self._number("Q") for _ in range(dimensions))
            if size > 8 * len(self._content):  # no type has less than a bit
                raise ValueError(f"a tensor has {size:,} numbers, more than the file can hold")
            self._skip(4 + 8)

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            inner, count = self._number("I"), self._number("Q")
            if inner not in (_STRING, *_SIZES):
                raise ValueError(f"a list has entries of type {inner}")
            have = self._texts if inner == _STRING else self._numbers
            if count > MAX_ENTRIES - have:
                what = "texts" if inner == _STRING else "numbers"
                raise ValueError(f"its lists have more than {MAX_ENTRIES:,} {what}")
            if inner == _STRING:
                self._texts += count
                for _ in range(count):
                    self._text()
            else:
                self._numbers += count
                self._skip(count * _SIZES[inner])
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            raise ValueError(f"a value is of type {kind}")

    def _text(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, kind: str) -> int:
        start = self._at
        self._skip(struct.calcsize(self._order + kind))
        return int(struct.unpack_from(self._order + kind, self._content, start)[0])

    def _skip(self, count: int) -> None:
        if count > len(self._content) - self._at:
            raise ValueError("it ends within its header")
        self._at += count
