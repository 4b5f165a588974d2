"""Train the reference vision-language model on drawings: a tiny LLaVA that reads shapes, digits, letters and words.

    python examples/train_reference_vlm.py OUT [--minutes 5.5] [--batch 256] [--device cuda]

Everything is made here: pictures, questions and captions by `kvconvert.data.drawings`, the tokenizer from their text,
the weights from nothing. A training row is one conversation, packed to a fixed length: one picture and questions about
it; two pictures, the second at once or in a later turn, and questions that say which is meant; or two pictures, each
with its caption alone, as calibration data come. Only answers and captions are learned.

A run ends with greedy generation on held-out drawings, another seed's, and stores the share of exact answers in
OUT/training.json. A GPU needs minutes; a processor learns the same in some hours (`--batch 32 --minutes 300`).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from kvconvert.data.drawings import SIZE, Drawing, draw

PATCH = 8
VISUAL_TOKENS = (SIZE // PATCH) ** 2
# Drawings of these seeds train and examine the model; calibration and evaluation use other seeds.
TRAINING_SEED, HELD_OUT_SEED = 1_000_000, 2_000_000
END, USER, ASSISTANT, IMAGE = "<|end|>", "<|user|>", "<|assistant|>", "<image>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% elif part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LENGTHS = {1: 320, 2: 512}  # tokens of a row by its number of pictures
IGNORED = -100
ORDINALS = ("first", "second")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE over the drawings' own language, capitals and digits one by one, so that words are spelled."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("[A-Z0-9]"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[END, USER, ASSISTANT, IMAGE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    drawings = [draw(TRAINING_SEED, index) for index in range(500)]
    text = [
        text for drawing in drawings for picture in (None, 0, 1) for turn in turns_of(drawing, picture) for text in turn
    ]
    tokenizer.train_from_iterator(text, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        extra_special_tokens={"image_token": IMAGE},
        model_max_length=2048,
        chat_template=TEMPLATE,
    )


def turns_of(drawing: Drawing, picture: int | None) -> list[tuple[str, str]]:
    """Questions and answers about a drawing, saying which picture is meant unless it is None."""
    if picture is None:
        return [(question.text, question.answer) for question in drawing.questions]
    prefix = f"In the {ORDINALS[picture]} picture, "
    return [(prefix + q.text[0].lower() + q.text[1:], q.answer) for q in drawing.questions]


class Row:
    """Token ids and labels of one conversation, growing to a fixed length; what does not fit is left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, length: int):
        self.length, self.ids, self.labels = length, [], []
        self.encode = lru_cache(maxsize=20_000)(lambda text: tokenizer.encode(text, add_special_tokens=False))
        self.end, self.user, self.assistant, self.image = tokenizer.convert_tokens_to_ids([END, USER, ASSISTANT, IMAGE])

    def picture(self) -> None:
        """The tokens that a picture's features take the place of."""
        self.say([self.image] * VISUAL_TOKENS, False)

    def say(self, ids: list[int], learned: bool) -> None:
        """These tokens, to be learned or only read."""
        self.ids += ids
        self.labels += ids if learned else [IGNORED] * len(ids)

    def turn(self, question: str, answer: str, pictures: int = 0) -> None:
        """One question and its answer, the question's pictures before it; left out where it does not fit."""
        asked, answered = self.encode(question), self.encode(answer)
        if len(self.ids) + pictures * VISUAL_TOKENS + len(asked) + len(answered) + 4 > self.length:
            return
        self.say([self.user], False)
        for _ in range(pictures):
            self.picture()
        self.say([*asked, self.end, self.assistant], False)
        self.say([*answered, self.end], True)

    def finish(self) -> tuple[list[int], list[int]]:
        """The row, padded at its end, and a clean slate."""
        missing = self.length - len(self.ids)
        row = self.ids + [self.end] * missing, self.labels + [IGNORED] * missing
        self.ids, self.labels = [], []
        return row


