"""Facts from a model's configuration: the class that loads it, the ids that stand for media, which layers can keep
their keys and values in pages, and the shape of these.

transformers' processors put one placeholder token into a prompt for every vector that an image, a video or an audio
clip becomes.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook as on_module
from torch.nn.modules.module import register_module_parameter_registration_hook as on_parameter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    masking_utils,
)
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, get_layer_types_and_kwargs
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from kvconvert.cache import LayerCache, ModelCache
from kvconvert.errors import BundleError, UnsupportedModelError, listed
from kvconvert.io.records import MAX_LAYERS
from kvconvert.io.tensorheader import Refusal, mismatch
from kvconvert.methods import UNQUANTIZED, KVScheme
from kvconvert.methods.awq import SMALL_HIDDEN_SIZE
from kvconvert.models.positions import scaled_positions

MOST_SPARE_MODULES = 100_000  # small models leave out towers that their config describes
# No count, size, or position is larger, and a list of so many entries does no harm.
_LARGEST = 2**24
_MOST_STEPS = 500_000  # lines that Python runs while a configuration is made, counted; the largest takes 73,000
_COUNTED = tuple(os.path.dirname(module.__file__) + os.sep for module in (transformers, huggingface_hub))
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_CLASSES = {
    AutoModelForCausalLM: MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText: MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForMultimodalLM: MODEL_FOR_MULTIMODAL_LM_MAPPING,
}
Modality = Literal["visual", "audio"]
# Configs name placeholder tokens after their medium, followed by one of the endings.
MEDIA: dict[str, tuple[str, ...]] = {"visual": ("image", "video"), "audio": ("audio",)}
ENDINGS = ("token_id", "token_index")
# Layers with keys and values; those of the second line carry a recurrent state besides.
SHORT_WINDOW = 1024
ATTENTION_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
HYBRID_LAYER_TYPES = ("hybrid", "hybrid_sliding")
# What makes the masks of layers whose windows are short, in the files of those models that have such.
_MASKS = {"sliding_attention": "create_sliding_window_causal_mask", "chunked_attention": "create_chunked_causal_mask"}
# What indexers call of a layer that keeps their keys, and how attention functions are told what these chose.
INDEX_UPDATES = ("update_indexer", "update_index")
_CHOSEN = {"indices", "block_indices"}
ATTENDS_IN_PARTS = (
    "its attention is computed in several calls, over parts of the values; its cache is left to transformers"
)
# Models that handle their cache otherwise than through a layer's update() and transformers' attention interface.
OTHER_CACHES = {
    "diffllama": ATTENDS_IN_PARTS,
    "doge": "its attention adds to its scores what it computes of all values; its cache is left to transformers",
    "hrm_text": "it runs each layer several times, with a cache for each; its cache is left to transformers",
    "jetmoe": "its attention repeats the keys and values of its cache by itself; its cache is left to transformers",
    "minimax": "minimax takes no cache but its own class of transformers, which holds its linear attention",
    "mllama_text_model": "Llama 3.2 Vision reads the tensors of its cache by itself; its cache is left to transformers",
}


def model_class(config: PretrainedConfig) -> Any:
    """The Auto class that loads a model: of causal, vision-language, or audio-language and other multimodal models.

    Where several of them know the configuration, its `architectures` decide.
    """
    has_vision = getattr(config, "vision_config", None) is not None
    order = sorted(_CLASSES, key=lambda auto: has_vision and auto is not AutoModelForImageTextToText)
    known = {auto: _built(auto, config) for auto in order if type(config) in _CLASSES[auto]}
    stated = set(getattr(config, "architectures", None) or [])
    return next((auto for auto, names in known.items() if names & stated), next(iter(known), AutoModelForCausalLM))


def supports_images(config: PretrainedConfig) -> bool:
    """Whether a model is loaded with its vision tower."""
    return getattr(config, "vision_config", None) is not None and model_class(config) is AutoModelForImageTextToText


def _built(auto: type, config: PretrainedConfig) -> set[str]:
    """Names of the classes that an Auto class builds from a configuration."""
    built = _CLASSES[auto][type(config)]
    return {model.__name__ for model in (built if isinstance(built, tuple) else (built,))}


def placeholder_ids(config: PretrainedConfig, modality: Modality) -> tuple[int, ...]:
    """Ids of a modality's placeholder tokens, from the config or, if it names none, from those nested in it.

    Raises:
        UnsupportedModelError: the config names no such token.
    """
    text = config.get_text_config(decoder=True)
    nested = [part for name in config.sub_configs if isinstance(part := getattr(config, name, None), PretrainedConfig)]
    # Qwen-Omni has several language models with ids of their own; the cache is that of the one with the text config.
    around_text = [part for part in nested if part.get_text_config(decoder=True) is text]
    names = [f"{medium}_{ending}" for medium in MEDIA[modality] for ending in ENDINGS]
    for parts in ([config], around_text, nested):
        found = {getattr(part, name, None) for part in parts for name in names}
        ids = sorted(i for i in found if isinstance(i, int) and i >= 0)
        if ids:
            return tuple(ids)
    media = " or ".join(MEDIA[modality])
    raise UnsupportedModelError(
        f'[kv] modality = "{modality}" is not possible for {config.model_type}: its config names no {media} token '
        f'({MEDIA[modality][0]}_token_id); set modality = "all", or give the config of the whole model.'
    )


def layer_types_of(config: PretrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The type of each layer in transformers' terms, and the arguments of transformers' cache for it.

    "dummy" is a layer without a cache of its own: it reads an earlier layer's, or has no attention. A window that the
    model's masks know nothing of, as converters leave it in configurations, is none.

    Raises:
        BundleError: the config lacks what a layer of its type has, or states a window that is none.
    """
    text = config.get_text_config(decoder=True)
    try:
        types, arguments = get_layer_types_and_kwargs(text)
        if not DYNAMIC_LAYER_TYPE_MAPPING.keys() >= {*types}:
            _modeling(text)  # where such layers are defined
    except (AttributeError, TypeError, ValueError) as error:  # of layers whose type asks for what the config lacks
        raise no_model(error) from error
    for window in (entry.get("sliding_window") for entry in arguments):
        if window is not None and (type(window) is not int or not 0 < window < 2**31):
            raise mismatch("config.json", "the sliding window of a layer", "a number of tokens", repr(window)[:80])
    for index, kind in enumerate(types):
        if kind in _MASKS and not hasattr(_modeling(text) or masking_utils, _MASKS[kind]):
            types[index], arguments[index] = "full_attention", {}
    return types, arguments


