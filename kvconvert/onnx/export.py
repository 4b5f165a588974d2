"""Export to ONNX: from a bundle, or from a finished calibration, to a directory for ONNX Runtime."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor

from kvconvert.arguments import NAMED, Folder, checked
from kvconvert.bundle.files import read_settings
from kvconvert.bundle.generation import NAME, GenerationSettings, configured_settings
from kvconvert.bundle.locate import GENAI_NAME, MANIFEST_NAME, ONNX_EXPORT, check_output, locate
from kvconvert.bundle.reader import Bundle, open_bundle
from kvconvert.bundle.writer import replacing, write_json
from kvconvert.convert.export import COPIED_FILES, LICENSE_FILES, copy_files, export
from kvconvert.convert.workdir import WorkDir
from kvconvert.io.hub import is_hub_id
from kvconvert.io.regular import open_tensors
from kvconvert.models.configuration import read_config
from kvconvert.models.devices import Device, choose_device
from kvconvert.models.processors import load_tokenizer
from kvconvert.onnx import check_installed
from kvconvert.onnx.architecture import DecoderShape, StaticCache, has_plan, static_bits, static_cache
from kvconvert.runtime.hf.bundle_quantizer import check_fits
from kvconvert.runtime.hf.load import generation_settings
from kvconvert.version import __version__

logger = logging.getLogger(__name__)
MODEL_NAME = "model.onnx"
DATA_NAME = "model.onnx.data"


@checked
def export_onnx(
    source: Annotated[str | Path, NAMED, "a bundle or a working directory"],
    output: Folder,
    *,
    kv_cache: Literal["plan", "float"] = "plan",
    int8_activations: bool = False,
    force: bool = False,
    device: Device | None = None,
    progress: bool = True,
) -> Path:
    """Write a decoder graph for ONNX Runtime, with genai_config.json and the tokenizer's files.

    Args:
        source: a bundle, its id on the Hub, or the finished working directory of `calibrate`, of which a bundle is made
            first, its limits included.
        output: directory to write.
        kv_cache: "plan" follows the bundle's KV plan, which has to be one of static scales, and gives a bundle without
            a plan a float32 cache; "float" leaves the plan out.
        int8_activations: let MatMulNBits round activations to int8 in blocks, which is faster and less exact.
        force: replace an earlier ONNX export; of a working directory, also accept missed limits.
        device: where the limits of a working directory's recipe are measured.
        progress: show a progress bar while a working directory is made a bundle.

    Returns:
        the path of the directory.

    Raises:
        UnsupportedModelError: the graph cannot express the model or its plan; the message says what is in the way.
        UsageError: the output exists, or the package onnx is missing.
        BundleError: the bundle is damaged, changes meanwhile, or has settings of generation that nothing can apply.
        KvconvertError: the disk is full or cannot be written. Nothing is left behind after any error.
    """
    choose_device(device)
    check_installed()
    from kvconvert.onnx.decoder import DecoderGraph, Graph, Weights

    target = Path(output)
    check_output(target, force, kind=ONNX_EXPORT)
    found = _source(source)
    if kv_cache == "plan" and not (found / MANIFEST_NAME).is_file():  # before a bundle is made of it
        work = WorkDir.open(found)
        plans = [work.layer_record(index) for index in range(work.state.num_layers)]
        if has_plan(plans):
            static_bits(plans)
    with _bundle(found, target, force, device, progress) as bundle:
        decoder, cache = _plan(bundle, kv_cache)
        generation = _generation(bundle, decoder)
        with replacing(target, force, kind=ONNX_EXPORT) as directory:
            with (directory / DATA_NAME).open("wb") as data:
                graph = Graph(data, DATA_NAME)
                weights = Weights(bundle.manifest.tensors, _reader(bundle), accuracy_level=4 if int8_activations else 0)
                built = DecoderGraph(decoder, weights, graph, cache)
                built.build()
            graph.save(directory / MODEL_NAME, built.inputs(), built.outputs(), _metadata(bundle, cache))
            write_json(directory / GENAI_NAME, genai_config(decoder, generation, MODEL_NAME))
            # Some tokenizers ask for the configuration; the packed weights that it describes are the bundle's.
            write_json(
                directory / "config.json", {k: v for k, v in bundle.config.items() if k != "quantization_config"}
            )
            copy_files(bundle.directory, directory, (*COPIED_FILES, *LICENSE_FILES))
            bundle.files.check_unchanged()  # since they were verified, files were opened again
    return target


def _source(source: str | Path) -> Path:
    """A working directory or a bundle; what is no path, and can be the id of a bundle on the Hub, is fetched."""
    return Path(source) if os.path.exists(source) or not is_hub_id(source) else locate(source)


@contextmanager
def _bundle(source: Path, output: Path, force: bool, device: Device | None, progress: bool) -> Iterator[Bundle]:
    """The bundle at `source`, or one that is made of the working directory there and removed afterwards."""
    if (source / MANIFEST_NAME).is_file():
        yield open_bundle(source)
        return
    output.resolve().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.bundle-", dir=output.resolve().parent) as temporary:
        yield open_bundle(
            export(source, Path(temporary, "bundle"), force=force, device=device, progress=progress), verify="headers"
        )


def _plan(bundle: Bundle, kv_cache: str) -> tuple[DecoderShape, StaticCache | None]:
    """The graph to be built, after all refusals."""
    decoder = DecoderShape.of(read_config(bundle.directory, bundle.config))
    check_fits(bundle, complete=True)
    quantized = kv_cache == "plan" and has_plan(bundle.manifest.layers)
    return decoder, static_cache(bundle, decoder.attention_softcap) if quantized else None


def _reader(bundle: Bundle) -> Callable[[str], Tensor]:
    """Reads one tensor at a time; files stay mapped, and their pages belong to the system."""

    def read(name: str) -> Tensor:
        with open_tensors(bundle.weight_files[name]) as file:
            return file.get_tensor(name)

    return read


def _metadata(bundle: Bundle, cache: StaticCache | None) -> dict[str, str]:
    """Where the graph comes from."""
    manifest = bundle.manifest
    return {
        "kvconvert_version": __version__,
        "bundle_manifest_sha256": manifest.manifest_sha256,
        "source": manifest.source.id,
        "kv_cache": "float32" if cache is None else f"int{cache.bits}, static scales per channel",
    }


# Of generation_config.json, what onnxruntime-genai knows by the same names, and what means nothing to a decoder there.
_SEARCH = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "min_length", "num_beams")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_UNUSED = ("use_cache", "max_length", "decoder_start_token_id")


def _generation(bundle: Bundle, decoder: DecoderShape) -> GenerationSettings:
    """The bundle's settings as `load` applies them; warns of those that onnxruntime-genai does not."""
    path = bundle.directory / NAME
    tokenizer = load_tokenizer(bundle.directory) if "tokenizer_config.json" in bundle.manifest.files else None
    stated = read_settings(path) if path.is_file() else configured_settings(bundle.config)
    found = generation_settings(stated, decoder.config, tokenizer)
    warning = found.without(found.values.keys() - {*_SEARCH, *_TOKENS, *_UNUSED}).warning("onnxruntime-genai")
    if warning:
        logger.warning("%s", warning)
    return found


