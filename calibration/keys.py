"""How a layer's keys are to be stored, found by measuring: with or without their constant part, rotated, normalized.

No treatment is best for every model. A Hadamard rotation evens out the channels of some, and spreads over all channels
what RoPE makes of a constant in others; where a few channels have the variance, more bits for these are better. So
every treatment of `kvconvert.methods.keys` is tried on a sample of the layer's attention, each with its own
error feedback and a clip ratio that suits its bits, and

    argmin over treatments of  E || (o_s(t) - o(t)) W_O^T ||^2

is taken: the error of the layer's output with keys stored so and exact values, as for clip ratios
(`calibration/scales.py`).

The constant part is the mean of keys before RoPE, which is read off the tables that the model hands to its layers. A
layer gets cos and sin [T, R] of positions 0, 1, ..., whatever made them: every scaling that leaves frequencies
as they are for all lengths is in the angles (linear, llama3, YaRN), a factor on both (YaRN's attention factor) in their
size, partial RoPE in R. How channels are paired does not always show in the tables: halves (i, i + R / 2) or neighbors
(2 i, 2 i + 1). The wrong pairing makes no constant of keys that have one, so that keys themselves decide.

Error feedback: which part of a key channel's rounding error later channels can make up for.

With H = E[q^T q] over the calibration queries of a KV head (all its query heads, after RoPE and the cache's rotation:
in the coordinates of stored keys, which a token norm leaves as they are),

    H + 0.1 mean(diag H) I,      its inverse = U^T U, U upper triangular (Cholesky, float64),      F_ij = U_ij / U_ii

What is left of the expected error when every channel has the same step is

    sum_i U_ii^-2 / trace H

with the damped H: 1 where channels of queries are uncorrelated. Rounding itself is in `kernels/pages/reference.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvconvert.cache import layer_format
from kvconvert.calibration.attention_sample import (
    AttentionPass,
    AttentionSample,
    AttentionSampler,
    SampleReader,
    as_cached,
)
from kvconvert.calibration.protocol import CalibrationPass, LayerJob, LayerWork, PassResult, require_finite, significant
from kvconvert.calibration.ranks import ALONE, Ranks
from kvconvert.calibration.scales import key_clip_ratio_errors, pages_read
from kvconvert.errors import UnsupportedModelError
from kvconvert.kernels.device import float32_products
from kvconvert.kernels.page_formats import LayerFormat
from kvconvert.kernels.pages import key_center
from kvconvert.kernels.rotate import hadamard_transform
from kvconvert.methods import KVCalibration, KVScheme
from kvconvert.methods.keys import Treatment, treatments

DAMPING = 0.1  # of the mean diagonal; 0.01 to 0.3 made no difference on held-out text


class QueryMoments:
    """Running E[q^T q] of the queries of each KV head."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._count = 0

    def update(self, queries: Tensor, num_key_value_heads: int) -> None:
        """Add queries [B, Hq, T, D]."""
        grouped = queries.float().unflatten(1, (num_key_value_heads, -1))
        for sequence in grouped:
            rows = sequence.flatten(1, 2)
            with float32_products(rows.device):
                total = (rows.transpose(1, 2) @ rows).double()
            self._sum = total if self._sum is None else self._sum + total
            self._count += rows.shape[1]

    def result(self, ranks: Ranks = ALONE) -> Tensor:
        """Float64 [H, D, D]."""
        return ranks.sum_(self._sum) / int(ranks.sum_(torch.tensor(self._count)))


def feedback_matrices(moments: Tensor) -> tuple[Tensor, Tensor]:
    """F and what it leaves of the expected error; see the module's docstring.

    Args:
        moments: H, [heads, D, D], finite. All zeros (nothing asks) gives the identity.

    Returns:
        float64 [heads, D, D], upper triangular with a diagonal of ones, and float64 [heads], 0 to 1.
    """
    dim = moments.shape[-1]
    moments = moments.double()
    mean = moments.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    # Scaled to a mean diagonal of 1, which leaves F as it is and keeps small queries clear of the smallest numbers.
    scaled = moments / torch.where(mean > 0, mean, 1.0)
    damped = scaled + DAMPING * torch.eye(dim, dtype=scaled.dtype, device=scaled.device)
    upper = torch.linalg.cholesky(torch.linalg.inv(damped), upper=True)
    diagonal = upper.diagonal(dim1=1, dim2=2)
    left = diagonal.pow(-2).sum(1) / damped.diagonal(dim1=1, dim2=2).sum(1)
    return (upper / diagonal.unsqueeze(2)).triu(), left


