"""What benchmarks/multimodal.py measures and how: prompts of two drawings, exact answers, KL, attention errors.

Every prompt shows two drawings, 288 visual tokens. Two ways of reading them through a low-bit cache:

- questions: the drawings are read and the cache is sealed before the question arrives, as in a second turn, so that
  every token of the question and of the answer reads the drawings at low bits. In a single prompt a short answer would
  be decided by its last token, in full precision, before anything is quantized.
- captions: one prompt with drawings and request, sealed, then the caption: the setting of the CalibQuant paper.

Answers and captions are scored in one pass over their tokens. "Exact" means that every token and the end are the most
likely one, which is what greedy generation would say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlavaForConditionalGeneration, LlavaProcessor
from transformers.cache_utils import DynamicLayer

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, AttentionSample, attention_observed, causal
from kvconvert.data.drawings import Drawing, draw
from kvconvert.kernels.spans import SpanFormat, quantize_span, shift_extremes, span_keys, span_values
from kvconvert.runtime import KVCache, watch_inputs

USER, TURN = "<|user|>", "<|end|><|assistant|>"
ORDINALS = ("first", "second")
QUESTIONS = 4  # per pair, two about each drawing
QUERIES = 128  # tokens after the drawing in the samples for attention
BATCH = 10
EXACT = "sdpa"


@dataclass(frozen=True)
class Reader:
    """A way of keeping the drawings' keys and values.

    Attributes:
        new_cache: an empty cache for prompts whose visual tokens are these (bool [tokens]).
        attention: the attention implementation it goes with.
    """

    new_cache: Callable[[Tensor], Cache]
    attention: str = EXACT


@dataclass(frozen=True)
class Pair:
    """Two drawings and what is asked about them: (question, answer), captions apart."""

    drawings: tuple[Drawing, Drawing]
    questions: list[tuple[str, str]]
    caption: tuple[str, str]


@dataclass(frozen=True)
class Answers:
    """What a reader answers, scored token by token.

    Attributes:
        scores: log-probabilities of the answers' tokens, float32 [tokens, vocabulary].
        pair: which pair of drawings each token is about, int64 [tokens].
        exact: whether each answer is right in every token, its end included.
        bits: per number of the drawings' keys and values in the cache; 0 where they are simulated.
    """

    scores: Tensor
    pair: Tensor
    exact: list[bool]
    bits: float

    def divergence(self, exact: Answers) -> Tensor:
        """Kullback-Leibler divergence from what full precision answers, float64 [tokens]."""
        return (exact.scores.exp() * (exact.scores - self.scores)).sum(-1, dtype=torch.float64)

    def by_pair(self, figures: Tensor) -> Tensor:
        """Mean of the tokens' figures for each pair, float64 [pairs]."""
        count = int(self.pair.max()) + 1
        return torch.zeros(count, dtype=torch.float64).index_reduce(0, self.pair, figures, "mean", include_self=False)


