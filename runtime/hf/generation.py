"""The models of loaded bundles: every cache that they create follows the bundle's KV plan."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerationConfig, GenerationMode

from kvconvert.arguments import checked
from kvconvert.bundle.generation import NEUTRAL, PROCESSED
from kvconvert.errors import (
    CacheError,
    KvconvertError,
    UnsupportedModelError,
    UsageError,
    counted,
    first_line,
)
from kvconvert.kernels.launches import make_ready, record_specializations
from kvconvert.kernels.pages import PAGE_SIZE
from kvconvert.methods import KVScheme
from kvconvert.models import CACHE, CACHE_NAMES
from kvconvert.runtime.hf.attention import NAME
from kvconvert.runtime.hf.cache import LOST, KVCache
from kvconvert.runtime.hf.cache_layers import CacheLayers
from kvconvert.runtime.hf.captured import CapturedSteps, prepare_steps
from kvconvert.runtime.hf.prompts import PackedPrompts, seal_prompt
from kvconvert.runtime.hf.rehearsal import rehearse
from kvconvert.runtime.hf.sequence_modules import choose_by_sequence, tell_positions
from kvconvert.runtime.hf.states import read_by_sequence, state_bits

if TYPE_CHECKING:
    from kvconvert.runtime.engine.sampling import RefuseNoNumbers

# Generated tokens whose steps are recorded before a prompt is read.
PREPARED_TOKENS = 2048

logger = logging.getLogger(__name__)
# The processors of a `generate` that is running.
_WATCHING: ContextVar[list[RefuseNoNumbers]] = ContextVar("watching")


class TokensOfNumbers:
    """Mixed into the class of every bundle's model, whose `generate` takes no token where logits are no numbers."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`.

        Raises:
            NumericError: the model computes NaN or infinity.
        """
        watching: list[RefuseNoNumbers] = []
        before = _WATCHING.set(watching)
        try:
            found = super().generate(*args, **kwargs)
            for processor in watching:
                processor.check()
            return found
        finally:
            _WATCHING.reset(before)

    def _get_logits_processor(self, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        from kvconvert.runtime.engine.sampling import RefuseNoNumbers

        refusing = RefuseNoNumbers()
        _WATCHING.get([]).append(refusing)
        return LogitsProcessorList([refusing, *super()._get_logits_processor(*args, **kwargs)])


class BundleModel(TokensOfNumbers):
    """Mixed into the class of a model that was loaded from a bundle with a KV plan."""

    kv_schemes: Sequence[KVScheme | None]
    kv_plan: Mapping[str, torch.Tensor]
    captured: CapturedSteps
    prompts: PackedPrompts
    kv_seal: str = ""
    _cache_layers: tuple[Sequence[KVScheme | None], CacheLayers] | None = None

    def new_kv_cache(self, *, kv_memory: int | None = None) -> KVCache:
        """An empty cache that follows the bundle's KV plan; see `KVCache` for `kv_memory` in bytes."""
        if self._cache_layers is None or self._cache_layers[0] is not self.kv_schemes:
            # Reading a config takes milliseconds.
            like = CacheLayers.of(self.config, self.kv_schemes)
            self._cache_layers = self.kv_schemes, replace(like, state_bits=state_bits(self, like.schemes))
        _, like = self._cache_layers
        cache = KVCache(self.config, self.kv_schemes, plan=self.kv_plan, kv_memory=kv_memory, like=like)
        cache.share_tables(self.captured.registry)
        cache.is_replaced = True
        cache.model_seal = self.kv_seal
        return cache

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate`, which takes a cache by both of its names, `cache` and `past_key_values`.

        Raises:
            UsageError: the input or the settings are none that transformers can use.
        """
        given = args[0] if args else kwargs.get("inputs")
        _check_ids(kwargs.get("input_ids") if given is None else given)
        try:
            return super().generate(*args, **_with_one_cache(self, kwargs))
        except KvconvertError:
            raise
        except Exception as error:  # whatever values of any type lead to
            if not _raised_by_generation(error):
                raise
            said = f"generate cannot use its input or settings ({first_line(error)}); correct them."
            raise UsageError(said) from error

    def _prepare_generation_config(self, *args: Any, **kwargs: Any) -> Any:
        """Settings of a call, tried before anything is computed: on a GPU a wrong token id ends the process."""
        from kvconvert.runtime.engine.sampling import Sampling, logits_processors

        config, rest = super()._prepare_generation_config(*args, **kwargs)
        for name in ("max_new_tokens", "max_length", "prefill_chunk_size"):
            value = getattr(config, name, None)
            if name == "max_length" and config.max_new_tokens is not None:  # which goes before it
                continue
            if value is not None and not (hasattr(value, "__index__") and value > 0):
                raise UsageError(f"generate cannot use its input or settings ({name} is {value!r}); correct them.")
        values = {name: getattr(config, name, None) for name in PROCESSED}
        given = {name: value for name, value in values.items() if value not in (None, NEUTRAL.get(name))}
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        stops = [end for end in ends if isinstance(end, int)]
        logits_processors(self, Sampling(float(bool(config.do_sample)), settings=given), [0], 1, stops)
        return config, rest

    def _valid_auto_compile_criteria(self, model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> bool:
        """Whether `generate` calls what `get_compiled_call` returns: where steps may be replayed as CUDA graphs."""
        if isinstance(model_kwargs.get(CACHE), KVCache):
            return self.device.type == "cuda" and not generation_config.disable_compile
        return super()._valid_auto_compile_criteria(model_kwargs, generation_config)

    def get_compiled_call(self, compile_config: Any) -> Any:
        """The model itself, which replays steps; nothing is compiled by torch."""
        if compile_config is not None:
            return super().get_compiled_call(compile_config)
        return self._call_with_trusted_masks

    def _call_with_trusted_masks(self, *args: Any, **kwargs: Any) -> Any:
        with self.captured.trusting_masks():
            return self(*args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise UsageError(
                f"cache_implementation={implementation!r} is not possible with a bundle's low-bit cache; leave it out, "
                'or pass "dynamic" for a full-precision cache.'
            )
        _refuse_attentions(generation_config.output_attentions)
        if isinstance(model_kwargs.get(CACHE), KVCache):
            model_kwargs[CACHE].replays = not generation_config.disable_compile
        if generation_config.use_cache is False:
            # Slow but correct. `adopt` has overruled what the files say, so that this is the caller's wish.
            logger.warning("use_cache=False: every token is computed from the whole text again, without the KV cache.")
        elif implementation is None and model_kwargs.get(CACHE) is None:
            cache = self.new_kv_cache()
            cache.replays = not generation_config.disable_compile
            if generation_config.is_assistant:
                cache.activate_past_recording()
            elif generation_config.prefill_chunk_size is None:
                cache.expect_whole_prompt()
            model_kwargs[CACHE] = cache
            if cache.replays and generation_mode != GenerationMode.ASSISTED_GENERATION:
                self._prepare_steps(model_kwargs, max_cache_length)
            return None
        return super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _prepare_steps(self, model_kwargs: dict, longest: int) -> None:
        """Record the decoding steps of a batch before its prompt is read, if that was not done yet."""
        composite = self.config is not self.config.get_text_config()
        if self.device.type != "cuda" or self.captured.reason is not None or composite:
            return
        # `generate` drops masks without padding.
        positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
        if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or not positions.shape[1]:
            return
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            return
        rows, prompt = positions.shape
        longest = min(longest, prompt + PREPARED_TOKENS)
        if not self.captured.has_kernels:
            self.captured.has_kernels = True
            with record_specializations() as launches:
                rehearse(self)
            make_ready(launches, self.device)
        key = (rows, *((n // PAGE_SIZE).bit_length() for n in (prompt, longest)))
        # Where no step follows, one is recorded for the test that recordings of prompts depend on.
        if (longest > prompt or not self.captured.recorded) and key not in self.captured.prepared:
            self.captured.prepared.add(key)
            tokens = [prompt] * rows if mask is None else mask.sum(1).clamp(min=1).tolist()
            prepare_steps(self, tokens, longest)
        self.prompts.prepare(self, rows)

    def _prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """The prompt's forward passes; where it is read in chunks, only here is it known which is the last."""
        cache = model_kwargs.get(CACHE)
        if not generation_config.is_assistant:
            _check_prompt(self, input_ids, generation_config, model_kwargs)
        if isinstance(cache, KVCache) and (generation_config.prefill_chunk_size is not None or cache.reconstructs):
            cache.begin_prompt()
        output = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        wanted = generation_config.use_cache is not False and generation_config.cache_implementation is None
        if wanted and not isinstance(cache, KVCache) and not getattr(cache, "_is_user_defined", False):
            raise CacheError(f"generate read the prompt into a {type(cache).__name__} and not into {LOST}")
        # The caller may have read the first parts, too.
        if isinstance(cache, KVCache) and any(group.reading_prompt for group in cache.groups):
            seal_prompt(self, cache, input_ids)
        return output

    def set_attn_implementation(self, attn_implementation: str | dict, *args: Any, **kwargs: Any) -> None:
        """Refused for the language model, whose KV plan has an attention of its own; other parts may have theirs."""
        given = attn_implementation if isinstance(attn_implementation, dict) else {"": attn_implementation}
        asked = [given.get(part) for part in ("", "text_config") if given.get(part) not in (None, NAME)]
        if asked:
            raise UsageError(
                f"set_attn_implementation({asked[0]!r}) is not possible with a bundle's low-bit cache, which has an "
                'attention of its own; generate with cache_implementation="dynamic" for a full-precision cache.'
            )
        super().set_attn_implementation(attn_implementation, *args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: transformers' continuous batching brings its own full-precision paged cache."""
        raise UsageError(
            "Continuous batching of transformers keeps its own full-precision cache and would ignore the bundle's KV "
            "plan; use generate()."
        )

    generate_batch = init_continuous_batching
    continuous_batching_context_manager = init_continuous_batching


def _check_ids(ids: Any) -> None:
    """Refuse (UsageError) what cannot be a batch of token ids; None stands for no prompt."""
    if ids is None:
        return
    if not isinstance(ids, torch.Tensor):
        advice = "unpack it, as in generate(**inputs)" if isinstance(ids, Mapping) else "give a tensor of token ids"
        raise UsageError(f"`input_ids` is of type {type(ids).__name__}; {advice}.")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise UsageError(
            f"`input_ids` is {ids.dtype} of shape {[*ids.shape]}; give token ids as torch.int64 [batch, tokens]."
        )


def _check_prompt(
    model: PreTrainedModel, ids: torch.Tensor, settings: GenerationConfig, arguments: Mapping[str, Any]
) -> None:
    """Refuse (UsageError) a prompt without a token that is new to its cache, of which transformers reads some again, or
    with an id that is no token's: on a GPU such a one ends the process.

    Ids of models that read more than text may stand for what is no token.
    """
    cache, embeds, mask = (arguments.get(name) for name in (CACHE, "inputs_embeds", "attention_mask"))
    tokens = ids.shape[1] if embeds is None else embeds.shape[1]
    columns = getattr(settings, "_mask_length", -1) if mask is None else mask.shape[1]
    if not tokens:
        raise UsageError("`input_ids` has no tokens; give at least one.")
    if embeds is None and ids.numel() and model.config is model.config.get_text_config():
        vocabulary, (least, most) = model.get_input_embeddings().num_embeddings, torch.stack(ids.aminmax()).tolist()
        if least < 0 or most >= vocabulary:
            raise UsageError(
                f"`input_ids` has the token id {least if least < 0 else most}, and the model has the ids 0 to "
                f"{vocabulary - 1}; encode the prompt with the model's own tokenizer."
            )
    seen = cache.get_seq_length() if isinstance(cache, Cache) else 0
    if columns not in (-1, tokens, seen + tokens) and (mask is None or mask.dim() == 2):
        raise UsageError(
            f"`attention_mask` is of {counted(columns, 'token')} and the prompt of {tokens}; give the mask that the "
            "tokenizer made of the prompt."
        )
    if isinstance(cache, KVCache) and (embeds is not None or columns == tokens) and cache.get_seq_length() >= tokens:
        raise UsageError(
            f"The cache holds {counted(cache.get_seq_length(), 'token')} and the prompt has {tokens}; give "
            "the cache's whole text "
            "and what follows it, or a new cache for another text."
        )


def _raised_by_generation(error: Exception) -> bool:
    """Whether transformers' code around the forward passes raised an error: about settings, not in a model. Some of
    them need a tokenizer, which may lack what they ask of it.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__"))
    return raised_in.startswith(("transformers.generation.", "transformers.tokenization_"))


_ADOPTED = {"use_cache": True, "return_dict": True, "output_attentions": False}


def adopt(model: PreTrainedModel, schemes: Sequence[KVScheme | None], plan: Mapping[str, torch.Tensor]) -> None:
    """Give a loaded model the bundle's attention, caches and refusals."""
    base = type(model)
    members: dict[str, Any] = {"__module__": base.__module__, "__doc__": base.__doc__}
    if not any(scheme is not None for scheme in schemes):
        model.__class__ = type(base.__name__, (TokensOfNumbers, base), members)
        return
    model.kv_schemes, model.kv_plan = tuple(schemes), dict(plan)
    model.captured = CapturedSteps(functools.partial(base.forward, model), base.__name__)
    model.prompts = PackedPrompts(model.captured)
    # torch.compile cannot trace the cache: whoever compiles the model gets the one that there is.
    forward = torch.compiler.disable(_replaying(base.forward))
    model.__class__ = type(base.__name__, (BundleModel, base), members | {"forward": forward})
    model.set_attn_implementation(NAME)
    read_by_sequence(model)
    choose_by_sequence(model)
    tell_positions(model)
    # What trainers and inspections save: without a cache, with matrices of attention, or as tuples.
    for config in (model.config, model.config.get_text_config(decoder=True), model.generation_config):
        for name, value in _ADOPTED.items():
            if getattr(config, name, None) is (not value):
                setattr(config, name, value)
    parameters = list(inspect.signature(base.forward).parameters)[1:]
    position = parameters.index(CACHE) if CACHE in parameters else None
    if position is not None:
        hook = torch.compiler.disable(functools.partial(_with_cache, position=position))
        model.register_forward_pre_hook(hook, with_kwargs=True)
    if any(scheme is not None and scheme.modality != "all" for scheme in schemes):
        watch_inputs(model)


def _refuse_attentions(asked: bool | None) -> None:
    if asked:
        raise UsageError(
            "output_attentions=True is not possible with a bundle, whose attention computes no matrix of weights; "
            "leave it out, or ask the source model with attn_implementation='eager'."
        )


def _replaying(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's forward pass, but for single tokens that a recorded step serves, and prompts that are packed."""
    names = list(inspect.signature(forward).parameters)[1:]

    @functools.wraps(forward)
    def replaying(self: BundleModel, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        asked = arguments.get("output_attentions")
        _refuse_attentions(getattr(self.config, "output_attentions", False) if asked is None else asked)
        if self.captured.serves(arguments):
            return self.captured.step(arguments)
        prompt = self.prompts.plan(self, arguments)
        if prompt is not None:
            return self.prompts.read(prompt)
        cache = arguments.get(CACHE)
        with cache.receiving(type(self).__name__) if isinstance(cache, KVCache) else nullcontext():
            output = forward(self, *args, **kwargs)
        self.prompts.learn(self, arguments)
        return output

    return replaying


def _with_cache(model: Any, args: tuple, kwargs: dict, position: int) -> tuple[tuple, dict] | None:
    """Pass a forward pass its cache by the name that this transformers has for it; where it would create one in full
    precision, the bundle's. One that was made for another model is refused (CacheError).
    """
    kwargs = _with_one_cache(model, kwargs)
    use_cache = kwargs.get("use_cache")
    if use_cache is None:
        use_cache = _caches(model)
    given = args[position] if len(args) > position else kwargs.get(CACHE)
    if isinstance(given, KVCache):
        given.like.check_reader(model.config)
    absent = len(args) <= position and CACHE not in kwargs
    if absent and use_cache and not (model.training and torch.is_grad_enabled()):
        kwargs[CACHE] = model.new_kv_cache()
    return args, kwargs


def _with_one_cache(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments in which the cache, if there is one, has the name of this transformers."""
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    if len(given) > 1:
        raise CacheError(f"{type(model).__name__} was given two caches, past_key_values and cache; pass one of them.")
    named = {name: value for name, value in arguments.items() if name not in CACHE_NAMES}
    if given and not isinstance(given[0], Cache):
        raise UsageError(f"The cache is of type {type(given[0]).__name__}; give `model.new_kv_cache()`, or none.")
    if given:
        named[CACHE] = given[0]
    return named


def _caches(model: PreTrainedModel) -> bool:
    """`use_cache` of the config; composite models have it in their text config."""
    for config in (model.config, model.config.get_text_config(decoder=True)):
        if getattr(config, "use_cache", None) is not None:
            return config.use_cache
    return True


@checked
def watch_inputs(model: torch.nn.Module) -> RemovableHandle:
    """Tell a `KVCache` that is passed to this model which tokens of each forward pass are visual, or audio.

    For a cache made by hand; models loaded from a bundle are watched already. Pass the module whose `forward` takes
    `input_ids` and a cache (of Qwen-Omni models the thinker). The hook's handle is returned; `.remove()` it
    to stop.

    Raises:
        UnsupportedModelError: the model's forward takes no such arguments.
    """
    parameters = list(inspect.signature(type(model).forward).parameters)[1:]
    missing = [name for name in ("input_ids", CACHE) if name not in parameters]
    if missing:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward takes no {' and no '.join(missing)}, so its visual tokens "
            "cannot be found; watch the module that takes both, or call KVCache.set_modality_mask before each prompt."
        )

    def set_masks(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> None:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        ids, cache = given.get("input_ids"), next((given[n] for n in CACHE_NAMES if given.get(n) is not None), None)
        for modality, placeholders in getattr(cache, "placeholders", {}).items():
            chosen = None if ids is None else sum(ids == placeholder for placeholder in placeholders).bool()
            cache.set_modality_mask(chosen, modality)

    return model.register_forward_pre_hook(set_masks, with_kwargs=True)