class ErrorFeedbackPass(AttentionPass):
    """Measure the layer's queries and round its keys with feedback from there on.

    Stands before the passes that choose clip ratios, which then see keys as they will be rounded. The queries are those
    of the source's weights.
    """

    name = "error_feedback"

    def __init__(self) -> None:
        self._moments = QueryMoments()
        self._feedback: Tensor | None = None
        self._left: Tensor | None = None

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> ErrorFeedbackPass | None:
        """The pass for a scheme that asks for error feedback, or leaves the rounding of narrow keys to calibration."""
        scheme = job.scheme
        if scheme is None:
            return None
        wanted = scheme.feeds_errors_back or job.search.chooses_error_feedback(scheme)
        return cls() if wanted else None

    def see(self, work: LayerWork, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Sum up queries as they come, not rotated yet."""
        self._moments.update(query, key.shape[1])

    def solve(self, work: LayerWork) -> None:
        """Bring the moments into the coordinates of stored keys, and factorize them."""
        moments = self._moments.result(work.ranks)
        require_finite({"their second moments": moments}, "queries", work)
        for _ in range(2):  # H becomes R^T H R: rotated as rows of queries are, then its transpose likewise
            moments = _rotated(moments, work).transpose(1, 2)
        self._feedback, self._left = feedback_matrices(moments)

    def apply(self, work: LayerWork) -> None:
        """Put the matrices into the format of the layer's cache."""
        feedback = self._feedback.half().to(next(work.layer.parameters()).device)
        work.cache = replace(work.cache, key_tensors=work.cache.key_tensors._replace(feedback=feedback))

    def result(self) -> PassResult:
        """The matrices, and what they leave of the error."""
        return PassResult(
            plan={"key_feedback": self._feedback.half().cpu()},
            statistics={"expected_error_left": [round(float(value), 6) for value in self._left]},
            scheme={"key_rounding": "error_feedback"},
        )


def _rotated(rows: Tensor, work: LayerWork) -> Tensor:
    """Rows [..., D] rotated as the cache rotates queries."""
    return as_cached(rows, rows, rows, work.cache)[0].double()


TOLERANCE = 0.02  # of a table's entries: bfloat16 rounds those near 1 by 0.004


@dataclass(frozen=True, eq=False)
class Rope:
    """Rotary position embeddings of a head.

    Attributes:
        frequencies: float32 [D / 2], radians per token; 0 for channels that are not turned.
        pairs: int64 [D / 2, 2], the channels (a, b) of each: a becomes a cos - b sin, b b cos + a sin.
        scale: by which turned channels are multiplied.
    """

    frequencies: Tensor
    pairs: Tensor
    scale: float

    def undone(self, keys: Tensor) -> Tensor:
        """Keys [..., T, D] of positions 0 to T - 1 as they were before RoPE, but scaled: float32."""
        position = torch.arange(keys.shape[-2], device=keys.device, dtype=torch.float64)
        angle = position.unsqueeze(1) * self.frequencies.to(keys.device, torch.float64)
        cos, sin = angle.cos().float(), angle.sin().float()
        first, second = self.pairs.to(keys.device).unbind(1)
        a, b = keys[..., first].float(), keys[..., second].float()
        result = torch.empty(keys.shape, dtype=torch.float32, device=keys.device)
        result[..., first], result[..., second] = a * cos + b * sin, b * cos - a * sin
        return result


def ropes_of(embeddings: object, dim: int) -> list[Rope] | str:
    """Readings of a layer's tables of cosines and sines, or why no constant can be kept for them.

    Args:
        embeddings: (cos, sin), each [1, T, R] of positions 0 to T - 1, as layers get them; anything else is refused.
        dim: D, channels of a head.

    Returns:
        one or two readings, which differ in how channels are paired; or the end of a sentence.
    """
    tables = embeddings if isinstance(embeddings, (tuple, list)) else ()
    if len(tables) != 2 or not all(torch.is_tensor(t) and t.is_floating_point() and t.dim() == 3 for t in tables):
        return "the layer gets no table of cosines and sines of its RoPE"
    cos, sin = (table[0].double().cpu() for table in tables)
    if len(tables[0]) != 1 or len(cos) < 2 or dim % 2:
        return "its RoPE's tables are not those of one sequence of tokens"
    count = cos.shape[1]
    half = count // 2
    if torch.equal(cos[:, :half], cos[:, half:]) and torch.equal(sin[:, :half], sin[:, half:]):
        cos, sin, arrangements = cos[:, :half], sin[:, :half], ("halves", "neighbors")
    elif torch.equal(cos[:, ::2], cos[:, 1::2]) and torch.equal(sin[:, ::2], sin[:, 1::2]):
        cos, sin, arrangements = cos[:, ::2], sin[:, ::2], ("neighbors",)
    else:
        count, arrangements = 2 * count, ("halves", "neighbors")
    if count > dim:
        return f"its RoPE turns {count} channels of heads of {dim}"
    scale = float(torch.hypot(cos[0], sin[0]).mean())
    frequencies = _frequencies(cos, sin)
    angle = torch.arange(len(cos), dtype=torch.float64).unsqueeze(1) * frequencies
    if not scale or max((scale * angle.cos() - cos).abs().max(), (scale * angle.sin() - sin).abs().max()) > (
        TOLERANCE * scale
    ):
        return "its RoPE does not turn by equal angles from token to token"
    rest = torch.arange(count, dim).view(-1, 2)
    turned = torch.arange(count)
    frequencies = torch.cat([frequencies, frequencies.new_zeros(len(rest))]).float()
    pairings = {"halves": turned.view(2, -1).T, "neighbors": turned.view(-1, 2)}
    return [Rope(frequencies, torch.cat([pairings[name], rest]), scale) for name in arrangements]


def _frequencies(cos: Tensor, sin: Tensor) -> Tensor:
    """Radians per token, float64 [F]: from the first step, refined by ever longer ones, which rounding moves less."""
    frequencies = torch.atan2(sin[1], cos[1])
    step = 2
    while step < len(cos):
        beyond = torch.atan2(sin[step], cos[step]) - step * frequencies
        frequencies += (torch.remainder(beyond + math.pi, 2 * math.pi) - math.pi) / step
        step *= 2
    return frequencies


def constant_part(keys: Tensor, ropes: Sequence[Rope], first: int) -> tuple[Rope, Tensor, Tensor]:
    """The mean of keys before RoPE.

    Args:
        keys: [n, H, T, D] after RoPE, of positions 0 to T - 1, not rotated otherwise.
        ropes: readings of the layer's RoPE; the one that makes most of the keys constant is taken.
        first: the first token that is quantized; those before it are left out.

    Returns:
        the RoPE, the mean float32 [H, D], and float64 [H]: its share of the energy of each head's keys.
    """
    energy = keys[:, :, first:].double().square().sum(3).mean((0, 2)).clamp_min(torch.finfo(torch.float64).tiny)
    best: tuple[Rope, Tensor, Tensor] | None = None
    for rope in ropes:
        mean = rope.undone(keys)[:, :, first:].mean((0, 2), dtype=torch.float64)
        share = mean.square().sum(1) / energy
        if best is None or share.mean() > best[2].mean():
            best = rope, mean.float(), share
    return best


# Clip ratios by the bits of keys, and the number of the sample's sequences, with which treatments are compared: they
# differ by more than clip ratios do. The pass that follows chooses the ratio, on all of the sample.
CLIP_RATIOS = {1: 0.5, 2: 0.85, 3: 0.95, 4: 1.0, 8: 1.0}
SEQUENCES = 4


@dataclass(frozen=True, eq=False)
class ConstantPart:
    """The constant part of a layer's keys, not rotated.

    Attributes:
        rope: the rotary embedding of the layer.
        mean: float32 [H, D], before RoPE.
        share: float64 [H], of the energy of each head's keys.
    """

    rope: Rope
    mean: Tensor
    share: Tensor

    def plan(self) -> dict[str, Tensor]:
        """The tensors of the KV plan."""
        return {
            "key_mean": self.mean.cpu(),
            "rope_frequencies": self.rope.frequencies.cpu(),
            "rope_pairs": self.rope.pairs.int().cpu().contiguous(),
        }


def measure_constant_part(
    keys: Tensor, embeddings: object, sink_tokens: int, changing_rope: str | None
) -> ConstantPart | str:
    """The constant part of keys [n, H, T, D] after RoPE, at positions 0 to T - 1 and not rotated otherwise.

    Args:
        keys: the keys of the sample.
        embeddings: what the layer got as `position_embeddings`.
        sink_tokens: first tokens, which are not quantized and left out.
        changing_rope: see `LayerWork`.

    Returns:
        the constant part, or why the layer can have none, as the end of a sentence.
    """
    ropes = changing_rope or ropes_of(embeddings, keys.shape[-1])
    if isinstance(ropes, str):
        return ropes
    return ConstantPart(*constant_part(keys, ropes, min(sink_tokens, keys.shape[2] - 1)))


class TreatmentSearch:
    """The treatments of one layer's keys on a sample of its attention.

    Args:
        sample: the sample of the layer's attention, in the coordinates of a cache that rotates keys or does not.
        rotated: whether it does.
        constant: the constant part of the layer's keys, or why there is none.
        search: what calibration chooses, of which error feedback and clip ratios count here.
    """

    def __init__(
        self,
        sample: AttentionSample,
        rotated: bool,
        constant: ConstantPart | str,
        search: KVCalibration,
    ) -> None:
        self.constant, self.search = constant, search
        shape, value_dim = sample.keys.shape, sample.values.shape[3]
        self._shape = {"heads": shape[1], "key_dim": shape[3], "value_dim": value_dim}
        self._samples = {rotated: sample}
        self._feedback: dict[bool, Tensor] = {}

    def sample(self, rotated: bool) -> AttentionSample:
        """The sample with keys and queries rotated or not."""
        if rotated not in self._samples:
            other = self._samples[not rotated]
            turned = (hadamard_transform(side, inverse=not rotated) for side in (other.queries, other.keys))
            self._samples[rotated] = replace(other, **dict(zip(("queries", "keys"), turned, strict=True)))
        return self._samples[rotated]

    def format_of(self, scheme: KVScheme) -> LayerFormat:
        """The cache of a scheme, with error feedback and a constant part where it has them."""
        cache = layer_format(scheme.uncalibrated(), **self._shape)
        rotated, keys = cache.rotations.keys, cache.key_tensors
        if scheme.feeds_errors_back or self.search.chooses_error_feedback(scheme):
            keys = keys._replace(feedback=self._feedback_of(rotated))
        if scheme.centers_keys:
            part = self.constant
            center = key_center(part.mean, part.rope.frequencies, part.rope.pairs, rotated)
            keys = keys._replace(center=center)
        return replace(cache, key_tensors=keys)

    def drop_sample(self) -> None:
        """Keep what `format_of` needs, and nothing of the sample's size."""
        if self._samples:
            for rotated in (False, True):
                self._feedback_of(rotated)
            self._samples.clear()

    def _feedback_of(self, rotated: bool) -> Tensor:
        if rotated not in self._feedback:
            moments, sample = QueryMoments(), self.sample(rotated)
            moments.update(sample.queries, sample.keys.shape[1])
            self._feedback[rotated] = feedback_matrices(moments.result())[0].half()
        return self._feedback[rotated]

    def error(self, scheme: KVScheme, ranks: Ranks = ALONE) -> float:
        """Relative error of the layer's output with keys stored so."""
        cache = self.format_of(scheme)
        searched = self.search.searches_clip_ratio("key")
        ratio = CLIP_RATIOS[scheme.keys.bits] if searched else scheme.keys.clip_ratio
        whole = self.sample(cache.rotations.keys)
        some = replace(whole, **{name: getattr(whole, name)[:SEQUENCES] for name in ("queries", "keys", "values")})
        return float(key_clip_ratio_errors(some, cache, (ratio,), ranks))

    def best(
        self, scheme: KVScheme, choices: Sequence[Treatment], ranks: Ranks = ALONE
    ) -> tuple[Treatment, dict[str, float]]:
        """The best treatment of a scheme, the first of equal ones, and every treatment's error by its name."""
        errors: dict[str, float] = {}
        possible = [t for t in choices if not (t.centers and isinstance(self.constant, str))]
        for treatment in possible:
            errors[treatment.name] = self.error(treatment.over(scheme), ranks)
        return min(possible, key=lambda treatment: errors[treatment.name]), errors


class KeyTreatmentPass(SampleReader):
    """Choose how the layer's keys are stored, or measure the constant part that its scheme wants kept.

    Stands before the passes that fit error feedback and clip ratios to what it chose.

    Args:
        sampler: takes the sample, earlier in the list of passes.
        scheme: the scheme of the layer.
        search: what calibration chooses.
    """

    name = "key_treatments"

    def __init__(self, sampler: AttentionSampler, scheme: KVScheme, search: KVCalibration) -> None:
        super().__init__(sampler)
        self.scheme, self.search = scheme, search
        self._constant: ConstantPart | str = ""
        self._chosen: Treatment | None = None
        self._errors: dict[str, float] = {}
        self._cache: LayerFormat | None = None
        self._note = ""

    @classmethod
    def of(cls, job: LayerJob, sampler: CalibrationPass) -> KeyTreatmentPass | None:
        """The pass for a scheme that keeps a constant part, or whose keys' treatment is to be chosen."""
        scheme = job.scheme
        if scheme is None or not (scheme.centers_keys or job.search.chooses_treatment(scheme)):
            return None
        return cls(sampler, scheme, job.search)

    def sequences_read(self, samples: int, length: int) -> int:
        """Those with which treatments are compared."""
        return min(SEQUENCES, super().sequences_read(samples, length))

    def solve(self, work: LayerWork) -> None:
        """Measure the constant part, and try the treatments.

        Raises:
            UnsupportedModelError: the scheme asks for a constant part and the layer can have none.
        """
        cache, sample = work.cache, self.sampler.sample
        keys = hadamard_transform(sample.keys, inverse=True) if cache.rotations.keys else sample.keys
        self._constant = measure_constant_part(
            keys, self.sampler.position_embeddings, cache.sink_tokens, work.changing_rope
        )
        if self.scheme.centers_keys and isinstance(self._constant, str):
            raise UnsupportedModelError(
                f'[kv] key_center = "calibrated" is not possible in {work.name}: {self._constant}; set key_center = '
                '"none" there.'
            )
        search = TreatmentSearch(sample, cache.rotations.keys, self._constant, self.search)
        if self.search.chooses_treatment(self.scheme):
            if pages_read(work.seq_len, cache.key_window, cache.keys.page_size):
                choices = treatments(self.scheme, keys.shape[3])
                self._chosen, self._errors = search.best(self.scheme, choices, work.ranks)
            else:
                self._note = f"sequences of {work.seq_len:,} tokens are too short to choose a treatment of keys"
        scheme = self.scheme if self._chosen is None else self._chosen.over(self.scheme)
        self._cache = search.format_of(scheme)
        self.sampler.sample = search.sample(self._cache.rotations.keys)

    def apply(self, work: LayerWork) -> None:
        """Store keys so from here on; feedback and clip ratio are for the passes that follow."""
        chosen = self._cache
        tensors = work.cache.key_tensors._replace(center=chosen.key_tensors.center)
        work.cache = replace(work.cache, keys=chosen.keys, key_tensors=tensors, rotations=chosen.rotations)

    def result(self) -> PassResult:
        """Return the choice, every treatment's error, and the constant part where it is kept."""
        fields: dict[str, Any] = {} if self._chosen is None else dict(self._chosen.fields)
        kept = self.scheme.centers_keys if self._chosen is None else self._chosen.centers
        statistics: dict[str, Any] = {}
        if not isinstance(self._constant, str):
            statistics["constant_share_of_key_energy"] = [float(f"{float(x):.4g}") for x in self._constant.share]
        if self._errors:
            statistics["output_error"] = {name: significant(error) for name, error in self._errors.items()}
        notes = [self._note] if self._note else []
        if isinstance(self._constant, str) and self._chosen is not None:
            notes.append(f"keys are stored with their constant part: {self._constant}")
        return PassResult(
            plan=self._constant.plan() if kept else {}, statistics=statistics, scheme=fields, notes=tuple(notes)
        )
