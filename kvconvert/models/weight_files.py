"""The safetensors files of a checkpoint: which there are, what headers and index say, and how tensors are named.

Checkpoints keep the names of the library that wrote them (`language_model.model.layers.0...` in older LLaVA models,
`model.layers.0...` in older Qwen2-VL models), and transformers renames on loading (`model.language_model.layers.0...`).
Modules are called here as in the loaded model; files keep the checkpoint's names, which other engines expect too.
"""

from __future__ import annotations

import copy
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from kvconvert.errors import CheckpointError, first_line, unreadable
from kvconvert.io.json_text import read_json
from kvconvert.io.records import TensorInfo
from kvconvert.io.tensorheader import read_header
from kvconvert.models import INDEX_FILE, PICKLES, SINGLE_FILE, without_weights
from kvconvert.models.experts import FusedShapes

_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def check_links(directory: Path, files: Iterable[Path]) -> None:
    """Refuse (CheckpointError) files of a model that are to be copied and are links to what may be none of it: neither
    in its directory, nor a file of the same name, nor in the Hub's cache. A stranger's directory may have links to what
    is its user's alone.
    """
    root = os.path.realpath(directory)
    for file in files:
        target = Path(os.path.realpath(file))
        if not target.is_relative_to(root) and target.name != file.name and target.parent.name != "blobs":
            raise CheckpointError(
                f"{file} is a link that leads out of the model's directory; put the file that you meant in its place, "
                "or remove it."
            )


def weight_files(directory: Path) -> list[str]:
    """The safetensors files that make up the model, from the index if there is one."""
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    shards = sorted(file.name for file in directory.iterdir() if _SHARD.fullmatch(file.name))
    if index.exists():
        if single.exists():
            raise CheckpointError(
                f"{directory} holds both {SINGLE_FILE} and {INDEX_FILE}, which may disagree; remove the wrong one."
            )
        named = sorted(set(_read_index(index).values()))
        for file in named:
            if not (directory / file).is_file():
                raise CheckpointError(f"The shard {file} that {index} names is missing; fetch it again.")
        extra = sorted(set(shards) - set(named))
        if extra:
            raise CheckpointError(
                f"{directory} holds shard {extra[0]} that {INDEX_FILE} does not name; remove it or repair the index."
            )
        return named
    if shards:
        missing = f"; remove the shard {shards[0]}" if single.exists() else f" but no {INDEX_FILE}; fetch the index"
        raise CheckpointError(f"{directory} holds shards{missing}.")
    if single.exists():
        return [SINGLE_FILE]
    pickles = sorted(file.name for file in directory.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{directory} holds pickled weights ({pickles[0]}), which are refused because loading them runs code; "
            "convert them where you trust them, with AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)."
        )
    raise without_weights(directory)


def _read_index(index: Path) -> dict[str, str]:
    if not index.is_file():
        raise CheckpointError(f"{index} is no file, where an index of safetensors files belongs; fetch it again.")
    try:
        contents = read_json(index)
    except (OSError, ValueError) as error:
        raise CheckpointError(unreadable(index, error)) from error
    try:
        weight_map = contents["weight_map"]
        entries = list(weight_map.items())
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is not an index of safetensors files ({first_line(error)}); fetch it again."
        ) from error
    for name, file in entries:
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise CheckpointError(f"{index} places {name} in {file!r}, which is not a safetensors file beside it.")
    return dict(weight_map)


def tensor_files(directory: Path, headers: dict[str, dict[str, TensorInfo]]) -> dict[str, str]:
    """Tensor to file, from the headers, checked against the index."""
    found: dict[str, str] = {}
    for file, header in headers.items():
        for name in header:
            if name in found:
                raise CheckpointError(
                    f"{directory} holds {name} twice, in {found[name]} and {file}; remove one of them."
                )
            found[name] = file
    index = directory / INDEX_FILE
    if index.exists():
        stated = _read_index(index)
        for name, file in stated.items():
            if found.get(name) != file:
                raise CheckpointError(f"{index} says that {file} holds {name}, but it does not; fetch the shard again.")
        extra = sorted(set(found) - set(stated))
        if extra:
            raise CheckpointError(f"{directory / found[extra[0]]} holds {extra[0]}, which {INDEX_FILE} does not name.")
    return dict(sorted(found.items()))


