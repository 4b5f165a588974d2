"""What benchmarks/multimodal.py measures and how: prompts of two drawings, exact answers and KL.

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

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, LlavaForConditionalGeneration, LlavaProcessor

from kvconvert.calibration.attention_sample import RECORDING_ATTENTION, AttentionSample, attention_observed, causal
from kvconvert.data.drawings import Drawing, draw
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
        new_cache: makes an empty cache.
        attention: the attention implementation it goes with.
    """

    new_cache: Callable[[], Cache]
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
        bits: per number of the drawings' keys and values in the cache; 0 in full precision.
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
            cache = reader.new_cache()
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
                cache = reader.new_cache()
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
        self.reading(Reader(DynamicCache, RECORDING_ATTENTION))
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


def bits_per_value(cache: KVCache) -> float:
    """Bits per number that spans and pages hold, scales and offsets and unfilled blocks included."""
    size = numbers = 0
    for store in cache.stores():
        for span in (span for row in store.rows for span in row.spans):
            size += span.nbytes
            numbers += span.tokens * (span.keys.scale.numel() + span.values.scale.numel())
        for pool, f in ((store.key_pages, store.format.keys), (store.value_pages, store.format.values)):
            size += pool.numbers.used * pool.page_bytes
            numbers += pool.numbers.used * f.page_size * f.heads * f.head_dim
    return 8 * size / numbers