def genai_config(decoder: DecoderShape, generation: GenerationSettings, model_file: str) -> dict[str, Any]:
    """The configuration of onnxruntime-genai.

    Args:
        decoder: the model's shape.
        generation: the model's settings.
        model_file: name of the graph's file.
    """
    stated = generation.values
    end = stated.get("eos_token_id")
    first_end = end[0] if isinstance(end, list) else end
    tokens = {name: stated.get(name, getattr(decoder.config, name, None)) for name in ("bos_token_id", "pad_token_id")}
    tokens["eos_token_id"] = end
    if tokens["pad_token_id"] is None:
        tokens["pad_token_id"] = first_end
    search = {name: stated[name] for name in _SEARCH if name in stated}
    return {
        "model": {
            "type": decoder.model_type,
            "vocab_size": decoder.vocab_size,
            "context_length": decoder.max_positions,
            **{name: value for name, value in tokens.items() if value is not None},
            "decoder": {
                "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
                "filename": model_file,
                "hidden_size": decoder.hidden_size,
                "head_size": decoder.head_dim,
                "num_attention_heads": decoder.num_heads,
                "num_key_value_heads": decoder.num_kv_heads,
                "num_hidden_layers": decoder.num_layers,
                "inputs": {
                    "input_ids": "input_ids",
                    "attention_mask": "attention_mask",
                    "past_key_names": "past_key_values.%d.key",
                    "past_value_names": "past_key_values.%d.value",
                },
                "outputs": {
                    "logits": "logits",
                    "present_key_names": "present.%d.key",
                    "present_value_names": "present.%d.value",
                },
            },
        },
        "search": {"max_length": decoder.max_positions, "past_present_share_buffer": True} | search,
    }
