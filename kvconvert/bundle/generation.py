"""Settings of generation_config.json: read once for `generate`, the Engine, the server, and vLLM.

transformers takes the file as it is and finds out while it generates what it cannot apply; other programs pass over
what they do not know. Here every field is checked, translated to what transformers applies, or named as left out.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kvconvert.errors import BundleError, listed, printable

NAME = "generation_config.json"
# Fields that matter only where tokens are drawn.
DRAWING = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
# Fields that change logits before a token is chosen, besides temperature, top_k, and top_p.
PROCESSED = (
    *DRAWING[3:],
    *("repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens", "min_length", "min_new_tokens"),
    *("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty", "watermarking_config"),
    *("remove_invalid_values", "renormalize_logits"),
)
_NUMBERS = (
    *("temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty"),
    *("encoder_repetition_penalty", "length_penalty", "guidance_scale", "max_time"),
)
_INTEGERS = (
    *("top_k", "min_length", "min_new_tokens", "max_length", "max_new_tokens", "no_repeat_ngram_size"),
    *("encoder_no_repeat_ngram_size", "num_beams", "num_return_sequences", "prompt_lookup_num_tokens"),
    *("max_matching_ngram_size", "prefill_chunk_size"),
)
_FLAGS = ("do_sample", "use_cache", "remove_invalid_values", "renormalize_logits", "token_healing")
_TOKENS = (
    *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
)
# What these values mean is also what happens without them.
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("repetition_penalty", "encoder_repetition_penalty", "typical_p", "guidance_scale"), 1.0),
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), 0.0),
    **dict.fromkeys(("min_length", "min_new_tokens", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 0),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits", "token_healing"), False),
    **dict.fromkeys(("num_beams", "num_return_sequences"), 1),
    **dict.fromkeys(("prefill_chunk_size", "prompt_lookup_num_tokens"), 0),
}
# Rows that each prompt becomes, and the most that a file may ask for: each has a cache of its own.
_TIMES, _MOST_TIMES = ("num_beams", "num_return_sequences"), 256
# Tokens of those that may not occur twice: transformers makes as many copies of a text.
NGRAMS, MOST_NGRAM = ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), 256
# Texts that end an answer, and characters of one: transformers compares each with every token of the vocabulary.
MAX_STOPS, MAX_STOP = 64, 256
# What logits are divided or multiplied by, and stay finite.
_PENALTIES, LARGEST_PENALTY = ("repetition_penalty", "encoder_repetition_penalty"), 1e6
# Logits divided by less are infinite in float32, and by more are all the same.
_COLDEST, _HOTTEST = 1e-30, 1e30
# Left to the caller, to speed, or to how the file came about: nothing that a token depends on.
_WITHOUT_EFFECT = (
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
    *("compile_config", "disable_compile", "transformers_version", "_from_model_config", "_commit_hash"),
    *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type", "max_cache_len"),
    *("cache_config", "continuous_batching_config", "use_mtp"),
)
_DEFAULTS = ("watermarking_config",)  # of which an empty object is the defaults, and not nothing
_VLLM = ("min_p", "repetition_penalty")
_KEPT = (*_NUMBERS, *_INTEGERS, *_FLAGS, *_TOKENS, *PROCESSED, "stop_strings", "early_stopping")


@dataclass(frozen=True)
class GenerationSettings:
    """Fields of the file as transformers applies them.

    Attributes:
        values: by transformers' names, without those that change nothing.
        left_out: fields that nothing here applies, as `name = value`.
    """

    values: Mapping[str, Any]
    left_out: tuple[str, ...] = ()

    @property
    def stops(self) -> frozenset[int]:
        """Tokens that end a text."""
        return frozenset(_listed(self.values.get("eos_token_id", [])))

    def new_tokens(self, prompt_tokens: int) -> int | None:
        """Tokens that a text may get after a prompt, by max_new_tokens or else max_length; None where neither says."""
        longest = self.values.get("max_length")
        return self.values.get("max_new_tokens", None if longest is None else longest - prompt_tokens)

    def without(self, names: Collection[str]) -> GenerationSettings:
        """The same, with fields left out that a program does not apply."""
        values = {name: value for name, value in self.values.items() if name not in names}
        more = (f"{name} = {value!r:.80}" for name, value in self.values.items() if name in names)
        return GenerationSettings(values, (*self.left_out, *more))

    def for_vllm(self) -> tuple[dict[str, Any], str | None]:
        """Contents of a generation_config.json as vLLM reads it, and a sentence on what it leaves out.

        vLLM draws at every temperature that the file states, whatever it says of sampling, and knows few other fields.
        """
        draws = self.values.get("do_sample")
        others = {name for name in PROCESSED if name not in _VLLM} | {"num_beams", "num_return_sequences"}
        others |= {"guidance_scale", "max_length", "max_time", "token_healing", "stop_strings"}
        if "max_new_tokens" in self.values:  # which goes before it
            others.discard("max_length")
        kept = self.without(others)
        values = {name: value for name, value in kept.values.items() if draws or name not in DRAWING}
        if draws is False:
            values["temperature"] = 0.0
        return values, kept.warning("vLLM")

    def warning(self, program: str) -> str | None:
        """A sentence that names what is left out; None where nothing is."""
        if not self.left_out:
            return None
        return f"{program} does not apply {listed(self.left_out)} of {NAME}; give the setting where you generate."


def read_generation(
    stated: Mapping[str, Any], stops: Iterable[int] = (), vocabulary: int | None = None
) -> GenerationSettings:
    """Check and translate the fields of a generation_config.json.

    Args:
        stated: the file's contents.
        stops: further tokens that end a text, see `stop_tokens`.
        vocabulary: the number of the model's tokens, beyond which there are none that could end one.

    Raises:
        BundleError: a field of another type or out of its range.
    """
    values: dict[str, Any] = {}
    left_out = []
    for name, value in stated.items():
        if value is None or name in _WITHOUT_EFFECT:
            continue
        checked = _checked(name, value) if name in _KEPT else value
        if checked is None or checked == NEUTRAL.get(name) or (checked in ([], {}) and name not in _DEFAULTS):
            continue
        if name in _KEPT:
            values[name] = checked
        elif not (name == "cache_implementation" and value == "hybrid"):  # transformers' own for sliding windows
            left_out.append(f"{printable(name[:80])} = {value!r:.80}")
    zero = [name for name in ("temperature", "top_p") if values.get(name) == 0]
    if zero:  # the most likely token, which transformers calls greedy and has no temperature for
        values = {name: value for name, value in values.items() if name not in zero} | {"do_sample": False}
    ends = list(dict.fromkeys([*_listed(values.pop("eos_token_id", [])), *stops]))
    ends = [id for id in ends if vocabulary is None or id < vocabulary]
    if ends:
        values["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    else:  # there is nothing that it could make likelier, and transformers fails
        values.pop("exponential_decay_length_penalty", None)
    return GenerationSettings(values, tuple(left_out))


def configured_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of a generation_config.json for a model without one: what its config.json says of generation, as older
    models do and transformers reads it.

    Raises:
        BundleError: a field of another type or out of its range.
    """
    text = config.get("text_config")
    parts = (text if isinstance(text, Mapping) else {}, config)
    stated = {name: part[name] for name in _KEPT for part in parts if part.get(name) is not None}
    try:
        read_generation(stated)
    except BundleError as error:
        raise BundleError(str(error).replace(NAME, "config.json", 1)) from error
    return stated


