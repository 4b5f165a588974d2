"""What a layer's scheme needs of its part of the KV plan, as its formats hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from kvconvert.cache import Side
from kvconvert.errors import RecipeError
from kvconvert.kernels.page_formats import ChannelScales, LayerFormat, PageFormat, SideTensors
from kvconvert.kernels.pages.center import KeyCenter, key_center
from kvconvert.kernels.select import TokenScorer
from kvconvert.methods import KVScheme
from kvconvert.methods.kvzip import SCORE_QUANTILES, scorer_shapes
from kvconvert.methods.scales import SCALE_NAMES


def with_plan(
    format: LayerFormat, scheme: KVScheme, plan: Mapping[str, torch.Tensor], device: torch.device
) -> LayerFormat:
    """A layer's formats with what its scheme needs of its part of the KV plan: fixed boosted channels, static scales,
    error feedback, key centers.

    Raises:
        RecipeError: a tensor is missing or does not fit the layer's shape.
    """
    keys = SideTensors(
        boosted=_fixed_channels(format.keys, plan, device),
        static=_static_scales("key", format.keys, plan, device),
        feedback=_key_feedback(format.keys, plan, device) if scheme.feeds_errors_back else None,
        center=_key_center(format, plan, device) if scheme.centers_keys else None,
    )
    values = SideTensors(static=_static_scales("value", format.values, plan, device))
    return replace(format, key_tensors=keys, value_tensors=values)


def token_scorer(
    format: LayerFormat, heads: int, plan: Mapping[str, torch.Tensor], device: torch.device
) -> TokenScorer:
    """What predicts the scores of the tokens of a layer of `heads` KV heads; RecipeError as of `with_plan`, and where
    a tensor is not finite.
    """
    shapes = scorer_shapes(heads, format.keys.head_dim, format.values.head_dim)
    tensors = {name: _of_scores(plan, name, shape) for name, shape in shapes.items()}
    del tensors["scorer_quantiles"]  # the host decides by them
    return TokenScorer(*(tensor.to(device, torch.float32) for tensor in tensors.values()))


def score_quantiles(heads: int, plan: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Quantiles [heads, SCORE_QUANTILES] of the scores of a layer's KV heads; RecipeError as of `token_scorer`."""
    return _of_scores(plan, "scorer_quantiles", (heads, SCORE_QUANTILES)).float().cpu()


def _of_scores(plan: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor by which scores are predicted."""
    setting, instead = 'selection = "predicted"', 'choose selection = "reconstruction"'
    tensor = _planned(plan, name, shape, setting, instead)
    if not tensor.isfinite().all():
        raise RecipeError(
            f"[kv] {setting} needs numbers, and {name} of the KV plan is not finite; use another bundle, or {instead}."
        )
    return tensor


def _planned(
    plan: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...], setting: str, instead: str, needed: str = ""
) -> torch.Tensor:
    """A tensor of a layer's part of the KV plan, for which a setting asks (RecipeError: missing, misshapen)."""
    tensor = plan.get(name)
    found = None if tensor is None else tuple(tensor.shape)
    if tensor is None or found != shape:
        raise RecipeError(
            f"[kv] {setting} needs {needed or f'{name} of shape {shape}'} from a KV plan, and found "
            f"{'none' if found is None else found}; use a bundle calibrated so, or {instead}."
        )
    return tensor


def _key_center(format: LayerFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> KeyCenter:
    """The center of a layer whose pages hold keys without it."""
    f = format.keys
    shapes = {"key_mean": (f.heads, f.head_dim), "rope_frequencies": (f.head_dim // 2,)}
    shapes["rope_pairs"] = (f.head_dim // 2, 2)
    setting, instead = "key_center = 'calibrated'", 'key_center = "none"'
    tensors = [_planned(plan, name, shape, setting, instead).to(device) for name, shape in shapes.items()]
    return key_center(*tensors, format.rotations.keys)


def _key_feedback(f: PageFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """The matrices float16 [H, D, D] of a layer that rounds its keys with error feedback."""
    setting, instead = "key_rounding = 'error_feedback'", 'key_rounding = "nearest"'
    feedback = _planned(plan, "key_feedback", (f.heads, f.head_dim, f.head_dim), setting, instead)
    return feedback.to(device, torch.float16).contiguous()


def _fixed_channels(f: PageFormat, plan: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor | None:
    """The boosted channels int64 [H, n] of a layer that fixes them; None for other layers."""
    if not f.boosted or not f.fixed_channels:
        return None
    shape, needed = (f.heads, f.boosted), f"{f.boosted} channels for each of {f.heads} heads"
    setting, instead = "boost_select = 'calibrated'", "select dynamically"
    return _planned(plan, "boosted_channels", shape, setting, instead, needed).to(device, torch.long)


def _static_scales(
    side: Side, f: PageFormat, plan: Mapping[str, torch.Tensor], device: torch.device
) -> ChannelScales | None:
    """The scales that static pages of one side need; None for other pages."""
    if not f.static:
        return None
    setting, instead = "static_scales = 'calibrated'", 'static_scales = "none"'
    parts = []
    for name in (f"static_{side}_{part}" for part in SCALE_NAMES):
        needed = f"{name} for {f.heads} heads of {f.head_dim} channels"
        tensor = _planned(plan, name, (f.heads, f.head_dim), setting, instead, needed)
        parts.append(tensor.to(device, torch.float16))
    return ChannelScales(*parts)
