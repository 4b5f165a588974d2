"""The manifest of a bundle, `kvconvert.json`: what was converted, how, from what, and what every file has to look like.

The manifest is data for readers in any language. Nothing in it varies between equal runs. Its last field,
`manifest_sha256`, seals it: the SHA-256 of the file's own bytes with those 64 digits replaced by zeros.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer

from kvconvert.bundle.locate import PLAN_NAME
from kvconvert.io.records import (
    MAX_ENTRIES,
    MAX_FILES,
    MAX_LAYERS,
    Count,
    DataInfo,
    Facts,
    FewFiles,
    FileInfo,
    FileName,
    FirstFaults,
    Name,
    Number,
    Record,
    Sha256,
    Size,
    SourceInfo,
    TensorInfo,
    Text,
)
from kvconvert.methods import KVScheme, LayerShape, awq, layer_conventions
from kvconvert.methods.auto import LONGEST_CONTEXT
from kvconvert.methods.awq import AWQ_BITS, QuantizedBy, StoredMethod

FORMAT_VERSION = 1  # format 0 differs in this number alone
# AWQ "version" of a bundle whose weights are no AWQ checkpoint. transformers only warns of a quantization method that
# it does not know, and would then generate with its ordinary cache; an unknown version it refuses, and shows it.
OWN_VERSION = "kvconvert: import kvconvert.runtime before from_pretrained"
_UNSEALED = "0" * 64
EARLIER_NAMES = {"passkey": "retrieval", "recall_form": "retrieval_form", "min_passkey": "min_retrieval"}
MAX_CANDIDATES = 256
_Bits = Annotated[int, Field(ge=1, le=16)]
Heads = Annotated[int, Field(ge=1, le=2**16)]  # and channels of a head
LayerIndex = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]
_Divergences = Annotated[dict[Name, Number], Field(max_length=MAX_CANDIDATES)]
_Version = Annotated[int, Field(ge=0, le=FORMAT_VERSION)]


class ModuleCoverage(Record):
    """Coverage of one module: how it was quantized, or why it was kept.

    Attributes:
        name: as in the loaded model, for instance "model.layers.0.self_attn.q_proj".
        stored_name: as in the weight files, where that is another name; else "".
        kind: "linear", "embedding", "norm", ...
        method: "awq", "gptq", "awq+gptq" or "rtn" (quantized), "source" (quantized in the source, which does not tell
            how), or "kept".
        bits, group_size: of a quantized module.
        in_features, out_features: of a Linear; the exporter fills them in from the tensors.
        reason: why a module was kept, or which AWQ scaling pairs were skipped and why.
    """

    name: Name
    stored_name: Name = ""
    kind: Name = "linear"
    method: Literal[QuantizedBy, "kept"]
    bits: _Bits | None = None
    group_size: Count | None = None
    in_features: Count | None = None
    out_features: Count | None = None
    reason: Text = ""

    @property
    def prefix(self) -> str:
        """Name of the module in the weight files."""
        return self.stored_name or self.name

    def stored_under(self, name: str) -> ModuleCoverage:
        """The same coverage of a module that the weight files call `name`."""
        return self if name == self.name else self.model_copy(update={"stored_name": name})


class LayerPlan(Record):
    """The key-value cache of one decoder layer.

    Attributes:
        index: number of the decoder layer.
        kv: fields of a `KVScheme`, or None where the cache is left to the model's own class.
        head_dim, num_key_value_heads: of this layer as its cache stores it; None where `kv` is None.
        value_head_dim: channels of a value where a key has others, such as RoPE parts beside the latents of latent
            attention, which are stored as values and keys; absent where they have one size.
        value_group_size: channels per value group after fitting `kv["value_group_size"]` to the head size.
        rotation: the rotation's convention, for instance "sylvester(64)"; None without rotation.
        value_rotation: that of values where keys have other sizes; else absent.
        reason: why the plan differs from the recipe's scheme, or "".
        statistics: what calibration measured for this layer (plain numbers and strings).
    """

    index: LayerIndex
    kv: Facts | None
    head_dim: Heads | None = None
    value_head_dim: Heads | None = None
    num_key_value_heads: Heads | None = None
    value_group_size: Heads | None = None
    rotation: Name | None = None
    value_rotation: Name | None = None
    reason: Text = ""
    statistics: Facts = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_absent(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found = serialize(self)
        for name in ("value_head_dim", "value_rotation"):
            if found[name] is None:
                del found[name]
        return found

    def scheme(self) -> KVScheme | None:
        """The layer's scheme; None where the cache is left to the model's own class."""
        return None if self.kv is None else KVScheme.from_dict(self.kv)

    def shape(self) -> LayerShape:
        """Sizes of the layer's keys and values; only of a layer with a scheme."""
        head_dim = self.head_dim or 0
        value_dim = self.value_head_dim or head_dim
        group = self.value_group_size or value_dim
        return LayerShape(self.num_key_value_heads or 0, head_dim, value_dim, group, self.rotation, self.value_rotation)