def read_weight_header(path: Path) -> dict[str, TensorInfo]:
    """A safetensors header; types that bundles do not hold pass, for not every tensor is copied into one."""

    def refuse(file: str, field: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(
            f"{path} is truncated or damaged: {field} should be {expected}, found {found}; fetch it again."
        )

    return read_header(path, refuse, any_dtype=True)


@dataclass(frozen=True)
class Rearrangement:
    """Tensors of the loaded model that one of transformers' conversions makes from some of a checkpoint.

    Attributes:
        converter: transformers' own.
        target: the model's name of the first tensor that it makes.
        sources: the checkpoint's name of each tensor that it takes, by the pattern that it fits.
        before: the names that these have just before that.
    """

    converter: Any
    target: str
    sources: Mapping[str, str]
    before: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint holds all that the conversion takes."""
        return len(self.sources) == len(self.converter.source_patterns)

    def convert(self, model: nn.Module, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Make the model's tensors, by name, from tensors in the order of `sources`."""
        own = copy.deepcopy(self.converter)
        for (pattern, name), tensor in zip(self.sources.items(), tensors, strict=True):
            own.add_tensor(self.target, name, pattern, lambda tensor=tensor: tensor)
        return own.convert(self.target, model=FusedShapes(model), config=model.config)


@dataclass(frozen=True)
class TensorNames:
    """Both names of every tensor of a checkpoint.

    Attributes:
        stored: the checkpoint's name of each tensor, by the loaded model's name, in order of the latter.
        prefixes: the same for the modules around them, as far as they differ.
        merged: tensors of the loaded model that loading makes from others, by merging or rearranging them.
        rearranged: how loading makes some of these of few tensors, without experts that are merged one by one.
        made: for each tensor that is read so, the names in the checkpoint of those that it is made of.
        renamings, base: how loading renames tensors, and the prefix that it adds to or removes from them.
    """

    stored: Mapping[str, str]
    prefixes: Mapping[str, str]
    merged: frozenset[str] = frozenset()
    rearranged: tuple[Rearrangement, ...] = ()
    made: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    renamings: tuple[Any, ...] = ()
    base: str = ""

    @classmethod
    def same(cls, names: Iterable[str]) -> TensorNames:
        """Names that are not changed on loading."""
        return cls({name: name for name in sorted(names)}, {})

    def with_made(self, made: Mapping[str, Rearrangement]) -> TensorNames:
        """These, with tensors, by the model's names, that are made of others, and without those others."""
        taken = {name for rearrangement in made.values() for name in rearrangement.before}
        stored = {name: own for name, own in self.stored.items() if name not in taken}
        stored |= {name: self.of_tensor(name) for name in made}
        sources = {stored[name]: tuple(rearrangement.sources.values()) for name, rearrangement in made.items()}
        named = {"stored": dict(sorted(stored.items())), "prefixes": _prefixes(stored)}
        return replace(self, **named, merged=self.merged - made.keys(), rearranged=(), made=sources)

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> TensorNames:
        """Names as transformers' own conversions for this model change them.

        Only renaming is followed: a tensor that loading merges with others (an expert) or rearranges keeps the name
        that it has just before that, which is the name of its own module (`mlp.experts.3.gate_proj.weight`).

        Args:
            model: a model of the class that loads the checkpoint, on any device.
            names: the names of the checkpoint's tensors.

        Raises:
            CheckpointError: two tensors would get the same name.
        """
        # Seconds of imports, which those who only read files do without.
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_renamings, rename_source_key

        conversions = get_model_conversion_mapping(model)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        state, base = model.state_dict(), model.base_model_prefix
        stored: dict[str, str] = {}
        merged: set[str] = set()
        rearranged: dict[Any, Rearrangement] = {}
        for name in sorted(names):
            loaded, pattern = rename_source_key(name, renamings, converters, base, state)
            if pattern is not None:
                converter = next(c for c in converters if pattern in c.source_patterns)
                first, *others = converter.target_patterns
                merged |= {loaded, *(loaded.replace(first, other) for other in others)}
                target = loaded
                plain = apply_renamings(name, renamings)
                nested = loaded.startswith(f"{base}.") and not plain.startswith(f"{base}.")
                loaded = f"{base}.{plain}" if nested else plain
                if not any("*" in source for source in converter.source_patterns):
                    known = rearranged.get((id(converter), target)) or Rearrangement(converter, target, {})
                    known = replace(known, sources=known.sources | {pattern: name}, before=(*known.before, loaded))
                    rearranged[id(converter), target] = known
            elif loaded not in state and name in state:
                loaded = name
            if loaded in stored:
                raise CheckpointError(
                    f"The checkpoint holds both {stored[loaded]} and {name}, which are one tensor, {loaded}, for "
                    "transformers; remove the wrong one."
                )
            stored[loaded] = name
        return cls(
            dict(sorted(stored.items())),
            _prefixes(stored),
            frozenset(merged),
            tuple(rearranged.values()),
            renamings=tuple(renamings),
            base=base,
        )

    def of_tensor(self, name: str) -> str:
        """The checkpoint's name of a tensor, or the one that a new tensor of the same module has to get."""
        if name in self.stored:
            return self.stored[name]
        module, _, part = name.rpartition(".")
        return f"{self.of_module(module)}.{part}"

    def of_module(self, name: str) -> str:
        """The checkpoint's name of a module, also of one inside a module that the checkpoint has tensors of."""
        head, rest = name, ""
        while head and head not in self.prefixes:
            head, _, last = head.rpartition(".")
            rest = f".{last}{rest}"
        found = f"{self.prefixes[head]}{rest}" if head else name
        return found if not rest or self._is_renamed(found, name) else name

    def _is_renamed(self, name: str, loaded: str) -> bool:
        """Whether loading gives a module of the checkpoint this name; experts that it merges have none before."""
        if not self.renamings:
            return True
        from transformers.core_model_loading import apply_renamings

        found = apply_renamings(f"{name}.weight", list(self.renamings)).removesuffix(".weight")
        return found.removeprefix(f"{self.base}.") == loaded.removeprefix(f"{self.base}.")


def _prefixes(stored: Mapping[str, str]) -> dict[str, str]:
    """Modules whose names differ, and those inside them: everything before a common ending of two tensor names.

    Where a module's tensors disagree (Hy3 moves the router into a module of its own), most of them decide.
    """
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for loaded, name in stored.items():
        ours, theirs = loaded.split("."), name.split(".")
        while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
            ours.pop()
            theirs.pop()
            found[".".join(ours)][".".join(theirs)] += 1
    prefixes = {module: names.most_common(1)[0][0] for module, names in found.items() if {*names} != {module}}
    # A module's own tensors take precedence over those of modules inside it, which a checkpoint may hold elsewhere.
    for loaded, name in stored.items():
        (ours, _, part), (theirs, _, other) = loaded.rpartition("."), name.rpartition(".")
        if ours in prefixes and part == other:
            prefixes[ours] = theirs
    return prefixes