def has_pages(layer_type: str) -> bool:
    """Whether a layer of this type has keys and values that pages can hold."""
    return layer_type in ATTENTION_LAYER_TYPES or layer_type in HYBRID_LAYER_TYPES or keeps_index(layer_type)


def keeps_index(layer_type: str) -> bool:
    """Whether a layer of this type keeps the keys of an indexer, which chooses the tokens that are attended to."""
    return any(hasattr(DYNAMIC_LAYER_TYPE_MAPPING.get(layer_type), update) for update in INDEX_UPDATES)


def is_latent(config: PretrainedConfig) -> bool:
    """Whether a model's attention is latent (MLA): it stores one latent vector and one RoPE part per token."""
    return bool(getattr(config.get_text_config(decoder=True), "kv_lora_rank", None))


def pages_unsupported(config: PretrainedConfig, layer_type: str, scheme: KVScheme | None) -> str | None:
    """Why a layer of this type keeps transformers' own cache instead of this scheme's; None where it can have pages."""
    text = config.get_text_config(decoder=True)
    if keeps_index(layer_type):
        if not _gives_attention(text, _CHOSEN):
            return (
                f"the indexer of {text.model_type} does not tell attention functions which tokens it chose; its cache "
                "is left to transformers"
            )
        if scheme is not None and scheme.compresses_prompts():
            return "an indexer chooses tokens among all, and this scheme compresses whole prompts"
        sources = getattr(text, "kv_source_layers", None) or ()
        if any(source != index for index, source in enumerate(sources)):
            return "some of its layers read earlier layers' latents; its cache is left to transformers"
    if is_latent(config):
        if not _defines(text, "expand_kv"):
            return f"the latent attention of {text.model_type} is unknown; its cache is left to transformers"
        if scheme is not None and not scheme.fits_latents:
            return (
                "latent attention (MLA) stores latents instead of keys and values per head, for which there is the "
                "preset latent-4bit; its cache is left to transformers"
            )
    if text.model_type in OTHER_CACHES:
        return OTHER_CACHES[text.model_type]
    if _gives_attention(text, {"position_bias"}):
        return "a position bias is added to its attention scores; its cache is left to transformers"
    if has_pages(layer_type) and not _uses_attention_interface(text):
        return (
            f"{text.model_type} computes attention by itself instead of through transformers' attention interface; its "
            "cache is left to transformers"
        )
    if layer_type == "dummy":
        return "it has no keys and values of its own: it reads an earlier layer's, or does not attend"
    if not has_pages(layer_type):
        packed = scheme is not None and scheme.state_bits < 16 and layer_type != "conv"
        kept = f"is stored in {scheme.state_bits} bits" if packed else "is left to transformers"
        return f"a {layer_type} layer has no keys and values; its state {kept}"
    return None


