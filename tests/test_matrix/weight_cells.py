"""The matrix on the side of weights: an architecture is calibrated, exported and loaded, and watched on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from kv_cells import generate
from kv_reference import reference_cache
from safetensors.torch import load_file
from tiny.models import TinyModel
from tiny.structures import architecture_of, separated
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvconvert import KVScheme, Recipe, export, load
from kvconvert.bundle.manifest import Manifest, ModuleCoverage
from kvconvert.bundle.reader import open_bundle
from kvconvert.calibration import awq
from kvconvert.convert import layer_calibration, pipeline
from kvconvert.kernels.linear.awq_format import fake_quantize_weight

GROUP = 16
RECIPE = f"""
[weights]
method = "awq"
group_size = {GROUP}

[kv]
preset = "oscar"
calibrate_clip_ratios = false
"""
CACHE_ONLY = """
[weights]
method = "none"

[kv]
preset = "kivi"
calibrate_clip_ratios = false
"""
WORDS = " ".join(f"The {word} walked {i} miles to town." for i in range(60) for word in ("miller", "parson", "captain"))
PROMPT, PADDING = 136, 5


@dataclass
class Layers:
    """The float32 layers of one calibration, by their names in the model.

    Attributes:
        transformed: state before clips are applied: folded and scaled, the function of the source.
        final: state that is quantized, clips included; linears: names of the Linears that are.
    """

    transformed: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    final: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    linears: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy each layer as the pipeline finishes it."""
        before_clips: list[dict[str, Tensor]] = []
        apply_clips, converted = awq.apply_clips, layer_calibration.converted_tensors

        def watch_clips(layer: nn.Module, *args: Any) -> None:
            before_clips.append(copy.deepcopy(layer.state_dict()))
            apply_clips(layer, *args)

        def watch_layer(work: Any, *args: Any) -> dict[str, Tensor]:
            self.transformed[work.name] = before_clips.pop()
            self.final[work.name] = copy.deepcopy(work.layer.state_dict())
            self.linears[work.name] = work.structure.linears
            return converted(work, *args)

        with (
            mock.patch.object(awq, "apply_clips", watch_clips),
            mock.patch.object(layer_calibration, "converted_tensors", watch_layer),
        ):
            yield

    def model(self, entry: TinyModel, dequantized: bool) -> PreTrainedModel:
        """The source with the transformed layers, or with what their quantized form stands for."""
        model = entry.build()
        separated(model, architecture_of(model.config))
        for name, state in (self.final if dequantized else self.transformed).items():
            if dequantized:
                names = [f"{linear}.weight" for linear in self.linears[name]]
                state = state | {key: fake_quantize_weight(state[key], 4, GROUP) for key in names}
            model.get_submodule(name).load_state_dict(state)
        return model


@dataclass(frozen=True)
class WeightResult:
    """What one architecture's conversion showed.

    Attributes:
        preserved: largest change of a logit by folding and scaling, as a share of the largest, over 27 tokens.
        changed: the same by quantizing.
        loaded: mean distance between the loaded bundle's logits and those of the dequantized reference, as a share of
            what quantizing changes.
        generated: the same while generating through the bundle's pages, in a padded batch, as a share of what
            quantizing the cache changes; None where no layer has pages.
        problems: whatever the coverage gets wrong.
        manifest: of the bundle.
    """

    preserved: float
    changed: float
    loaded: float
    generated: float | None
    problems: list[str]
    manifest: Manifest


def convert(entry: TinyModel, directory: Path, recipe: str, length: int = 32) -> Path:
    """Write a tiny checkpoint into `directory`, calibrate it on sequences of a length, and export the bundle."""
    source = entry.write(directory / "source")
    (directory / "recipe.toml").write_text(recipe)
    (directory / "text.txt").write_text(WORDS)
    settings, text = Recipe.load(str(directory / "recipe.toml")), str(directory / "text.txt")
    pipeline.calibrate(
        str(source), directory / "work", recipe=settings, data=text, samples=3, seq_len=length, progress=False
    )
    return export(directory / "work", directory / "bundle", progress=False)