class Conversations(IterableDataset):
    """Batches of (images uint8 [n, 96, 96, 3], ids and labels int64 [batch, length]), one number of pictures each."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, batch: int, seed: int):
        self.tokenizer, self.batch, self.seed = tokenizer, batch, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        chance = random.Random(f"conversations {self.seed} {worker}")
        rows = {pictures: Row(self.tokenizer, length) for pictures, length in LENGTHS.items()}
        index = worker
        while True:
            pictures = 1 if chance.random() < 0.6 else 2
            batch, images = [], []
            # Two pictures make a row longer: fewer rows keep a batch's size.
            for _ in range(self.batch // pictures):
                drawings = []
                for _ in range(pictures):
                    drawings.append(draw(TRAINING_SEED + self.seed, index))
                    index += workers
                batch.append(conversation(rows[pictures], drawings, chance))
                images += [drawing.image for drawing in drawings]
            ids, labels = (torch.tensor(part) for part in zip(*batch, strict=True))
            yield torch.from_numpy(np.stack(images)), ids, labels


def conversation(row: Row, drawings: list[Drawing], chance: random.Random) -> tuple[list[int], list[int]]:
    """One row about one drawing, or about two."""
    if len(drawings) == 1:
        for number, turn in enumerate(turns_of(drawings[0], None)):
            row.turn(*turn, pictures=number == 0)
        return row.finish()
    kind = chance.choice(("captions", "together", "later"))
    if kind == "captions":
        for drawing in drawings:
            row.picture()
            row.say([*row.encode(drawing.caption), row.end], True)
        return row.finish()
    both = [turn for picture, drawing in enumerate(drawings) for turn in turns_of(drawing, picture)]
    chance.shuffle(both)
    if kind == "together":
        row.turn(*both[0], pictures=2)
        both = both[1:]
    else:
        row.turn(*turns_of(drawings[0], None)[0], pictures=1)
        row.turn(*both[0], pictures=1)
        both = both[1:]
    for turn in both:
        row.turn(*turn)
    return row.finish()


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """5.2 million parameters: a 4-layer CLIP tower, a projector, a 4-layer Llama with two query heads per KV head."""
    vision = CLIPVisionConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=3,
        image_size=SIZE,
        patch_size=PATCH,
        projection_dim=192,
    )
    end = tokenizer.eos_token_id
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=VISUAL_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = end
    model.generation_config.bos_token_id = None
    return model


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """The processor whose image part computes `normalised` for drawings."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIZE},
        crop_size={"height": SIZE, "width": SIZE},
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def normalised(images: torch.Tensor, device: torch.device) -> torch.Tensor:
    """float32 [n, 3, 96, 96] in -1 to 1, of uint8 [n, 96, 96, 3]."""
    return images.to(device, non_blocking=True).permute(0, 3, 1, 2).float() / 127.5 - 1


@dataclass(frozen=True)
class Settings:
    """How long and how fast to learn."""

    seconds: float
    batch: int
    seed: int
    workers: int
    learning_rate: float = 1.5e-3
    muon_learning_rate: float = 0.02