def pairs(seed: int, count: int, first: int = 0) -> list[Pair]:
    """Pairs of drawings number `first` and following of a seed."""
    found = []
    for index in range(count):
        drawings = tuple(draw(seed, 2 * (first + index) + side) for side in (0, 1))
        asked, captions = [], []
        for ordinal, drawing in zip(ORDINALS, drawings, strict=True):
            turns = [
                (f"In the {ordinal} picture, {q.text[0].lower()}{q.text[1:]}", q.answer) for q in drawing.questions
            ]
            captions += [turn for turn in turns if "describe" in turn[0]]
            asked += [turn for turn in turns if "describe" not in turn[0]][: QUESTIONS // 2]
        found.append(Pair(drawings, asked, captions[index % 2]))
    return found


class Bench:
    """The model, its processor, and the prompts."""

    def __init__(self, model: LlavaForConditionalGeneration, processor: LlavaProcessor, seed: int, count: int):
        self.model, self.processor, self.tokenizer = model, processor, processor.tokenizer
        self.pairs = pairs(seed, count)
        watch_inputs(model)

    def prompt(self, drawings: tuple[Drawing, ...], question: str) -> dict[str, Tensor]:
        text = USER + self.processor.image_token * len(drawings) + question
        return dict(self.processor(images=[d.image for d in drawings], text=[text], return_tensors="pt"))

    def stacked(self, parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def visual(self, ids: Tensor) -> Tensor:
        """Bool [tokens]: the image tokens, the same in every row."""
        return (ids == self.model.config.image_token_id)[0]

    def reading(self, reader: Reader) -> None:
        # The model around the two has no attention of its own, and a bundle's refuses another for it.
        self.model.set_attn_implementation({"text_config": reader.attention, "vision_config": EXACT})

    @torch.no_grad()
    def answers(self, reader: Reader) -> Answers:
        self.reading(reader)
        scores, exact, pair, bits = [], [], [], 0.0
        for start in range(0, len(self.pairs), BATCH):
            some = self.pairs[start : start + BATCH]
            prompt = self.stacked([self.prompt(pair.drawings, "") for pair in some])
            cache = reader.new_cache(self.visual(prompt["input_ids"]))
            self.model(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)
            seal(cache)
            bits = bits_per_value(cache) if isinstance(cache, KVCache) else bits
            cache.batch_repeat_interleave(QUESTIONS)
            rows = [self.asked(*turn) for pair in some for turn in pair.questions]
            ids, mask = padded([ids for ids, _ in rows])
            past = prompt["attention_mask"].repeat_interleave(QUESTIONS, 0)
            logits = self.model(
                input_ids=ids, attention_mask=torch.cat([past, mask], 1), past_key_values=cache, use_cache=True
            ).logits.log_softmax(-1)
            for row, (tokens, answer) in enumerate(rows):
                part = slice(len(tokens) - answer - 1, len(tokens) - 1)
                scores.append(logits[row, part])
                wanted = ids[row, part.start + 1 : part.stop + 1]
                exact.append(bool((scores[-1].argmax(-1) == wanted).all()))
                pair += [start + row // QUESTIONS] * len(wanted)
        return Answers(torch.cat(scores), torch.tensor(pair), exact, bits)

    def asked(self, question: str, answer: str) -> tuple[list[int], int]:
        """Token ids of a question and its answer, and how many of them are the answer and its end."""
        wanted = self.tokenizer.encode(answer + "<|end|>")
        return self.tokenizer.encode(question + TURN) + wanted, len(wanted)

    @torch.no_grad()
    def captions(self, reader: Reader) -> Answers:
        """The same of captions that are asked for in the prompt itself, the first token from full precision."""
        self.reading(reader)
        scores, exact, pair, bits = [], [], [], 0.0
        for side in range(2):
            mine = [index for index in range(len(self.pairs)) if index % 2 == side]
            for start in range(0, len(mine), BATCH):
                some = mine[start : start + BATCH]
                asked = [(self.pairs[index].drawings, self.pairs[index].caption) for index in some]
                prompt = self.stacked([self.prompt(drawings, turn[0] + TURN) for drawings, turn in asked])
                cache = reader.new_cache(self.visual(prompt["input_ids"]))
                first = self.model(**prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
                seal(cache)
                bits = bits_per_value(cache) if isinstance(cache, KVCache) else bits
                wanted = [self.tokenizer.encode(turn[1] + "<|end|>") for _, turn in asked]
                ids, mask = padded([tokens[:-1] for tokens in wanted])
                mask = torch.cat([prompt["attention_mask"], mask], 1)
                rest = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
                logits = torch.cat([first, rest], 1).log_softmax(-1)
                for row, tokens in enumerate(wanted):
                    scores.append(logits[row, : len(tokens)])
                    exact.append(scores[-1].argmax(-1).tolist() == tokens)
                    pair += [some[row]] * len(tokens)
        return Answers(torch.cat(scores), torch.tensor(pair), exact, bits)

    @torch.no_grad()
    def attention_samples(self, seed: int, count: int) -> list[AttentionSample]:
        """Per layer the attention of `count` prompts of one drawing and the first `QUERIES` tokens about it.

        Tokens 1 to 144 of each sequence are the drawing.
        """
        self.reading(Reader(lambda _: DynamicCache(), RECORDING_ATTENTION))
        rows, index = [], 0
        while len(rows) < count:
            drawing, index = draw(seed, index), index + 1
            text = "<|end|><|user|>".join(q.text + TURN + q.answer for q in drawing.questions)
            row = self.prompt((drawing,), text)
            length = 1 + int(self.visual(row["input_ids"]).sum()) + QUERIES
            if row["input_ids"].shape[1] >= length:
                rows.append({k: v[:, :length] if k != "pixel_values" else v for k, v in row.items()})
        batch = self.stacked(rows)
        visual = batch["input_ids"] == self.model.config.image_token_id
        samples = []
        for layer in self.model.model.language_model.layers:
            seen: list[tuple[Tensor, Tensor, Tensor]] = []
            with attention_observed(layer.self_attn, lambda q, k, v, seen=seen: seen.append((q, k, v))):
                self.model(**batch, use_cache=False)
            q, k, v = seen[0]
            weight = layer.self_attn.o_proj.weight
            samples.append(AttentionSample(q, k, v, q.shape[-1] ** -0.5, causal(q.shape[2]), weight, visual))
        return samples


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Token ids padded at the end, and their mask, int64 [rows, longest]."""
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def seal(cache: Cache) -> None:
    """Say that the prompt is complete."""
    if isinstance(cache, KVCache):
        cache.seal()
    for layer in cache.layers:
        if isinstance(layer, FakeLayer):
            layer.seal()


def bits_per_value(cache: KVCache) -> float:
    """Bits per number that spans and pages hold, scales and zero_points and unfilled blocks included."""
    size = numbers = 0
    for store in cache.stores():
        for span in (span for row in store.rows for span in row.spans):
            size += span.nbytes
            numbers += span.tokens * (span.key_scale.numel() + span.value_scale.numel())
        for pool, f in ((store.key_pages, store.format.keys), (store.value_pages, store.format.values)):
            size += pool.numbers.used * pool.page_bytes
            numbers += pool.numbers.used * f.page_size * f.heads * f.head_dim
    return 8 * size / numbers


# --- formats that the runtime does not have


def fake_quantized(x: Tensor, bits: int, grain: str, value_clip_ratio: float = 1.0) -> Tensor:
    """[B, H, n, D] with one range per channel ("channel"), token ("token"), or for all heads ("global") of a row."""
    dims = {"channel": (2,), "token": (3,), "global": (1, 2, 3)}[grain]
    low, high = x.amin(dims, keepdim=True), x.amax(dims, keepdim=True)
    cut = (1 - value_clip_ratio) / 2 * (high - low)
    low, high = low + cut, high - cut
    scale = ((high - low) / (2**bits - 1)).clamp(min=torch.finfo(x.dtype).tiny)
    return ((x - low) / scale).round().clamp(0, 2**bits - 1) * scale + low


@dataclass(frozen=True)
class FakeFormat:
    """Bits, what shares a range, and how far ranges are shrunk, of keys and of values."""

    bits: int
    keys: str
    values: str
    key_clip_ratio: float = 1.0
    value_clip_ratio: float = 1.0

    def read_back(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        stored = fake_quantized(keys, self.bits, self.keys, self.key_clip_ratio)
        return stored, fake_quantized(values, self.bits, self.values, self.value_clip_ratio)


class FakeLayer(DynamicLayer):
    """A full-precision layer that quantizes and dequantizes its visual tokens when the prompt is complete."""

    def __init__(self, f: FakeFormat, visual: Tensor):
        super().__init__()
        self.format, self.positions, self.sealed = f, visual.nonzero().flatten(), False

    def seal(self) -> None:
        self.sealed = True
        keys, values = self.format.read_back(self.keys[:, :, self.positions], self.values[:, :, self.positions])
        self.keys, self.values = self.keys.clone(), self.values.clone()
        self.keys[:, :, self.positions], self.values[:, :, self.positions] = keys, values


def fake_reader(formats: list[FakeFormat]) -> Reader:
    """A reader whose layers have these formats."""
    return Reader(lambda visual: Cache(layers=[FakeLayer(f, visual) for f in formats]))


def best_value_range(sample: AttentionSample, bits: int, grain: str, grid: tuple[float, ...]) -> float:
    """The factor whose values, weighted by exact attention, give the smallest squared error: as `search_taus` does."""
    case = Case.of(sample)
    values = sample.values[:, :, case.span]
    errors = [
        float(
            (case.weights[..., case.span] @ (fake_quantized(values, bits, grain, r) - values).unsqueeze(2))
            .square()
            .sum()
        )
        for r in grid
    ]
    return grid[int(np.argmin(errors))]


# --- errors


@dataclass(frozen=True)
class Case:
    """A sample's drawing, which stands at the same place in every sequence, and the queries after it.

    Attributes:
        span: the drawing's tokens.
        queries: [B, H, Hq / H, q, D].
        scores, weights: in full precision, [B, H, Hq / H, q, T]; scores of invisible tokens are -inf.
    """

    span: slice
    queries: Tensor
    scores: Tensor
    weights: Tensor

    @classmethod
    def of(cls, sample: AttentionSample) -> Case:
        first, after = 1, sample.num_tokens - QUERIES
        queries = sample.queries[:, :, after:].unflatten(1, (sample.keys.shape[1], -1))
        scores = queries @ sample.keys.unsqueeze(2).transpose(3, 4) * sample.scaling
        scores = scores.masked_fill(~sample.visible[after:], float("-inf"))
        return cls(slice(first, after), queries, scores, scores.softmax(-1))


def attention_errors(
    samples: list[AttentionSample], read_back: list[Callable], taus: list[tuple[float, float]]
) -> tuple[float, float]:
    """Squared errors of the post-softmax weights and of the attention output, each relative to its mean square.

    Args:
        samples: per layer, as `Bench.attention_samples` takes them.
        read_back: per layer, what becomes of the drawing's keys and values [B, H, n, D].
        taus: per layer.
    """
    weights_error, output_error = [], []
    for sample, back, (tau1, tau2) in zip(samples, read_back, taus, strict=True):
        case = Case.of(sample)
        keys, values = back(sample.keys[:, :, case.span], sample.values[:, :, case.span])
        low = case.queries @ keys.unsqueeze(2).transpose(3, 4) * sample.scaling
        scores = case.scores.clone()
        scores[..., case.span] = shift_extremes(low, tau1, tau2) if tau1 or tau2 else low
        weights = scores.softmax(-1)
        stored = sample.values.clone()
        stored[:, :, case.span] = values
        wanted = case.weights @ sample.values.unsqueeze(2)
        error = (weights - case.weights).square().mean() / case.weights.square().mean()
        weights_error.append(float(error))
        output_error.append(float((weights @ stored.unsqueeze(2) - wanted).square().mean() / wanted.square().mean()))
    return float(np.mean(weights_error)), float(np.mean(output_error))


def span_read_back(f: SpanFormat) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Keys and values as the runtime's spans give them back."""

    def back(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        spans = [quantize_span(k, v, f) for k, v in zip(keys, values, strict=True)]
        return torch.stack([span_keys(span, f) for span in spans]), torch.stack(
            [span_values(span, f) for span in spans]
        )

    return back