def weight_cell(entry: TinyModel, directory: Path) -> WeightResult:
    """Convert a tiny checkpoint in `directory` and compare every stage with the one before."""
    layers = Layers()
    with layers.watching():
        bundle = convert(entry, directory, RECIPE)
    loaded, _ = load(bundle)
    inputs = entry.inputs(2, PROMPT, padding=PADDING)
    with torch.no_grad():
        original, transformed = entry.build(), layers.model(entry, dequantized=False)
        dequantized = layers.model(entry, dequantized=True)
        before, between, after, found = (
            model(**inputs, use_cache=False).logits for model in (original, transformed, dequantized, loaded)
        )
    # Rounding differences of recurrent states grow with the prompt: by the last token they are ten times as large.
    start = (slice(None), slice(PADDING, 32))
    real = inputs["attention_mask"].bool()
    manifest = open_bundle(bundle).manifest
    return WeightResult(
        preserved=float((between - before)[start].abs().max() / before[start].abs().max()),
        changed=float((after - before)[start].abs().max() / before[start].abs().max()),
        loaded=float((found - after)[real].abs().mean() / (after - before)[real].abs().mean()),
        generated=_generated(entry, dequantized, loaded, manifest, inputs),
        problems=coverage_problems(manifest, directory / "source", bundle, dequantized),
        manifest=manifest,
    )


def _generated(
    entry: TinyModel, reference: PreTrainedModel, loaded: PreTrainedModel, manifest: Manifest, inputs: dict[str, Tensor]
) -> float | None:
    """See `WeightResult.generated`."""
    schemes = [None if layer.kv is None else KVScheme.from_dict(layer.kv) for layer in manifest.layers]
    if not any(schemes):
        return None
    # Values that the weights rotate come to the cache rotated.
    schemes = [
        replace(scheme, rotate_values="none") if scheme and scheme.rotate_values == "folded" else scheme
        for scheme in schemes
    ]
    full = generate(reference, inputs, DynamicCache(config=reference.config), None)
    tokens = full.argmax(-1)
    expected = generate(reference, inputs, reference_cache(reference, schemes, [PADDING, 0], loaded.kv_plan), tokens)
    found = generate(loaded, inputs, None, tokens)
    return float((found - expected).abs().mean() / (expected - full).abs().mean())


def coverage_problems(manifest: Manifest, source: Path, bundle: Path, model: PreTrainedModel) -> list[str]:
    """Compare coverage, files and model: every Linear and expert is listed once, with the method that it had.

    Args:
        model: with every expert apart, named as the coverage names modules.
    """
    problems = []
    stated = {module.name: module for module in manifest.modules}
    if len(stated) != len(manifest.modules):
        problems.append("a module is listed twice")
    modules = dict(model.named_modules())
    owners = {name for name, m in modules.items() if any(True for _ in m.parameters(recurse=False))}
    problems += [f"{name} is not listed" for name in sorted(owners - stated.keys())]
    problems += [f"{name} is listed and does not exist" for name in sorted(stated.keys() - owners)]
    before = _tensor_shapes(source)
    after = _tensor_shapes(bundle)
    layers = architecture_of(model.config).layers
    for name, module in stated.items():
        if name not in modules:
            continue
        inside = name.startswith(f"{layers}.")
        is_linear = isinstance(modules[name], nn.Linear)
        problems += _method_problems(name, module, is_linear and inside, after)
    packed = {name.rpartition(".")[0] for name in after if name.endswith(".qweight")}
    listed = {module.prefix for module in manifest.modules if module.method != "kept"}
    problems += [f"{name} is packed and not listed so" for name in sorted(packed - listed)]
    # Whatever is gone from the source has to be there in a packed form; fused experts by their number of weights.
    for name, shape in before.items():
        fused = len(shape) > 2 or "experts" in name
        if name not in after and name.removesuffix(".weight") not in packed and not fused:
            problems.append(f"the source's {name} is lost")
    found = sum(m.in_features * m.out_features for m in manifest.modules if m.method != "kept")
    found += sum(_numel(shape) for name, shape in after.items() if not _packed(name))
    expected = sum(map(_numel, before.values()))
    if found != expected:
        problems.append(f"the bundle holds {found} numbers and the source {expected}")
    return problems


def _method_problems(name: str, module: ModuleCoverage, quantizable: bool, files: dict[str, tuple]) -> list[str]:
    kept = module.method == "kept"
    problems = []
    if kept and not module.reason:
        problems.append(f"{name} is kept without a reason")
    if kept and f"{module.prefix}.qweight" in files:
        problems.append(f"{name} is packed and listed as kept")
    if not kept and f"{module.prefix}.weight" in files:
        problems.append(f"{name} is stored and listed as packed")
    if not kept and any(f"{module.prefix}.{part}" not in files for part in ("qweight", "qzeros", "scales")):
        problems.append(f"{name} is listed as packed and its tensors are missing")
    if not kept and (not quantizable or (module.bits, module.group_size) != (4, GROUP)):
        problems.append(f"{name} is listed as {module.method} with {module.bits} bits, and is not to be quantized so")
    return problems


def _packed(name: str) -> bool:
    return name.endswith((".qweight", ".qzeros", ".scales"))


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def _tensor_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for file in sorted(directory.glob("model*.safetensors")):
        shapes |= {name: tuple(tensor.shape) for name, tensor in load_file(file).items()}
    return shapes
