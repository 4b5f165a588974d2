"""Treatments of keys among which calibration chooses for each layer, at equal bytes or nearly.

No single one is right for every model family (docs/choosing.md), so that the preset `default` states widths and leaves
the treatment to measurement. What stands in the scheme until then is the one that no family suffers from: keys as they
are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic.dataclasses import dataclass as checked_dataclass

from kvconvert.methods.part import STRICT, option

# What a recipe that states it keeps calibration from choosing.
TREATED_FIELDS = ("rotate_keys", "token_norm", "key_center", "boost_fraction")
# Where channels are boosted, fewer bits or larger groups pay for it: of (bits, group size), what costs as much or less.
BOOSTED_INSTEAD = {(3, 128): (2, 128, 0.5), (2, 32): (2, 128, 0.375), (2, 64): (2, 128, 0.125)}
_FORMS = (
    ("plain", "none", "none"),
    ("rotated", "hadamard", "none"),
    ("rotated, normalized", "hadamard", "joint"),
    ("normalized", "none", "joint"),
)


@dataclass(frozen=True)
class Treatment:
    """One way to store keys.

    Attributes:
        name: for statistics and tables.
        fields: the fields of the `KVScheme`.
    """

    name: str
    fields: Mapping[str, Any] = field(hash=False)

    @property
    def centers(self) -> bool:
        """Whether the constant part of keys is kept apart."""
        return self.fields["key_center"] != "none"

    def over(self, scheme: Any) -> Any:
        """The scheme with keys stored so."""
        return replace(scheme, **self.fields)


def treatments(scheme: Any, head_dim: int) -> list[Treatment]:
    """Treatments that keys of a scheme may get, the plainest first: it wins where nothing is gained.

    Args:
        scheme: whose widths and groups count; a treatment may not take more bits than these and a norm per token.
        head_dim: D, even where a constant can be kept.
    """
    boosted = {}
    # Smaller scales save less of these than of smaller groups'.
    pays = scheme.key_scale_bits == 16 or scheme.key_group_size == 128
    if pays and (scheme.key_bits, scheme.key_group_size) in BOOSTED_INSTEAD and not scheme.boost_fraction:
        bits, group, share = BOOSTED_INSTEAD[scheme.key_bits, scheme.key_group_size]
        boosted = {"key_bits": bits, "key_group_size": group, "boost_fraction": share}
    found = []
    for center in ("none", "calibrated") if head_dim % 2 == 0 else ("none",):
        before = "centered, " if center == "calibrated" else ""
        for name, rotation, norm in _FORMS:
            fields = {"rotate_keys": rotation, "token_norm": norm, "key_center": center}
            found.append(Treatment(before + name, fields))
        if boosted:
            plain = {"rotate_keys": "none", "token_norm": "none", "key_center": center}
            found.append(Treatment(before + "boosted", plain | boosted))
    return found


@checked_dataclass(frozen=True, config=STRICT)
class KeyTreatmentSearch:
    """The part of it that calibration chooses."""

    # No paper compares them; the preset `default` does.
    paper = {"calibrate_keys": False}
    presets = {"default": {"calibrate_keys": True}}

    calibrate_keys: bool = option(
        False,
        "true or false",
        "compare treatments of keys ([constant part kept or not] x [plain, rotated, boosted] x [norm or not]) by the "
        "error of each layer's output, and take the best; off where rotate_keys, token_norm, key_center or "
        "boost_fraction is stated",
    )

    def chooses_treatment(self, scheme: Any) -> bool:
        """Whether calibration is to choose how the keys of a scheme are stored."""
        pages = not (scheme.compresses_prompts() or scheme.is_static)
        return self.calibrate_keys and pages and scheme.key_bits < 16

    def searched(self, scheme: Any) -> list[str]:
        """The fields that are to be chosen, for messages."""
        return ["rotate_keys", "token_norm", "key_center"] if scheme and self.chooses_treatment(scheme) else []
