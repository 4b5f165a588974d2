"""The source model: a directory or Hub repository of safetensors files, or a GGUF file, validated before anything is
computed from it.

Tensors are read lazily, one file open at a time, so that a checkpoint of any size needs no more memory than the tensors
that are read. Those in another form (`kvconvert.models.formats`) are brought to the model's dtype as they are read.
Pickled weights are refused, not converted: loading one runs whatever code it carries.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PretrainedConfig

from kvconvert.errors import CheckpointError, NumericError, UnsupportedModelError, first_line, unreadable
from kvconvert.io.checksums import FileStamps, begin, sha256
from kvconvert.io.hub import check_content
from kvconvert.io.json_text import read_json
from kvconvert.io.progress import WITHOUT_RATE, progress_bar
from kvconvert.io.records import MAX_TEXT, SourceInfo, TensorInfo, shortened
from kvconvert.io.regular import open_tensors
from kvconvert.kernels.linear.awq_format import AwqWeight
from kvconvert.kernels.quantizer import all_finite
from kvconvert.models import locate_model
from kvconvert.models.configuration import make_config
from kvconvert.models.formats import Encoded, Packing, find_format
from kvconvert.models.formats.gguf import find_gguf, open_gguf
from kvconvert.models.weight_files import Rearrangement, TensorNames, read_weight_header, tensor_files, weight_files

if TYPE_CHECKING:  # transformers' modeling code takes seconds to import, and `export` runs without it
    from transformers import PreTrainedModel

_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight", "head.weight")
FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
_PROGRESS_FROM = 256 * 2**20  # bytes
# Characters of a card in which its front matter is looked for, and what YAML writes for nothing.
_MOST_FRONT_MATTER, _NULLS = 2**18, ("", "~", "null")


@dataclass(frozen=True)
class SourceModel:
    """A validated checkpoint.

    Attributes:
        id: Hub id, or the name of a local directory or GGUF file.
        directory: where its configuration and tokenizer are.
        revision: commit of a Hub repository.
        config: transformers' configuration, without any `quantization_config`.
        weight_map: file that holds each stored tensor, by the checkpoint's name, in order of names.
        tensors: type and shape in which each tensor is read, by the checkpoint's name, in order of names.
        tensor_names: the names by which tensors are read: the checkpoint's own, or those of the model after
            `named_as`.
        stamps: the stamps of the weight files when they were opened.
        encoded: tensors that the files hold in another form, by the checkpoint's name.
        stored_as: that form in a few words, or None.
        location: what opens this checkpoint again: its directory, or the GGUF file.
        weights: directory of the weight files.
        read_file: gives stored tensors of one weight file, by their names in it.
        owned: keeps temporary files for as long as they are needed.
    """

    id: str
    directory: Path
    revision: str | None
    config: PretrainedConfig
    weight_map: dict[str, str]
    tensors: dict[str, TensorInfo]
    tensor_names: TensorNames
    stamps: FileStamps
    location: Path
    weights: Path
    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    stored_as: str | None = None
    read_file: Callable[[Path, list[str]], dict[str, Tensor]] = field(default_factory=lambda: _read_safetensors)
    owned: Any = None

    def named_as(self, model: nn.Module) -> SourceModel:
        """The same checkpoint, with tensors named as in the model loaded from it."""
        return replace(self, tensor_names=TensorNames.of(model, self.tensors))

    def arranged(self, model: nn.Module, inside: str) -> SourceModel:
        """The same checkpoint with tensors as the model has them, where loading makes them of few others.

        Args:
            model: the model that `named_as` was given.
            inside: the beginning of the model's names of these tensors; others stay as they are stored.
        """
        made: dict[str, Rearrangement] = {}
        encoded = dict(self.encoded)
        for rearrangement in self.tensor_names.rearranged:
            if rearrangement.target.startswith(inside) and rearrangement.is_complete:
                own = [*rearrangement.sources.values()]
                shapes = [torch.empty(self.tensors[name].shape, device="meta") for name in own]
                for name, tensor in rearrangement.convert(model, shapes).items():
                    info = TensorInfo(dtype=self.tensors[own[0]].dtype, shape=list(tensor.shape))
                    parts = [self.encoded[n].parts if n in self.encoded else (n,) for n in own]
                    decode, made[name] = partial(self._made, rearrangement, model, name), rearrangement
                    encoded[self.tensor_names.of_tensor(name)] = Encoded(info, tuple(chain(*parts)), decode)
        names = self.tensor_names.with_made(made)
        infos = {own: encoded[own].info for own in names.made}
        return replace(self, tensors=self.tensors | infos, tensor_names=names, encoded=encoded)

    def _made(self, rearrangement: Rearrangement, model: nn.Module, name: str, tensors: list[Tensor]) -> Tensor:
        """One tensor that loading makes, from the stored ones that those it takes are made from."""
        sources, begin = [], 0
        for source in rearrangement.sources.values():
            count = len(self.encoded[source].parts) if source in self.encoded else 1
            part = tensors[begin : begin + count]
            sources.append(self.encoded[source].decode(part) if source in self.encoded else part[0])
            begin += count
        return rearrangement.convert(model, sources)[name]

    def names(self, prefix: str) -> list[str]:
        """Tensors whose name starts with `prefix`, sorted."""
        return [name for name in self.tensor_names.stored if name.startswith(prefix)]

    def info_of(self, name: str) -> TensorInfo:
        """Dtype and shape of a tensor that goes by the model's name."""
        return self.tensors[self.tensor_names.stored[name]]

    def is_encoded(self, name: str) -> bool:
        """Whether the files hold a tensor, which goes by the model's name, in another form."""
        return self.tensor_names.stored[name] in self.encoded

    def read(self, names: str | Iterable[str]) -> dict[str, Tensor]:
        """Read tensors in the dtype that `tensors` gives.

        Args:
            names: tensor names, or one prefix.

        Raises:
            CheckpointError: a tensor that the checkpoint does not have, or a file that changed since it was opened.
        """
        wanted = self.names(names) if isinstance(names, str) else list(names)
        stored = self.tensor_names.stored
        plain: dict[str, str] = {}
        tensors = {}
        for name in wanted:
            if name not in stored:
                raise CheckpointError(
                    f"{self.directory} holds no tensor {name}; the checkpoint does not fit its config.json."
                )
            if stored[name] in self.encoded:
                # One at a time: the stored form is dropped as soon as it is read.
                encoded = self.encoded[stored[name]]
                parts = self._read_stored(encoded.parts)
                tensors[name] = encoded.decode([parts[part] for part in encoded.parts])
            else:
                plain[name] = stored[name]
        found = self._read_stored(plain.values())
        tensors |= {name: found[own] for name, own in plain.items()}
        return {name: tensors[name] for name in wanted}

    def _read_stored(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors as they are stored, by the checkpoint's name, reading each file once."""
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.weight_map[name], []).append(name)
        tensors = {}
        for file, members in by_file.items():
            tensors |= self.read_file(self.weights / file, members)
        self.stamps.check(by_file)
        return tensors

    def packings(self, prefix: str = "") -> dict[str, Packing]:
        """Weights that bundles hold as they are stored here, by tensor name, of all whose name starts with `prefix`."""
        found = {name: self.encoded.get(self.tensor_names.stored[name]) for name in self.names(prefix)}
        return {name: item.packing for name, item in found.items() if item is not None and item.packing is not None}

    def read_packed(self, name: str) -> AwqWeight:
        """One of `packings`, in the layout of bundles."""
        encoded = self.encoded[self.tensor_names.stored[name]]
        parts = self._read_stored(encoded.parts)
        return encoded.packing.pack([parts[part] for part in encoded.parts])

    def files_of(self, names: Iterable[str]) -> set[str]:
        """Weight files that hold tensors, which go by the checkpoint's name."""
        parts = (self.encoded[name].parts if name in self.encoded else (name,) for name in names)
        return {self.weight_map[part] for group in parts for part in group}

    def file(self, name: str) -> Path:
        """Path of config.json or of a weight file."""
        return (self.directory if name == "config.json" else self.weights) / name

    def load(self, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
        """The whole model as transformers computes it, with the weights that `read` gives.

        Args:
            dtype: the dtype of its parameters; "auto" takes the checkpoint's.
            options: keyword arguments of `from_pretrained`.
        """
        from kvconvert.models.configuration import model_class

        auto = model_class(self.config)
        if not self.encoded:
            return auto.from_pretrained(self.location, dtype=dtype, trust_remote_code=False, **options)
        whole = replace(self, tensor_names=TensorNames.same(self.tensors))
        with torch.device("meta"):  # the Auto classes load by name only, and from_config writes into its argument
            known = type(auto.from_config(deepcopy(self.config), trust_remote_code=False))
        return known.from_pretrained(
            None,
            config=deepcopy(self.config),
            state_dict=whole.read(""),
            dtype=float_dtype(self) if dtype == "auto" else dtype,
            **options,
        )

    def read_finite(self, names: str | Iterable[str], device: torch.device | None = None) -> dict[str, Tensor]:
        """`read`, onto a device if one is given, refusing NaN and infinity with the tensor's name (NumericError)."""
        tensors = self.read(names)
        for name in tensors:
            tensor = tensors[name] = tensors[name].to(device)
            if tensor.is_floating_point() and not all_finite(tensor):
                stored = self.tensor_names.stored[name]
                file = self.weights / min(self.files_of([stored]))
                raise NumericError(
                    f"The source weights hold NaN or infinity in {stored} ({file}); fetch the model again, or repair "
                    "it before converting."
                )
        return tensors

    def check_finite(self, names: Iterable[str]) -> None:
        """Read tensors, by the checkpoint's own names, one at a time only to refuse NaN and infinity in them."""
        plain = replace(self, tensor_names=TensorNames.same(self.tensors))
        for name in names:
            plain.read_finite([name])

    def info(self, progress: bool = False) -> SourceInfo:
        """Checksums of config and weights, revision, license and languages; reads every weight file once.

        Those of weights that `checksums.begin` was given by the same paths are only waited for.
        """
        files = sorted(set(self.weight_map.values()))
        total = sum(self.file(file).stat().st_size for file in files)
        shown = progress and total >= _PROGRESS_FROM
        with progress_bar(
            total=total, desc="checksums", unit="B", unit_scale=True, shown=shown, bar_format=WITHOUT_RATE
        ) as bar:
            begin(map(self.file, files))
            hashes = {file: sha256(self.file(file), bar.update) for file in files}
        for file, found in hashes.items():
            check_content(self.file(file), found)
        return SourceInfo(
            id=self.id,
            revision=self.revision,
            **card_facts(self.directory),
            config_sha256=sha256(self.directory / "config.json"),
            weights_sha256=hashes,
            stored_as=self.stored_as,
        )


def open_source(model: str, *, was_fetched: bool = False) -> SourceModel:
    """Open and validate a model: files complete and consistent with their index, headers sound, weights of known form.

    Args:
        model: a directory, a GGUF file or a directory with one, or a Hub id (fetched into the Hub's cache: safetensors,
            configuration and tokenizer only). What exists is a path, and so is user/name where there is a local
            directory `user`.
        was_fetched: the name was recorded of a model that came from the Hub, so that a directory `user` means nothing.

    Raises:
        HubError: the Hub cannot be asked, or has no such model.
        CheckpointError: files missing, damaged, pickled, or of a kind that is refused.
        UnsupportedModelError: transformers does not know the architecture without running its own code.
    """
    gguf = find_gguf(Path(model))
    if gguf is not None:
        return _open_gguf(gguf)
    directory, model_id, revision = locate_model(model, was_fetched)
    files = weight_files(directory)
    stamps = FileStamps(directory, files)
    headers = {file: read_weight_header(directory / file) for file in files}
    weight_map = tensor_files(directory, headers)
    stored = {name: headers[file][name] for name, file in weight_map.items()}
    config = _load_config(directory)
    form, encoded, stored_as, unused = None, {}, None, set()
    stated = getattr(config, "quantization_config", None)
    quantization = stated or _settings_beside(directory, stored)
    if quantization:
        quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
        form = find_format(directory, quantization)
        encoded = form.encoded(stored, _stated_dtype(config) or torch.bfloat16, directory)
        stored_as, unused = form.describe(), form.unused(stored)
    if stated:
        del config.quantization_config
    encoded |= _from_tied(config, stored)
    parts = {part for tensor in encoded.values() for part in tensor.parts} | unused
    tensors = {name: info for name, info in stored.items() if name not in parts}
    tensors = dict(sorted((tensors | {name: tensor.info for name, tensor in encoded.items()}).items()))
    for name, info in tensors.items():
        if info.dtype not in FLOAT_DTYPES and name.endswith(".weight"):  # some masks are called bias
            raise CheckpointError(
                f"{directory / weight_map[name]} stores {name} as {info.dtype}; converting needs weights in "
                f"{', '.join(FLOAT_DTYPES)}."
            )
    names = TensorNames.same(tensors)
    source = SourceModel(
        model_id,
        directory,
        revision,
        config,
        weight_map,
        tensors,
        names,
        stamps,
        location=directory,
        weights=directory,
        encoded=encoded,
        stored_as=stored_as,
    )
    if form is not None:
        form.check(source._read_stored)
    return source


# Where the settings of quantized weights are if config.json has none: llm-awq's and AutoGPTQ's first checkpoints.
_BESIDE = {"quant_config.json": "awq", "quantize_config.json": "gptq"}


def _settings_beside(directory: Path, stored: Iterable[str]) -> dict[str, Any] | None:
    """The settings of quantized weights from a file of their own; None where no weight is quantized."""
    if not any(name.endswith(".qweight") for name in stored):
        return None
    for name, method in _BESIDE.items():
        file = directory / name
        if file.is_file():
            try:
                settings = read_json(file)
            except (OSError, ValueError, RecursionError) as error:
                raise CheckpointError(unreadable(file, error)) from error
            if not isinstance(settings, dict):
                raise CheckpointError(f"{file} holds no settings of quantized weights; fetch it again.")
            return {"quant_method": method} | settings
    raise CheckpointError(
        f"{directory} holds quantized weights, and neither config.json nor {' or '.join(_BESIDE)} says how they are "
        "stored; fetch the model again."
    )


def _from_tied(config: PretrainedConfig, stored: Mapping[str, TensorInfo]) -> dict[str, Encoded]:
    """Matrices that the checkpoint holds by the name of the other that shares them, as a head without its embedding."""
    parts = (config, config.get_text_config(decoder=True))
    tied = any(getattr(part, "tie_word_embeddings", False) for part in parts)
    if not tied or not any(name.endswith(_HEADS) for name in stored):
        return {}
    from kvconvert.models.configuration import model_class

    with torch.device("meta"):
        model = model_class(config).from_config(deepcopy(config), trust_remote_code=False)
    found = TensorNames.of(model, stored).stored
    shared = getattr(model, "all_tied_weights_keys", None) or {}
    return {
        owner: Encoded(stored[found[name]], (found[name],), lambda tensors: tensors[0])
        for name, owner in shared.items()
        if name in found and owner not in found
    }


def _open_gguf(file: Path) -> SourceModel:
    stamps = FileStamps(file.parent, [file.name])
    opened = open_gguf(file)
    return SourceModel(
        file.name,
        opened.directory,
        None,
        opened.config,
        weight_map=opened.weight_map,
        tensors={name: tensor.info for name, tensor in opened.encoded.items()},
        tensor_names=TensorNames.same(opened.encoded),
        stamps=stamps,
        location=file,
        weights=file.parent,
        encoded=opened.encoded,
        stored_as=opened.stored_as,
        read_file=opened.read,
        owned=opened,
    )


def _read_safetensors(file: Path, names: list[str]) -> dict[str, Tensor]:
    try:
        with open_tensors(file) as shard:
            return {name: shard.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(unreadable(file, error)) from error


def _load_config(directory: Path) -> PretrainedConfig:
    path = directory / "config.json"
    try:
        contents = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(path, error)) from error
    if isinstance(contents, dict) and contents.get("is_encoder_decoder") is True:
        raise UnsupportedModelError(
            "config.json says that is_encoder_decoder is True, and kvconvert converts models that only decode; choose "
            "another model."
        )
    try:
        return make_config(directory, contents, wrong_count)
    except CheckpointError:
        raise
    except Exception as error:  # classes of configs validate with exceptions of many kinds
        if isinstance(error, ValueError) and not isinstance(error, StrictDataclassError):
            raise UnsupportedModelError(
                f"transformers cannot read {path} without running the model's own code, which kvconvert never does "
                f"({first_line(error)})."
            ) from error
        raise CheckpointError(
            f"transformers does not accept {path} ({first_line(error.__cause__ or error)}); correct it, or fetch it "
            "again."
        ) from error


def wrong_count(file: str, field: str, expected: object, found: object) -> CheckpointError:
    """The error for a number in a source's file."""
    return CheckpointError(f"{file} says that {field} is {found}, and it should be {expected}; fetch the model again.")


def float_dtype(source: SourceModel) -> torch.dtype:
    """The dtype in which transformers loads this model by default: the config's, else that of the first tensor."""
    names = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    return _stated_dtype(source.config) or names[next(iter(source.tensors.values())).dtype]


def _stated_dtype(config: PretrainedConfig) -> torch.dtype | None:
    stated = getattr(config, "dtype", None)
    return stated if isinstance(stated, torch.dtype) else None


def card_facts(directory: Path) -> dict[str, Any]:
    """License and languages that the front matter of the model card states, as fields of `SourceInfo`."""
    card = directory / "README.md"
    if not card.is_file():
        return {}
    with card.open(encoding="utf-8", errors="replace") as stream:
        text = stream.read(_MOST_FRONT_MATTER)
    front = re.match(r"---[ \t]*\n(.*?)\n---", text, re.DOTALL)
    if front is None:
        return {}
    licence = re.search(r"^license:\s*[\"']?([\w.+-]{1,100})", front[1], re.MULTILINE)
    try:  # as text alone: numbers and dates are read by code that raises errors of many kinds
        stated = yaml.load(front[1], yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError):  # a card is for people; its license is read all the same
        stated = None
    stated = stated if isinstance(stated, dict) else {}
    named = {key: stated.get(f"license_{key}") for key in ("name", "link")}
    named = {key: text for key, text in named.items() if isinstance(text, str) and text not in _NULLS}
    language = stated.get("language")
    codes = language if isinstance(language, list) else [language]
    return {
        "licence": licence[1] if licence else None,
        "licence_name": shortened(named["name"]) if "name" in named else None,
        "licence_link": shortened(named["link"]) if "link" in named else None,
        "language": [c for c in codes if isinstance(c, str) and c not in _NULLS and len(c) < 40][:MAX_TEXT],
    }