class WeightsInfo(Record):
    """Size of the stored weights.

    Attributes:
        method, bits, group_size: how Linears were quantized; bits and group_size are None with method "none", bits
            also where modules have different ones.
        bytes: of all tensors in the weight files.
        parameters: weights and biases that these tensors stand for.
        bits_per_weight: 8 * bytes / parameters, over the whole checkpoint with embeddings and norms.
        quantized_bytes, quantized_parameters: the same for the weights of quantized Linears alone
            (codes, zeros and scales).
        quantized_bits_per_weight: their quotient in bits; None if nothing is quantized.
    """

    method: StoredMethod
    bits: _Bits | None = None
    group_size: Count | None = None
    bytes: Count
    parameters: Count
    bits_per_weight: Size
    quantized_bytes: Count = 0
    quantized_parameters: Count = 0
    quantized_bits_per_weight: Size | None = None


class Fidelity(Record):
    """A fidelity measurement of exactly this bundle.

    Attributes:
        measured_on: `Manifest.files_digest()` of the bundle that was measured; a reader refuses any other.
        report: the figures, as `kvconvert eval --json` prints them.
        limits: the recipe's limits.
        missed: one sentence per limit that was missed; not empty only in a bundle whose export was forced.
    """

    measured_on: Sha256
    report: Facts
    limits: Annotated[dict[Name, Number], FirstFaults]
    missed: list[Text] = Field(default_factory=list, max_length=MAX_LAYERS, fail_fast=True)

    @field_validator("report", "limits", mode="before")
    @classmethod
    def _by_present_names(cls, stored: Any) -> Any:
        """Figures of a bundle made before 1.0, by the names that they have now."""
        if not isinstance(stored, dict):
            return stored
        return {EARLIER_NAMES.get(name, name): value for name, value in stored.items()}


class LayerAllocation(Record):
    """One layer.

    Attributes:
        index: of the layer.
        keys, values: names of the chosen candidates.
        kl: by candidate, mean KL divergence of the whole model in nats per token with this layer's keys, or values,
            alone stored so.
        clip_ratios: by candidate, the clip ratio that it was measured with.
        treatments: by candidate for keys, the fields of the treatment that was measured to suit it best.
    """

    index: LayerIndex
    keys: Name
    values: Name
    kl: _Divergences
    clip_ratios: _Divergences
    treatments: dict[Name, Facts] = Field(default_factory=dict, max_length=MAX_CANDIDATES)


class Allocation(Record):
    """The search of the recipe `auto`.

    Attributes:
        context: tokens of the sequence that sizes are stated for.
        budget_bytes_per_token: what the cache was allowed to take.
        bytes_per_token, bits_per_value: what it takes (`kvconvert.cache`); 16-bit full precision.
        candidates: fields of the scheme by candidate, over those of the recipe.
        layers: of those that have a choice.
        predicted_kl: sum of the chosen candidates' divergences.
        measured_kl: divergence with all layers stored as chosen.
        plans: how many plans of the whole model were measured.
        data: the held-out calibration text that all divergences were measured on, with passages repeated at the end of
            each sequence.
        dtype: in which.
    """

    context: Annotated[int, Field(ge=1, le=LONGEST_CONTEXT)]
    budget_bytes_per_token: Size
    bytes_per_token: Size
    bits_per_value: Size
    candidates: dict[Name, Facts] = Field(max_length=MAX_CANDIDATES)
    layers: list[LayerAllocation] = Field(max_length=MAX_LAYERS, fail_fast=True)
    predicted_kl: Number
    measured_kl: Number
    plans: Count
    data: DataInfo
    dtype: Name