def without_weights(config: PretrainedConfig) -> str:
    """The end of a sentence: the parts of a model that can be converted where its weights cannot."""
    reasons = {kind: pages_unsupported(config, kind, None) for kind in layer_types_of(config)[0]}
    if not all(reasons.values()):
        return 'it can be converted with [weights] method = "none" only'
    reason = min(reasons.items(), key=lambda found: not has_pages(found[0]))[1]
    return f"nor can its cache be converted, for {reason.partition('; its ')[0]}"


def is_small(config: PretrainedConfig) -> bool:
    """Whether a text decoder is one whose weights are given more bytes and calibration text by default."""
    return config.hidden_size < SMALL_HIDDEN_SIZE


def context_length(config: PretrainedConfig) -> int | None:
    """Tokens that a model may attend over: its positions, times what its RoPE is scaled by; None without a limit."""
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    return scaled_positions(positions, getattr(text, "rope_parameters", None) or {})


def changing_rope(config: PretrainedConfig) -> str | None:
    """Why a model's RoPE turns the same position by different angles at different lengths, or None."""
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [parameters, *(kind for kind in parameters.values() if isinstance(kind, dict))]
    changing = next((k["rope_type"] for k in kinds if k.get("rope_type") in ("dynamic", "longrope")), None)
    return None if changing is None else f"RoPE of type {changing} has other angles where sequences are longer"


def _uses_attention_interface(config: PretrainedConfig) -> bool:
    """Whether a model of transformers uses the attention interface; models from elsewhere are assumed to."""
    modeling = _modeling(config)
    return modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS")


def not_generating(config: PretrainedConfig) -> str | None:
    """The class that config.json states for a model's weights, where it is one of transformers' and generates no text:
    BertForMaskedLM, LlamaForSequenceClassification.
    """
    for name in getattr(config, "architectures", None) or ():
        stated = getattr(_modeling(config), name, None)
        if isinstance(stated, type) and hasattr(stated, "can_generate") and not stated.can_generate():
            return str(name)
    return None


def _defines(config: PretrainedConfig, method: str) -> bool:
    """Whether a class beside a model of transformers has a method."""
    return any(isinstance(part, type) and hasattr(part, method) for part in vars(_modeling(config) or object).values())


def _gives_attention(config: PretrainedConfig, arguments: set[str]) -> bool:
    """Whether a class beside a model of transformers calls attention with one of these arguments."""
    forwards = [getattr(part, "forward", None) for part in vars(_modeling(config) or object).values()]
    codes = [getattr(inspect.unwrap(forward), "__code__", None) for forward in forwards if callable(forward)]
    calls = [code.co_consts for code in codes if code and "ALL_ATTENTION_FUNCTIONS" in code.co_names]
    return any(arguments & {*names} for consts in calls for names in consts if isinstance(names, tuple))


