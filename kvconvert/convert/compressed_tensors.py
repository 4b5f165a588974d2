"""Export as a compressed-tensors checkpoint ("pack-quantized", 4 or 8 bits, asymmetric), for engines that read it.

A Linear of `in` inputs and `out` outputs in groups of g inputs is stored, with n = 32 / bits codes in a word, as (the
format's own definition is the package compressed-tensors):

    weight_packed      int32 [out, in / n]         code of input n c + i in bits `bits` i and up of column c
    weight_scale       fp16 [out, in / g]          weight_zero_point  int32 [out / n, in / g], packed along outputs
    weight_shape       int64 [2]                   weight = (q - z) * scale

Codes, zeros and scales are those of a bundle, laid out anew; nothing is rounded again. The format has no place for a KV
plan: its caches are fp8 with one scale each for a layer's keys and values. These are written where calibration fixed
the ranges of what an engine stores, which is to say with `static_scales = "calibrated"` and no rotation at run time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvconvert.bundle.files import INDEX_NAME
from kvconvert.bundle.locate import CHECKPOINT, check_output
from kvconvert.bundle.manifest import Manifest, ModuleCoverage
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.bundle.writer import MAX_SHARD_BYTES, replacing, write_json, write_weights
from kvconvert.convert.export import export
from kvconvert.errors import UsageError
from kvconvert.io.records import TensorInfo
from kvconvert.io.regular import open_tensors
from kvconvert.kernels.linear.awq_format import AwqWeight, unpack_bits
from kvconvert.kernels.packing import pack_words

FP8_LARGEST = 448.0  # of float8_e4m3fn
WIDTHS = (4, 8)
_PARTS = ("qweight", "qzeros", "scales")


def export_compressed_tensors(
    work: str | Path,
    directory: str | Path,
    *,
    force: bool = False,
    device: str | None = None,
    progress: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> bool:
    """Write a finished calibration's weights as a compressed-tensors checkpoint, which is no bundle.

    Args:
        work: the finished working directory of `calibrate`.
        directory: to write; as for `export`.
        force: replace an earlier checkpoint of this kind, and accept missed limits.
        device, progress, max_shard_bytes: as for `export`.

    Returns:
        whether fp8 scales of keys and values were written.

    Raises:
        UsageError: nothing is quantized, or the weights are those of experts, of 2 or 3 bits, or of several widths.
        KvconvertError: see `export`.
    """
    output = Path(directory)
    check_output(output, force, CHECKPOINT)
    with replacing(output, force, CHECKPOINT) as temporary:
        inner = temporary / "bundle"
        bundle = open_bundle(export(work, inner, force=force, device=device, progress=progress), verify="headers")
        quantized = _packable(bundle.manifest)
        scales = kv_scales(bundle)
        _write(temporary, bundle, quantized, scales, max_shard_bytes)
        for name in (*bundle.manifest.files, *bundle.manifest.informative):
            if name in bundle.manifest.weight_files() or name in ("config.json", INDEX_NAME, "README.md"):
                continue
            if not name.startswith("kvconvert/"):
                (temporary / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(inner / name, temporary / name)
        shutil.rmtree(inner)
    return bool(scales)


def pack_quantized(packed: AwqWeight) -> dict[str, Tensor]:
    """The tensors of one Linear in compressed-tensors' layout, by their names without the module's."""
    bits = packed.bits
    codes, zeros = unpack_bits(packed.qweight, bits).T, unpack_bits(packed.qzeros, bits)
    return {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": packed.scales.T.contiguous(),
        "weight_zero_point": pack_words(zeros, bits).T.contiguous(),
        "weight_shape": torch.tensor(codes.shape),
    }


def kv_scales(bundle: Bundle) -> dict[str, Tensor]:
    """fp8 scales of keys and values, float32 [1], by tensor name; none unless every layer's ranges are known.

    The scale maps the largest magnitude that calibration found in any channel of the layer to 448.
    """
    attention = {
        int(part): module.prefix.rpartition(".")[0]
        for module in bundle.manifest.modules
        if module.name.endswith("self_attn.k_proj")
        for part in [module.name.rpartition("layers.")[2].split(".")[0]]
    }
    scales: dict[str, Tensor] = {}
    for layer, scheme in zip(bundle.manifest.layers, bundle.manifest.schemes(), strict=True):
        if scheme is None or scheme.rotate_keys != "none" or scheme.rotate_values == "online":
            return {}
        for side, name in zip(scheme.sides, ("k_scale", "v_scale"), strict=True):
            step = bundle.plan.get(f"layers.{layer.index}.static_{side.name}_scale")
            low = bundle.plan.get(f"layers.{layer.index}.static_{side.name}_zero_point")
            if step is None or low is None or layer.index not in attention:
                return {}
            high = low.float() + step.float() * (2**side.bits - 1)
            largest = torch.maximum(low.float().abs(), high.abs()).amax()
            scales[f"{attention[layer.index]}.{name}"] = (largest / FP8_LARGEST).reshape(1)
    return scales


def quantization_config(manifest: Manifest, with_kv_scales: bool) -> dict[str, Any]:
    """The `quantization_config` of config.json."""
    weights = {
        "num_bits": manifest.weights.bits,
        "type": "int",
        "symmetric": False,
        "strategy": "group",
        "group_size": manifest.weights.group_size,
        "dynamic": False,
    }
    kept = [module for module in manifest.modules if module.kind == "linear" and module.method == "kept"]
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
        },
        "ignore": list(dict.fromkeys(name for module in kept for name in (module.prefix, module.name))),
        "kv_cache_scheme": cache if with_kv_scales else None,
        # For transformers alone, other readers pass over it. Its default way builds the model with zero points that are
        # not packed (transformers 5.23, compressed-tensors 0.20), and then refuses every asymmetric checkpoint.
        "dequantize": True,
    }


def _packable(manifest: Manifest) -> dict[str, ModuleCoverage]:
    """Quantized modules by their names in the weight files."""
    quantized = {module.prefix: module for module in manifest.modules if module.method != "kept"}
    if not quantized:
        raise UsageError(
            'compressed-tensors export packs quantized weights, but with weights.method = "none" nothing is quantized; '
            "export a bundle, whose weights are an ordinary checkpoint."
        )
    if len(manifest.widths()) > 1:
        stated = " and ".join(map(str, manifest.widths()))
        raise UsageError(
            f"The Linears have weights of {stated} bits; compressed-tensors export writes one width, for transformers "
            "takes that of the first of them for all."
        )
    for name, module in quantized.items():
        if module.bits not in WIDTHS:
            raise UsageError(f"{name} has {module.bits} bits; compressed-tensors export writes 4 or 8 bits.")
        if ".experts." in name:
            raise UsageError(f"{name} is an expert's; compressed-tensors export does not write mixtures of experts.")
    return quantized


def _write(
    directory: Path, bundle: Bundle, quantized: dict[str, ModuleCoverage], scales: dict[str, Tensor], shard_bytes: int
) -> None:
    """Weight files, index and config.json."""
    infos: dict[str, TensorInfo] = {}
    made: dict[str, Callable[[], Tensor]] = {}
    current: tuple[str, dict[str, Tensor]] = ("", {})

    def stored(name: str) -> Tensor:
        with open_tensors(bundle.weight_files[name]) as stream:
            return stream.get_tensor(name)

    def part_of(module: str, part: str) -> Tensor:
        nonlocal current
        if current[0] != module:
            current = (module, pack_quantized(AwqWeight(*(stored(f"{module}.{name}") for name in _PARTS))))
        return current[1][part]

    for name, info in bundle.manifest.tensors.items():
        module, _, part = name.rpartition(".")
        if module not in quantized or part not in _PARTS:
            infos[name], made[name] = info, lambda name=name: stored(name)
        elif part == "qweight":
            for new, new_info in _infos(quantized[module]).items():
                infos[f"{module}.{new}"] = new_info
                made[f"{module}.{new}"] = lambda module=module, new=new: part_of(module, new)
    for name, scale in scales.items():
        infos[name], made[name] = TensorInfo(dtype="F32", shape=[1]), lambda scale=scale: scale
    write_weights(directory, infos, lambda name: made[name](), shard_bytes)
    config = bundle.config | {"quantization_config": quantization_config(bundle.manifest, bool(scales))}
    write_json(directory / "config.json", config)


def _infos(module: ModuleCoverage) -> dict[str, TensorInfo]:
    """Types and shapes of a quantized Linear's tensors."""
    inputs, outputs = module.in_features or 0, module.out_features or 0
    groups, in_word = inputs // (module.group_size or inputs), 32 // (module.bits or 4)
    return {
        "weight_packed": TensorInfo(dtype="I32", shape=[outputs, inputs // in_word]),
        "weight_zero_point": TensorInfo(dtype="I32", shape=[outputs // in_word, groups]),
        "weight_scale": TensorInfo(dtype="F16", shape=[outputs, groups]),
        "weight_shape": TensorInfo(dtype="I64", shape=[2]),
    }
