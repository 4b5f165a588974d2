"""Loading a bundle, with its generation_config.json as transformers' object."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from kvconvert.arguments import BundlePlace, HeadBits, checked
from kvconvert.bundle.files import read_settings
from kvconvert.bundle.generation import NAME as GENERATION_CONFIG
from kvconvert.bundle.generation import GenerationSettings, configured_settings, read_generation, stop_tokens
from kvconvert.bundle.locate import locate
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import BundleError, UsageError, first_line
from kvconvert.models.configuration import context_length, model_class, read_config, supports_images
from kvconvert.models.devices import choose_device
from kvconvert.models.processors import has_processor, load_processor, load_tokenizer, tokenizer_of
from kvconvert.runtime.hf.bundle_quantizer import WHOLE, BundleConfig, Verify, check_fits
from kvconvert.runtime.hf.vocabulary import narrow_vocabulary

Place = str | int | torch.device
MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # places that are no devices


@checked
def load(
    bundle: BundlePlace,
    *,
    dtype: Annotated[torch.dtype | str, "torch.bfloat16, torch.float32, torch.float16, or 'auto'"] | None = None,
    device_map: Annotated[Place | dict[str, Place], "a device, 'auto', or a dict from modules to devices"]
    | None = None,
    tp_plan: Any = None,
    verify: Verify = "full",
    head_bits: HeadBits | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    local_files_only: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | ProcessorMixin]:
    """Load a bundle's model and its tokenizer; of a vision-language model its processor, if the bundle has one.
    Batches are padded on the left, as generation needs.

    `model.generate(...)` then follows the bundle's KV plan by default, and `model.new_kv_cache()` makes a cache for
    other loops.

    Args:
        bundle: a directory, or the id of a repository on the Hub ("owner/name").
        dtype: of activations and of everything that is not packed; "auto" takes the one in the bundle's config.json,
            and so does None, but on a CPU float32 instead of float16. bfloat16 is the fastest on a CPU even without
            instructions for it: 4-bit weights have a faster product for few rows, and what the processor does slowly is
            computed in float32.
        device_map: as in `from_pretrained`.
        tp_plan: None. Bundles are not divided among processes here: the vLLM plugin serves tensor parallelism.
        verify: "full" hashes every file; "headers" trusts the contents and checks everything else.
        head_bits: 8 rounds the embedding and the head, which bundles have in 16 bits, as they are loaded: half of their
            memory, which in models of a few hundred million parameters is much of all.
        revision: branch, tag or commit of a Hub repository.
        token: for private repositories; None takes the one stored by `hf auth login`, False sends none.
        local_files_only: use a Hub repository only as far as it is in the Hub's cache; nothing is fetched.

    Raises:
        BundleError: there is no bundle, it cannot be fetched, or it does not hold what its manifest says.
        UsageError: an argument that is not possible, or the processor needs a package that is not installed.
        CheckpointError: transformers cannot load the tokenizer or the processor.
        UnsupportedModelError: a head or an embedding of a kind that `head_bits` does not take.
    """
    if tp_plan is not None:
        raise UsageError(WHOLE)
    directory = locate(bundle, revision=revision, token=token, local_files_only=local_files_only)
    named = getattr(torch, dtype, dtype) if isinstance(dtype, str) and dtype != "auto" else dtype
    if named not in (None, "auto") and not getattr(named, "is_floating_point", False):
        raise UsageError(f"`dtype` is {dtype!r}; it may be auto, torch.float32, torch.bfloat16 or torch.float16.")
    places = device_map.values() if isinstance(device_map, dict) else {device_map} - {None, *MAPS}
    for place in places:
        choose_device(f"cuda:{place}" if isinstance(place, int) else place, "device_map")
    # All of it is verified before transformers reads any of it, and the model built without weights before weights are.
    verified = open_bundle(directory, verify=verify)
    with verified.files.unchanged():  # which transformers opens again
        check_fits(verified)
        config = read_config(verified.directory, verified.config)
        processes = supports_images(config) and has_processor(directory)
        processor = load_processor(directory) if processes else load_tokenizer(directory)
        # New tokens follow the last column.
        tokenizer_of(processor).padding_side = "left"
        file = directory / GENERATION_CONFIG
        stated = read_settings(file) if file.exists() else configured_settings(verified.config)
        generation = read_generation_config(stated, config, tokenizer_of(processor))
        config.quantization_config = BundleConfig(verified.config["quantization_config"], verify, verified)
        model = model_class(config).from_pretrained(
            directory,
            config=config,
            dtype=dtype or _default_dtype(config, device_map),
            device_map=device_map,
            generation_config=generation,
        )
    if head_bits is not None:
        narrow_vocabulary(model)
    return model, processor


def _default_dtype(config: PretrainedConfig, device_map: Any) -> torch.dtype | Literal["auto"]:
    """The bundle's own dtype, unless it is float16 and the model goes to a CPU."""
    on_cpu = device_map is None or str(device_map) == "cpu" or (device_map == "auto" and not torch.cuda.is_available())
    return torch.float32 if on_cpu and getattr(config, "dtype", None) == torch.float16 else "auto"


logger = logging.getLogger(__name__)


def generation_settings(
    stated: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None
) -> GenerationSettings:
    """The fields of a generation_config.json, checked and translated; its end-of-sequence tokens are all there are.

    Args:
        stated: contents of the file, or of transformers' object.
        config: the model's config.
        tokenizer: the model's tokenizer; None leaves its end-of-sequence token out.

    Raises:
        BundleError: a field that nothing can apply.
    """
    if not isinstance(stated, Mapping):
        raise BundleError(
            f"generation_config.json holds {stated!r:.40} and no object; correct the source and export it."
        )
    parts = (config, config.get_text_config(decoder=True))
    configured = [getattr(part, "eos_token_id", None) for part in parts]
    vocabulary = getattr(parts[1], "vocab_size", None)
    if tokenizer is None:
        return read_generation(stated, stop_tokens(stated, configured), vocabulary)
    special = {*getattr(tokenizer, "added_tokens_decoder", ()), *getattr(tokenizer, "all_special_ids", ())}
    end = getattr(tokenizer, "eos_token_id", None)
    return read_generation(stated, stop_tokens(stated, configured, end, special), vocabulary)


def read_generation_config(
    stated: Any, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> GenerationConfig:
    """The same as transformers' object; warns of fields that are left out.

    Args:
        stated: contents of the file, or what `configured_settings` gave.
        config, tokenizer: the model's config and tokenizer.

    Raises:
        BundleError: a field that nothing can apply.
    """
    settings = generation_settings(stated, config, tokenizer)
    if warning := settings.warning("kvconvert"):
        logger.warning("%s", warning)
    values, positions = dict(settings.values), context_length(config)
    for name in ("max_length", "max_new_tokens"):  # a stranger's may be a billion
        if name in values and positions is not None:
            values[name] = min(values[name], positions)
    try:
        return GenerationConfig(**values)
    except (ValueError, TypeError, AttributeError) as error:
        raise BundleError(
            f"transformers does not accept generation_config.json ({first_line(error)}); correct the source and "
            "export it."
        ) from error
