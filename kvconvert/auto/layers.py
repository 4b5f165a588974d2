"""The layers that a search chooses for: which candidates each may take, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from kvconvert.auto.allocation import Option
from kvconvert.auto.sizes import stored_bytes
from kvconvert.calibration.protocol import CacheFormat
from kvconvert.convert.layer_records import layer_scheme
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.convert.recipe import Recipe
from kvconvert.errors import RecipeError
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.auto import KEY_CANDIDATES, VALUE_CANDIDATES, Candidate
from kvconvert.models.adapters import head_dim, key_value_heads, layer_config
from kvconvert.models.layer_types import layer_types_of
from kvconvert.runtime.cache.formats import layer_format, rotations

# A window is a choice only where most of the text that is measured lies beyond it.
TEXT_PER_WINDOW = 8


@dataclass(frozen=True, eq=False)
class SearchedLayer:
    """One layer and its choices.

    Attributes:
        index: of the layer.
        scheme: the recipe's, resolved for the layer.
        search: what calibration chooses for every candidate.
        heads, head_dim: KV heads and channels.
        keys, values: candidates, those without any quantization last.
        costs: bytes of each candidate with `context` tokens read, by name.
    """

    index: int
    scheme: KVScheme
    search: KVCalibration
    heads: int
    head_dim: int
    keys: tuple[Candidate, ...]
    values: tuple[Candidate, ...]
    costs: Mapping[str, int]

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Of both sides."""
        return self.keys + self.values

    def scheme_of(self, *candidates: Candidate) -> KVScheme:
        """The scheme with these candidates; a side without one stays in full precision."""
        chosen = {candidate.side: candidate for candidate in (self.keys[-1], self.values[-1], *candidates)}
        return replace(self.scheme, **chosen["key"].fields, **chosen["value"].fields)

    def feeds_errors_back(self, *candidates: Candidate) -> bool:
        """Whether keys are rounded with error feedback, stated or chosen by calibration."""
        scheme = self.scheme_of(*candidates)
        return scheme.feeds_errors_back or self.search.chooses_error_feedback(scheme)

    def cache(
        self,
        *candidates: Candidate,
        clip_ratios: Mapping[str, float] | None = None,
        key_feedback: Tensor | None = None,
    ) -> CacheFormat:
        """The same in the terms of kernels, values being rotated at run time.

        Args:
            candidates: of one side or both.
            clip_ratios: by candidate's name; the scheme's own without one.
            key_feedback: float16 [heads, head_dim, head_dim], taken where `feeds_errors_back`.
        """
        found = {
            f"{candidate.side}_clip_ratio": ratio
            for candidate in candidates
            if (ratio := (clip_ratios or {}).get(candidate.name)) is not None
        }
        scheme = replace(self.scheme_of(*candidates), **found).with_online_rotation()
        pages = layer_format(scheme, self.heads, self.head_dim, self.head_dim)
        if self.feeds_errors_back(*candidates):
            pages = replace(pages, key_feedback=key_feedback)
        return CacheFormat.of(scheme, pages, None, rotations(scheme))

    def pairs(self) -> list[tuple[Candidate, Candidate]]:
        """Every way to store keys with every way to store values."""
        return [(key, value) for key in self.keys for value in self.values]

    def options(self, losses: Mapping[str, float]) -> list[Option]:
        """`pairs()` as options of an allocation, with losses by candidate's name."""
        return [
            Option(
                self.costs[key.name] + self.costs[value.name],
                losses[key.name] + losses[value.name],
                (key.recent_tokens, value.recent_tokens),
            )
            for key, value in self.pairs()
        ]


def searched_layers(runner: LayerRunner, recipe: Recipe, context: int, text_length: int) -> list[SearchedLayer]:
    """The layers whose cache the recipe quantizes.

    Args:
        runner: of the model.
        recipe: whose schemes the candidates are laid over.
        context: tokens of the sequence that costs are stated for.
        text_length: tokens of the sequences on which candidates are measured.
    """
    windows = [arguments.get("sliding_window") for arguments in layer_types_of(runner.config)[1]]
    layers = []
    for index in range(runner.num_layers):
        scheme, _ = layer_scheme(runner, recipe, index)
        if scheme is None:
            continue
        config = layer_config(runner.config, index)
        heads, channels = key_value_heads(config), head_dim(config)
        plain = SearchedLayer(index, scheme, recipe.calibration, heads, channels, KEY_CANDIDATES, VALUE_CANDIDATES, {})
        sides: dict[str, dict[object, Candidate]] = {"key": {}, "value": {}}
        costs: dict[str, int] = {}
        for candidate in plain.candidates:
            if candidate.recent_tokens * TEXT_PER_WINDOW > text_length:
                continue
            own = plain.scheme_of(candidate)
            try:
                pages = layer_format(own, heads, channels, channels)
            except RecipeError:  # the head size cannot be packed so
                continue
            # Groups that are larger than the head are the head's.
            meaning = (pages.keys if candidate.side == "key" else pages.values, candidate.recent_tokens)
            if meaning not in sides[candidate.side]:
                sides[candidate.side][meaning] = candidate
                sizes = stored_bytes(own, pages, context, windows[index])
                costs[candidate.name] = sizes[0 if candidate.side == "key" else 1]
        keys, values = (tuple(found.values()) for found in sides.values())
        layers.append(replace(plain, keys=keys, values=values, costs=costs))
    return layers