def stop_tokens(
    stated: Mapping[str, Any],
    configured: Iterable[Any],
    tokenizer: int | None = None,
    special: Collection[int] | None = None,
) -> list[int]:
    """Tokens that end a text: those of generation_config.json, of config.json, and of the tokenizer.

    Args:
        stated: contents of generation_config.json.
        configured: `eos_token_id` of config.json and of the language model's configuration within it.
        tokenizer: the tokenizer's end-of-sequence token.
        special: the tokenizer's added tokens. What config.json names beyond them is a piece of text in this vocabulary:
            the default of a class of models. None where they are unknown; config.json then counts where the other file
            names nothing.
    """
    own = _ids("eos_token_id", stated.get("eos_token_id"), NAME)
    found = [id for value in configured for id in _ids("eos_token_id", value, "config.json")]
    if special is not None:
        found = [id for id in found if id in special]
    elif own:
        found = []
    return list(dict.fromkeys([*own, *found, *([] if tokenizer is None else [tokenizer])]))


def _ids(name: str, value: Any, file: str) -> list[int]:
    """Token ids; a negative one stands for none."""
    ids = _listed([] if value is None else value)
    if any(isinstance(id, bool) or not isinstance(id, int) or id >= 2**63 for id in ids):
        raise _wrong(name, value, "a token id or a list of them", file)
    return [id for id in ids if id >= 0]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _checked(name: str, value: Any) -> Any:
    """A field's value in the type that transformers asks for; None where it says nothing."""
    if name in _NUMBERS:
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            raise _wrong(name, value, "a number")
        if value < 0 and name in DRAWING:
            raise _wrong(name, value, "a number from 0 on")
        if name in _PENALTIES and not 1 / LARGEST_PENALTY <= value <= LARGEST_PENALTY:
            raise _wrong(name, value, f"a number from {1 / LARGEST_PENALTY:g} to {LARGEST_PENALTY:g}")
        if name == "temperature":
            return 0.0 if value < _COLDEST else min(float(value), _HOTTEST)
        # transformers draws from all tokens where top_p is above 1.
        return min(float(value), 1.0) if name == "top_p" else float(value)
    if name in _INTEGERS:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
            raise _wrong(name, value, "an integer")
        if value < (-1 if name == "top_k" else 0):
            raise _wrong(name, value, "an integer from 0 on")
        if name in _TIMES and not 0 < value <= _MOST_TIMES:
            raise _wrong(name, value, f"an integer from 1 to {_MOST_TIMES}")
        if name in NGRAMS and value > MOST_NGRAM:
            raise _wrong(name, value, f"an integer from 0 to {MOST_NGRAM}")
        return max(value, 0)
    if name in _FLAGS:
        if not isinstance(value, bool):
            raise _wrong(name, value, "true or false")
        return value
    if name in _TOKENS:
        ids = _ids(name, value, NAME)
        return ids if isinstance(value, list | tuple) else ids[0] if ids else None
    if name == "stop_strings":
        texts = _listed(value)
        if len(texts) > MAX_STOPS or not all(isinstance(text, str) and len(text) <= MAX_STOP for text in texts):
            raise _wrong(name, value, f"text of at most {MAX_STOP:,} characters or a list of at most {MAX_STOPS} of it")
        return [text for text in texts if text]
    return value


def _wrong(name: str, value: Any, expected: str, file: str = NAME) -> BundleError:
    said = f"{file} says {name} = {value!r:.80}"
    return BundleError(f"{said}, where {expected} belongs; correct the source and export it.")