class WeightUnit(Record):
    """Linears of one width.

    Attributes:
        layer: number of the decoder layer.
        linears: names as in the loaded model.
        bits: that were chosen.
        kl: by width, mean KL divergence of the whole model in nats per token with these weights alone rounded so.
    """

    layer: LayerIndex
    linears: list[Name] = Field(fail_fast=True)
    bits: _Bits
    kl: dict[Annotated[str, Field(pattern=r"^[0-9]{1,2}$")], Number]


class WeightAllocation(Record):
    """The search for the width of each Linear.

    Attributes:
        budget_bits_per_weight: stored bits per quantized weight that the recipe allows, scales and zero points
            included.
        bits_per_weight: what the allocation takes.
        units: in the order of the layers.
        predicted_kl: sum of the chosen widths' divergences.
        measured_kl: divergence with all weights rounded as chosen.
        allocations: how many were measured.
        data: the held-out calibration text that all divergences were measured on.
        dtype: in which.
    """

    budget_bits_per_weight: Size
    bits_per_weight: Size
    units: list[WeightUnit] = Field(fail_fast=True)
    predicted_kl: Number
    measured_kl: Number
    allocations: Count
    data: DataInfo
    dtype: Name


class Manifest(Record):
    """Contents of `kvconvert.json`.

    Attributes:
        format_version: of the bundle; a reader refuses a newer one.
        kvconvert_version, versions: the converter's version, and those of the libraries that shape its results.
        source, recipe, data: what was converted, by which recipe, calibrated on what.
        transforms: changes to the weights, in the order in which they were applied.
        conventions: everything else that a reader needs to know to compute the same numbers.
        layers: key-value cache of each decoder layer.
        modules: coverage, one entry per Linear and per other tensor-owning module that was kept.
        weights: how large.
        tensors: every tensor of the weight files, by name.
        plan: every tensor of `kvconvert/plan.safetensors`, by name.
        allocation: what a search over the layers' schemes measured and chose; None without one.
        weight_allocation: the same of the widths of weights.
        fidelity: measured on this bundle, or None.
        files: every load-critical file besides the manifest.
        informative: files for people, which loading ignores.
        manifest_sha256: see the module's docstring.
    """

    format_version: _Version
    kvconvert_version: Name
    versions: Annotated[dict[Name, Name], FirstFaults]
    source: SourceInfo
    recipe: Facts
    data: DataInfo | None
    transforms: list[Name] = Field(max_length=MAX_LAYERS, fail_fast=True)
    conventions: Facts
    layers: list[LayerPlan] = Field(max_length=MAX_LAYERS, fail_fast=True)
    modules: list[ModuleCoverage] = Field(max_length=MAX_ENTRIES, fail_fast=True)
    weights: WeightsInfo
    tensors: Annotated[dict[Name, TensorInfo], Field(max_length=MAX_ENTRIES), FirstFaults]
    plan: Annotated[dict[Name, TensorInfo], FirstFaults]
    allocation: Allocation | None = None
    weight_allocation: WeightAllocation | None = None
    fidelity: Fidelity | None = None
    files: Annotated[dict[FileName, FileInfo], Field(max_length=MAX_FILES), FewFiles]
    informative: list[FileName] = Field(default_factory=list, max_length=MAX_LAYERS, fail_fast=True)
    manifest_sha256: Sha256 = _UNSEALED

    def schemes(self) -> list[KVScheme | None]:
        """The KV scheme of each decoder layer; None where the cache is left to the model's own class."""
        return [layer.scheme() for layer in self.layers]

    def weight_files(self) -> list[str]:
        """Names of the files that hold the model's weights."""
        return [name for name in self.files if name.endswith(".safetensors") and name != PLAN_NAME]

    def widths(self) -> tuple[int, ...]:
        """All widths that quantized modules have, ascending."""
        return widths(self.modules)

    def files_digest(self) -> str:
        """One SHA-256 over names, sizes and hashes of all load-critical files: the identity of the contents."""
        lines = [f"{name} {info.size} {info.sha256}\n" for name, info in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def to_bytes(self) -> bytes:
        """The manifest as sealed JSON."""
        return sealed(self.model_dump(mode="json"))


def quantization_config(
    weights: WeightsInfo, modules: list[ModuleCoverage], format_version: int = FORMAT_VERSION
) -> dict[str, Any]:
    """The `quantization_config` of the bundle's config.json, which writer and reader derive alike.

    Weights of 4 bits are declared the way every AWQ engine reads them, and the key `kvconvert` marks the rest. Where
    any module has another width the weights are no AWQ checkpoint, and are not said to be one.
    """
    mark = {"format_version": format_version}
    if weights.method == "none":
        return {"quant_method": "awq", "version": OWN_VERSION, "weights": "none", "kvconvert": mark}
    if widths(modules) != AWQ_BITS:
        return {
            "quant_method": "awq",
            "version": OWN_VERSION,
            "weights": weights.method,
            "bits": list(widths(modules)),
            "group_size": weights.group_size,
            "modules_to_not_convert": _unconverted(modules),
            "kvconvert": mark,
        }
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": weights.group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": _unconverted(modules),
        "kvconvert": mark,
    }


