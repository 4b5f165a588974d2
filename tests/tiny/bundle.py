"""A fabricated bundle of a few kilobytes, and how to spoil it so that one check after another has to notice."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvconvert.bundle.locate import MANIFEST_NAME, PLAN_NAME
from kvconvert.bundle.manifest import (
    FORMAT_VERSION,
    FileInfo,
    LayerPlan,
    Manifest,
    ModuleCoverage,
    quantization_config,
    sealed,
)
from kvconvert.bundle.reader import open_bundle
from kvconvert.bundle.statements import weights_info
from kvconvert.bundle.writer import write_json, write_manifest, write_weights
from kvconvert.errors import BundleError
from kvconvert.io.records import DataInfo, SourceInfo
from kvconvert.io.tensorfile import tensor_info, write_tensors
from kvconvert.methods import KVScheme

SIZES = {"head_dim": 16, "num_key_value_heads": 2, "value_group_size": 16}
HIDDEN, INTERMEDIATE, GROUP = 32, 64, 16
SHAPES = {"q_proj": (HIDDEN, HIDDEN), "down_proj": (INTERMEDIATE, HIDDEN)}


def describe_files(directory: Path, names: Iterable[str]) -> dict[str, FileInfo]:
    """Size and SHA-256 of each named file, in the order of their names."""
    described = {}
    for name in sorted(names):
        with (directory / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        described[name] = FileInfo(size=(directory / name).stat().st_size, sha256=digest)
    return described


def tiny_tensors() -> dict[str, Tensor]:
    """Two layers with two quantized Linears each, beside an embedding and norms."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        for name, (inputs, outputs) in SHAPES.items():
            module = f"model.layers.{layer}.{name}"
            for part, rows in (("qweight", inputs), ("qzeros", inputs // GROUP)):
                tensors[f"{module}.{part}"] = torch.randint(
                    -(2**31), 2**31 - 1, (rows, outputs // 8), dtype=torch.int32, generator=generator
                )
            tensors[f"{module}.scales"] = torch.rand(inputs // GROUP, outputs, generator=generator).half() + 0.01
        tensors[f"model.layers.{layer}.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors["model.embed_tokens.weight"] = torch.randn(24, HIDDEN, generator=generator).bfloat16()
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return tensors


def tiny_manifest(tensors: dict[str, Tensor], plan: dict[str, Tensor]) -> Manifest:
    """What the exporter would write, without the files."""
    quantized = [
        ModuleCoverage(
            name=f"model.layers.{layer}.{name}",
            method="awq",
            bits=4,
            group_size=GROUP,
            in_features=inputs,
            out_features=outputs,
        )
        for layer in range(2)
        for name, (inputs, outputs) in SHAPES.items()
    ]
    kept = [
        ModuleCoverage(name="model.embed_tokens", kind="embedding", method="kept", reason="outside the decoder layers"),
        ModuleCoverage(name="lm_head", method="kept", reason="shares the embedding's weight"),
    ]
    scheme = KVScheme.preset("oscar")
    infos = {name: tensor_info(tensor) for name, tensor in tensors.items()}
    return Manifest(
        format_version=FORMAT_VERSION,
        kvconvert_version="0.1.0",
        versions={"torch": "2.13.0"},
        source=SourceInfo(id="somebody/tiny", config_sha256="0" * 64, weights_sha256={"model.safetensors": "1" * 64}),
        recipe={"name": "default", "limits": {"max_kl": 0.05}},
        data=DataInfo(source="books-calib.txt", samples=1, length=8, seed=0, sha256="2" * 64),
        transforms=["fold_value_rotation", "quantize_weights"],
        conventions={"page_tokens": 128},
        layers=[LayerPlan(index=i, kv=scheme.to_dict(), rotation="sylvester(16)", **SIZES) for i in range(2)],
        modules=quantized + kept,
        weights=weights_info(quantized + kept, infos),
        tensors=infos,
        plan={name: tensor_info(tensor) for name, tensor in plan.items()},
        files={},
        informative=["README.md"],
    )


def write_tiny_bundle(directory: Path, max_shard_bytes: int = 4000) -> Manifest:
    """Fill `directory` with a valid bundle; 4,000 bytes a shard makes two shards."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tiny_tensors()
    plan = {f"layers.{layer}.key_mean_abs": torch.ones(2, 16) for layer in range(2)}
    manifest = tiny_manifest(tensors, plan)
    infos = {name: tensor_info(tensor) for name, tensor in tensors.items()}
    files = write_weights(directory, infos, tensors.__getitem__, max_shard_bytes)
    (directory / PLAN_NAME).parent.mkdir()
    write_tensors(directory / PLAN_NAME, manifest.plan, plan.__getitem__)
    config: dict[str, Any] = {"model_type": "llama", "num_hidden_layers": 2}
    config["quantization_config"] = quantization_config(manifest.weights, manifest.modules)
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", {"version": "1.0"})
    write_json(directory / "generation_config.json", {"eos_token_id": 0})
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "README.md").write_text("# tiny\n")
    names = [*files, PLAN_NAME, "config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja"]
    manifest = manifest.model_copy(update={"files": describe_files(directory, names)})
    write_manifest(directory, manifest)
    return manifest


def reseal(directory: Path, **changes: Any) -> None:
    """Describe all files anew, so that hashes fit whatever was done to them, and apply `changes` to the manifest."""
    fields = json.loads((directory / MANIFEST_NAME).read_text())
    present = [name for name in fields["files"] if (directory / name).is_file()]
    fields["files"] = {name: info.model_dump() for name, info in describe_files(directory, present).items()}
    fields |= changes
    (directory / MANIFEST_NAME).write_bytes(sealed(fields))


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    write_json(path, json.loads(path.read_text()) | changes)


def replace_tensors(path: Path, **changes: Tensor | None) -> None:
    """Rewrite a safetensors file with tensors replaced, added, or (None) removed; dots in names are given as `__`."""
    from safetensors.torch import load_file

    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    write_tensors(path, {name: tensor_info(tensor) for name, tensor in tensors.items()}, tensors.__getitem__)


def refusal(directory: Path, verify: str = "headers") -> str:
    """The one-sentence message with which the bundle is refused."""
    with pytest.raises(BundleError) as caught:
        open_bundle(directory, verify=verify)
    message = str(caught.value)
    assert "\n" not in message
    return message


def change_after_verification(monkeypatch: pytest.MonkeyPatch, module: Any, path: Path) -> None:
    """Let a file of a bundle, which `module` opens, be written anew with its content as soon as all was verified."""
    opened = module.open_bundle

    def verified_then_changed(*arguments: Any, **options: Any) -> Any:
        found = opened(*arguments, **options)
        if options.get("verify", "full") == "full":
            path.write_bytes(path.read_bytes())
        return found

    monkeypatch.setattr(module, "open_bundle", verified_then_changed)