def optimizers(model: LlavaForConditionalGeneration, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embeddings, norms, biases and the patch convolution."""
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    adam = torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [adam, torch.optim.Muon(hidden, lr=settings.muon_learning_rate, momentum=0.95, weight_decay=0.01)]


def train(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, settings: Settings) -> dict:
    """Train for a wall-clock time: warm-up, constant, then linear decay over the last 40 %."""
    device = model.device
    data = Conversations(tokenizer, settings.batch, settings.seed)
    loader = DataLoader(
        data,
        batch_size=None,
        num_workers=settings.workers,
        prefetch_factor=8 if settings.workers else None,
        pin_memory=device.type == "cuda",
    )
    opts = optimizers(model, settings)
    model.train()
    begun, told, step, drawings, waited = time.time(), 0.0, 0, 0, 0.0
    ready = begun
    for images, ids, labels in loader:
        waited += time.time() - ready
        elapsed = (time.time() - begun) / settings.seconds
        if elapsed >= 1:
            break
        factor = min(1.0, (step + 1) / 200) * (1.0 if elapsed < 0.6 else max(0.01, (1 - elapsed) / 0.4))
        for opt, base in zip(opts, (settings.learning_rate, settings.muon_learning_rate), strict=True):
            for group in opt.param_groups:
                group["lr"] = base * factor
        ids, labels = ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(input_ids=ids, pixel_values=normalised(images, device), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
        model.zero_grad(set_to_none=True)
        step, drawings = step + 1, drawings + len(images)
        if time.time() - begun > told:
            told += max(1.0, settings.seconds / 60)
            right = rows_right(logits, labels)
            print(
                f"{elapsed:5.1%} step {step}, loss {loss.item():.4f}, answers right {right:.1%}, waited {waited:.0f} s",
                flush=True,
            )
        ready = time.time()
    return {"steps": step, "drawings": drawings, "seconds": round(time.time() - begun), "waited": round(waited)}


def rows_right(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of answers (stretches of labels) of which every token is the most likely one."""
    wanted = labels[:, 1:]
    learned = wanted != IGNORED
    wrong = learned & (logits[:, :-1].argmax(-1) != wanted)
    first = learned & ~torch.nn.functional.pad(learned, (1, 0))[:, :-1]
    answer = first.flatten().cumsum(0)[learned.flatten()]
    return 1 - len(answer[wrong.flatten()[learned.flatten()]].unique()) / len(answer.unique())


@torch.no_grad()
def examine(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, count: int, batch: int) -> dict:
    """Greedy answers to every question about held-out drawings, and to questions about pairs of them.

    Returns the share of exact answers by form ("What colour", ...; "two pictures"; "all").
    """
    model.eval()
    asked: list[tuple[str, list[Drawing], str, str]] = []
    for index in range(count):
        drawing, other = draw(HELD_OUT_SEED, index), draw(HELD_OUT_SEED, index + count)
        for question, answer in turns_of(drawing, None):
            asked.append((" ".join(question.split()[:2]), [drawing], question, answer))
        for picture, one in enumerate((drawing, other)):
            question, answer = turns_of(one, picture)[0]
            asked.append(("two pictures", [drawing, other], question, answer))
    asked.sort(key=lambda item: len(item[1]))
    marks: dict[str, list[bool]] = defaultdict(list)
    start = 0
    while start < len(asked):
        part = [item for item in asked[start : start + batch] if len(item[1]) == len(asked[start][1])]
        start += len(part)
        for (form, _, _, answer), said in zip(part, answers(model, tokenizer, part), strict=True):
            marks[form].append(said == answer)
            marks["all"].append(said == answer)
    return {form: sum(right) / len(right) for form, right in sorted(marks.items())}


def answers(model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, part: list) -> list[str]:
    """Greedy answers, the prompts padded on the left."""
    prompts = [
        tokenizer.encode(USER + IMAGE * VISUAL_TOKENS * len(drawings) + question + END + ASSISTANT)
        for _, drawings, question, _ in part
    ]
    longest = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    images = torch.from_numpy(np.stack([drawing.image for _, drawings, _, _ in part for drawing in drawings]))
    said = model.generate(
        input_ids=ids.to(model.device),
        attention_mask=mask.to(model.device),
        pixel_values=normalised(images, model.device).to(model.dtype),
        do_sample=False,
        max_new_tokens=100,
    )
    return [text.strip() for text in tokenizer.batch_decode(said[:, longest:], skip_special_tokens=True)]


def main() -> None:
    """Train, store in bfloat16, examine what was stored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the model to write")
    parser.add_argument("--minutes", type=float, default=5.5)
    parser.add_argument("--batch", type=int, default=256, help="pictures of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=14, help="processes that draw; 0 draws between steps")
    parser.add_argument("--examine", type=int, default=300, metavar="N", help="held-out drawings to ask about")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).to(args.device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    settings = Settings(60 * args.minutes, args.batch, args.seed, args.workers)
    run = train(model, tokenizer, settings)
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(args.out)
    build_processor(tokenizer).save_pretrained(args.out)
    report = {
        "seed": args.seed,
        "batch": args.batch,
        "device": torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        **run,
        "held_out_drawings": args.examine,
        "exact_answers": examine(model.float(), tokenizer, args.examine, 128),
    }
    (args.out / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