def widths(modules: list[ModuleCoverage]) -> tuple[int, ...]:
    """All widths that quantized modules have, ascending."""
    return tuple(sorted({module.bits for module in modules if module.method != "kept" and module.bits is not None}))


def _unconverted(modules: list[ModuleCoverage]) -> list[str]:
    """Kept Linears for AWQ engines: each one's outermost module without any quantized Linear, such as a vision tower.

    Engines compare with the checkpoint's names or with the loaded model's; where these differ, both are listed.
    """
    quantized = sorted(
        full.split(".") for module in modules if module.method != "kept" for full in (module.prefix, module.name)
    )
    found: dict[str, None] = {}
    for module in modules:
        if module.kind == "linear" and module.method == "kept":
            for full in (module.prefix, module.name):
                parts = full.split(".")
                at = bisect_left(quantized, parts)
                # In this order the names that share most with one are beside it.
                shared = max((_modules_around(parts, name) for name in quantized[max(0, at - 1) : at + 1]), default=0)
                # Engines look for these names in others', where layers.1 is also the beginning of layers.10.
                shared += parts[: shared + 1][-1].isdigit()
                found[".".join(parts[: shared + 1])] = None
    return list(found)


def _modules_around(first: list[str], second: list[str]) -> int:
    """How many modules lie around both of two, from the outermost on."""
    most = min(len(first), len(second) - 1)
    return next((depth for depth in range(most) if first[depth] != second[depth]), most)


def sealed(fields: dict[str, Any]) -> bytes:
    """A manifest's fields as JSON that ends with its seal."""
    fields = {name: value for name, value in fields.items() if name != "manifest_sha256"}
    text = json.dumps(fields | {"manifest_sha256": _UNSEALED}, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    seal = hashlib.sha256(text.encode()).hexdigest()
    head, tail = text.rsplit(_UNSEALED, 1)
    return (head + seal + tail).encode()


def unseal(content: bytes, seal: str) -> str:
    """The SHA-256 that `content`, a manifest's bytes that claim `seal`, ought to claim."""
    head, found, tail = content.rpartition(seal.encode()) if seal else (content, b"", b"")
    return hashlib.sha256(head + _UNSEALED.encode() * bool(found) + tail).hexdigest()


def conventions(layers: list[LayerPlan], weights_method: StoredMethod, widths: Collection[int]) -> dict[str, Any]:
    """Conventions for a reader that shares no code with kvconvert to compute the same numbers from this bundle."""
    planned = [(scheme, layer.shape()) for layer in layers if (scheme := layer.scheme()) is not None]
    return awq.conventions(weights_method, widths) | layer_conventions(planned)


def manifest_schema() -> dict[str, Any]:
    """The manifest's JSON Schema (draft 2020-12), for other languages: which fields there are, not what they mean."""
    found = Manifest.model_json_schema()
    # Descriptions would be the docstrings of Python classes, whose attribute lists say nothing to a validator.
    for record in (found, *found.get("$defs", {}).values()):
        record["description"] = record.get("description", "").split("\n")[0]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def schema_text() -> str:
    """The schema as the file in docs has it."""
    return json.dumps(manifest_schema(), indent=1) + "\n"