def _modeling(config: PretrainedConfig) -> Any:
    """transformers' module with the classes of a model; None for models from elsewhere."""
    name = type(config).__module__
    if not name.startswith("transformers.models.") or ".configuration_" not in name:
        return None
    modeling = name.replace(".configuration_", ".modeling_")
    if modeling not in sys.modules and importlib.util.find_spec(modeling) is None:
        return None
    return importlib.import_module(modeling)


def layer_config(config: PretrainedConfig, index: int) -> PretrainedConfig:
    """The text configuration of one layer: in some models the shape of the attention differs between layers."""
    layers = getattr(config, "per_layer_config", None)
    return config if layers is None else layers[index]


def head_dim(config: PretrainedConfig) -> int:
    """Channels per attention head, of a configuration that `layer_config` gave."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def key_value_heads(config: PretrainedConfig) -> int:
    """KV heads, of a configuration that `layer_config` gave."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def stored_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Heads as the cache stores them, and channels of a head's keys and values, of what `layer_config` gave.

    Of latent attention these are one head, the latent and the RoPE part.
    """
    if is_latent(config):
        return 1, config.kv_lora_rank, config.qk_rope_head_dim
    channels = head_dim(config)
    return key_value_heads(config), channels, getattr(config, "v_head_dim", None) or channels


def _index_dim(config: PretrainedConfig, layer_type: str, index: int) -> int:
    """Channels of the keys of a layer's indexer; 0 where it has none, or attends to what an earlier layer's chose."""
    kinds = getattr(config, "indexer_types", None)
    if not keeps_index(layer_type) or (kinds and kinds[index] != "full"):
        return 0
    return getattr(config, "index_head_dim", None) or 0


def sliding_windows(config: PretrainedConfig) -> list[int | None]:
    """The sliding window of each decoder layer in tokens, or None."""
    return [arguments.get("sliding_window") for arguments in layer_types_of(config)[1]]


def has_short_windows(config: PretrainedConfig) -> list[bool]:
    """Whether each decoder layer has a sliding window of at most `SHORT_WINDOW` tokens beside full attention."""
    types, windows = layer_types_of(config)[0], sliding_windows(config)
    hybrid = "full_attention" in types
    return [hybrid and window is not None and window <= SHORT_WINDOW for window in windows]


def model_cache(
    config: PretrainedConfig,
    schemes: Sequence[KVScheme | None],
    dtype: torch.dtype = torch.bfloat16,
    shapes: Sequence[tuple[int, int, int] | None] | None = None,
) -> ModelCache:
    """The cache of a model whose layers have these schemes, as `KVCache` makes it.

    Args:
        config: the configuration of the model.
        schemes: the schemes of all layers, budgets spread over them; None leaves a layer unquantized.
        dtype: the dtype of full-precision tokens.
        shapes: KV heads, and channels of keys and values, of the layers where they are known better than by the
            configuration.
    """
    text = config.get_text_config(decoder=True)
    quantized = any(scheme is not None for scheme in schemes)
    layers = []
    for index, (scheme, kind, arguments) in enumerate(zip(schemes, *layer_types_of(config), strict=True)):
        own, window = layer_config(text, index), arguments.get("sliding_window")
        if not has_pages(kind):
            layers.append(LayerCache(0, 0, 0))
        else:
            # Beside quantized layers the others have pages, too, of the model's own dtype.
            stored = UNQUANTIZED if scheme is None and quantized else scheme
            shape = (shapes[index] if shapes else None) or stored_shape(own)
            layers.append(LayerCache(*shape, stored, window, dtype.itemsize, _index_dim(text, kind, index)))
    return ModelCache(tuple(layers))


def read_config(directory: Path, contents: Mapping[str, Any]) -> PretrainedConfig:
    """transformers' configuration of a verified bundle.

    Args:
        directory: the directory of the bundle.
        contents: the contents of its config.json.

    Raises:
        BundleError: its config.json makes no configuration.
    """
    try:
        return make_config(directory, contents)
    except BundleError:
        raise
    except Exception as error:  # classes of configs validate with exceptions of many kinds
        raise no_model(error) from error


def make_config(directory: Path, contents: Mapping[str, Any], refuse: Refusal = mismatch) -> PretrainedConfig:
    """transformers' configuration of a directory, unless its numbers make it take for ever or fill the memory.

    Args:
        directory: the directory of a model.
        contents: the contents of its config.json.
        refuse: makes the error; the one for a bundle's file by default.

    Raises:
        Exception: what `refuse` makes, or what transformers raises.
    """
    for path, value in _integers(contents):
        if value > _LARGEST:
            raise refuse("config.json", path, f"at most {_LARGEST}", value)
    check_values(contents, refuse)
    with _bounded_steps():
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    text = config.get_text_config(decoder=True)
    if not isinstance(text, PretrainedConfig):
        raise refuse("config.json", "the language model's part", "an object", repr(text)[:80])
    for part, where in ((config, ""), (text, " of the language model")):
        if isinstance(dtype := getattr(part, "dtype", None), torch.dtype) and dtype not in _DTYPES:
            raise refuse("config.json", f"dtype{where}", listed(map(str, _DTYPES), "or"), dtype)
        if value := getattr(part, "is_encoder_decoder", False):
            raise refuse("config.json", f"is_encoder_decoder{where}", "false", repr(value)[:80])
    _check_experts(text, refuse)
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise refuse("config.json", "the number of layers", f"at most {MAX_LAYERS:,}", layers)
    if isinstance(layers, int) and layers < 1:
        raise refuse("config.json", "the number of layers", "at least 1", layers)
    return config


def _check_experts(text: PretrainedConfig, refuse: Refusal) -> None:
    """Refuse numbers of experts for a token, or of their groups, that a router cannot choose: it would fail later."""
    experts = next((count for name in _EXPERTS if isinstance(count := getattr(text, name, None), int)), 0)
    if experts < 2:  # a dense model, whose other numbers mean nothing
        return
    groups, of_groups = getattr(text, "n_group", None), getattr(text, "topk_group", None)
    for name in _PER_TOKEN:
        chosen = getattr(text, name, None)
        for count in chosen if isinstance(chosen, list) else [chosen]:
            if isinstance(count, int) and not 0 <= count <= experts:
                raise refuse("config.json", name, f"a number of the {experts} experts", count)
    if isinstance(groups, int):
        if groups < 1 or experts % groups or experts < 2 * groups:
            raise refuse("config.json", "n_group", f"a number of groups of the {experts} experts", groups)
        if isinstance(of_groups, int) and not 0 <= of_groups <= groups:
            raise refuse("config.json", "topk_group", f"a number of the {groups} groups", of_groups)


def check_values(value: object, refuse: Refusal, path: str = "") -> None:
    """Refuse values by which a model computes no numbers, or which transformers reads as something else.

    A RoPE of base 0, a soft cap of 0, or a norm that adds less than nothing, makes no error and no sense.
    """
    if isinstance(value, list):
        for entry in value:
            check_values(entry, refuse, path)
    for key, entry in value.items() if isinstance(value, Mapping) else ():
        where = f"{path}.{key}" if path else str(key)
        if key in _SWITCHES and not isinstance(entry, bool | None):
            raise refuse("config.json", where, "true or false", repr(entry)[:80])
        if where in _CAUSAL and entry is not None and not entry:
            raise refuse("config.json", where, "true, for tokens to be generated one after another", repr(entry)[:80])
        if _OF_ROPE.fullmatch(where) and entry is not None:
            # Some are computed with only where a sequence is long.
            numbers = entry if isinstance(entry, list) and key in _FACTORS else [entry]
            for number in numbers:
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise refuse("config.json", where, "a number", repr(number)[:80])
            short = value.get(_FACTORS[0])
            if key == _FACTORS[1] and isinstance(short, list) and len(short) != len(numbers):
                raise refuse("config.json", where, f"{len(short):,} numbers, as in {_FACTORS[0]}", len(numbers))
        # Of other lists a 0 may say of a layer that it has none, such as a RoPE.
        for number in entry if isinstance(entry, list) and where.endswith("_factor") else [entry]:
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(number, where, refuse)
        check_values(entry, refuse, where)


def _check_number(number: float, where: str, refuse: Refusal) -> None:
    """Refuse a number that a model cannot compute with, by the path of its entry in config.json."""
    if number != number:
        raise refuse("config.json", where, "a number", number)
    if where.endswith("max_position_embeddings") and number < 1:
        raise refuse("config.json", where, "1 or more", number)
    if where.endswith(("norm_eps", "norm_epsilon")) and not 0 <= number <= 1:
        raise refuse("config.json", where, "a number from 0 to 1", number)
    if _HEADS.fullmatch(where.rpartition(".")[2]) and number < 0:  # 0 may say that there are none
        raise refuse("config.json", where, "0 or more", number)
    of_rope = "rope" in where
    is_scale = where.rpartition(".")[2] in _DIVISORS or (of_rope and where.endswith(("theta", "factor", "base_freq")))
    if is_scale and not 1 / _MOST_SCALE < number < _MOST_SCALE:
        raise refuse("config.json", where, f"a number above {1 / _MOST_SCALE:g} and below {_MOST_SCALE:g}", number)
    if of_rope and not abs(number) < _MOST_SCALE:
        raise refuse("config.json", where, f"a number below {_MOST_SCALE:g}", number)


# Names of the number of experts, and of those for each token.
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "moe_topk", "moe_top_k")
# Numbers of a RoPE by the paths of their entries, and those of which there is one for each angle.
_OF_ROPE = re.compile(r"(.*\.)?rope\w*\.(\w+\.)?\w*(factor|theta|embeddings|base_freq)", re.DOTALL)
_FACTORS = ("short_factor", "long_factor")
_SWITCHES = ("output_attentions", "output_hidden_states", "output_router_logits", "return_dict")
_CAUSAL = ("is_causal", "text_config.is_causal")
_DIVISORS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
_MOST_SCALE = 1e18
_HEADS = re.compile(r"(num|n)_(\w+_)?heads?")


def _integers(value: object, path: str = "") -> Iterator[tuple[str, int]]:
    """Whole numbers at any depth that may count something, which the base of a RoPE does not, and their paths."""
    if isinstance(value, int):
        if not path.endswith("theta"):
            yield path, value
    elif isinstance(value, list):
        for entry in value:
            yield from _integers(entry, path)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _integers(entry, f"{path}.{key}" if path else key)


@contextmanager
def _bounded_steps() -> Iterator[None]:
    """End with an error (TimeoutError) what runs too many lines of Python in this thread within the block.

    Lines of classes of configurations count, which loop over what numbers say; those of modules that are imported for
    the first time do not.
    """
    left, before = _MOST_STEPS, sys.gettrace()

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        code = frame.f_code
        if event == "call" and (code.co_name == "<module>" or not code.co_filename.startswith(_COUNTED)):
            return None
        left -= 1
        if left < 0:
            raise TimeoutError("its numbers make it take too long")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def bounded_modules(tensors: int, refuse: Refusal = mismatch) -> Iterator[None]:
    """Refuse, while this thread builds a model in the block, far more modules than its tensors can belong to.

    Counts of what a model has go by many names, and some of them only its own code knows.

    Args:
        tensors: how many the model has.
        refuse: makes the error; the one for a bundle's file by default.

    Raises:
        KvconvertError: there are too many modules.
    """
    own, left = threading.get_ident(), MOST_SPARE_MODULES + 10 * tensors

    def count(*_: object) -> None:
        nonlocal left
        if threading.get_ident() == own:
            left -= 1
            if left < 0:
                raise refuse("config.json", "the model it describes", "one of as many modules as its tensors", "more")

    handles = [register(count) for register in (on_module, on_parameter)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def no_model(error: Exception) -> BundleError:
    """The error for a config.json from which transformers builds nothing."""
    reason = " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__
    return BundleError(
        f"config.json describes no model that this version of transformers builds without other code ({reason}); "
        "update transformers, or fetch or export the bundle again."
    )
