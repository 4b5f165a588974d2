"""Models that turn queries and keys by other rotary factors once a sequence is long (LongRoPE: Phi-3 and its kin)."""

from __future__ import annotations

from transformers import PretrainedConfig


def rotary_switch(config: PretrainedConfig) -> int | None:
    """Tokens up to which a model has its short factors, or None where factors do not depend on length.

    The factors of a forward pass follow from its largest position, so that they are those of all rows of a batch, and
    keys that were stored before are turned by other ones.
    """
    text_config = config.get_text_config(decoder=True)
    rope = getattr(text_config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope" or rope.get("long_factor") == rope.get("short_factor"):
        return None
    switch = rope.get("original_max_position_embeddings")
    return switch if switch and switch < text_config.max_position_embeddings else None
