"""How many tokens a model may attend over, and the refusal of lengths beyond that.

Nothing here imports torch, which takes seconds, or pydantic: commands refuse lengths by config.json before that.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvconvert.errors import KvconvertError, UsageError
from kvconvert.io.json_text import read_json

_MOST_POSITIONS = 2**63


def check_length(name: str, tokens: int | None, positions: int | None) -> None:
    """Refuse (UsageError) the value of a parameter that is a length beyond a model's positions."""
    if tokens is not None and positions is not None and tokens > positions:
        raise UsageError(
            f"`{name}` is {tokens:,}, more than the {positions:,} positions this model has; choose a shorter one."
        )


def check_prompts(contexts: Collection[int], new_tokens: int, positions: int | None) -> None:
    """Refuse (UsageError) prompts of these lengths that leave a model no positions for the new tokens."""
    if contexts and positions is not None and max(contexts) + new_tokens > positions:
        raise UsageError(
            f"A prompt of {max(contexts):,} tokens and {new_tokens:,} new ones do not fit the model's {positions:,} "
            "positions; lower `contexts` or `new_tokens`."
        )


def check_chunk(prompt_chunk: int, max_batch_tokens: int) -> None:
    """Refuse (UsageError) chunks of a prompt that are more than a step of the Engine may read."""
    if prompt_chunk > max_batch_tokens:
        raise UsageError(
            f"`max_batch_tokens` is {max_batch_tokens:,}; it has to be at least `prompt_chunk`, which is "
            f"{prompt_chunk:,}."
        )


def stated_positions(model: Path) -> int | None:
    """The positions that config.json of a model's directory states, at least as many as the model has; None where it
    does not state them by the usual names.

    Only transformers, which takes seconds to import, knows them in every case: the model's loader checks again.
    """
    try:
        return _stated(read_json(model / "config.json"))
    except (OSError, ValueError, KvconvertError):  # which the loader reports
        return None


def _stated(config: Any) -> int | None:
    text = config.get("text_config", config) if isinstance(config, dict) else None
    if not isinstance(text, dict):
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    named = text.get("max_position_embeddings", text.get("n_positions"))
    return scaled_positions(named, rope if isinstance(rope, dict) else {})


def scaled_positions(positions: object, rope: Mapping[str, Any]) -> int | None:
    """`max_position_embeddings` times what RoPE is scaled by; None where it is no number of positions.

    It includes the scaling of longrope and llama3. That of yarn, linear, and dynamic is often asked for beside the
    positions of training, which are `original_max_position_embeddings` if a configuration has both.
    """
    if not isinstance(positions, int) or positions <= 0:
        return None
    # In some models layers of each type have a RoPE of their own, and the shortest one limits all.
    nested = [kind for kind in rope.values() if isinstance(kind, dict)]
    return min(_scaled(positions, kind) for kind in nested or [rope])


def _scaled(positions: int, rope: Mapping[str, Any]) -> int:
    """Positions of one RoPE."""
    if rope.get("rope_type", rope.get("type")) not in ("yarn", "linear", "dynamic"):
        return positions
    original, factor = rope.get("original_max_position_embeddings") or positions, rope.get("factor") or 1.0
    for name, value in (("original_max_position_embeddings", original), ("factor", factor)):
        if not isinstance(value, int | float) or not abs(value) < _MOST_POSITIONS:
            from kvconvert.io.tensorheader import mismatch

            raise mismatch("config.json", f"{name} of a RoPE", "a number", repr(value)[:80])
    return max(positions, int(original * factor))
