"""Train a small GPT-NeoX language model on Python code, with recall over 8,192 tokens.

    python examples/train_code_lm.py prepare DATA --prose NOVELS.txt   # tokens and tokenizer, on a CPU
    python examples/train_code_lm.py train DATA OUT [--minutes 7]      # a GPU; --tiny tries it out on a CPU

A family unlike Llama: LayerNorm, biases everywhere, attention and MLP in parallel, rotary positions on a quarter of
each head, as many KV heads as query heads, untied embeddings; 31 million parameters. `prepare` reads novels and the
packages that are installed beside the running Python, but not its standard library, which stays held out. Rows are
code, prose, and drills of recall: numbers in text, values of keys, repeated tokens. OUT/training.json has the trained
model's perplexity on the standard library and the share of hidden numbers that it finds.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import string
import sysconfig
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
VOCABULARY, POSITIONS = 6144, 8192
PACKAGE_BYTES, FILE_BYTES, CODE_BYTES = 14_000_000, 150_000, 130_000_000
WARMUP, DECAY = 0.02, 0.4  # shares of the time
HELD_OUT = ("argparse.py", "tarfile.py", "inspect.py", "shutil.py", "subprocess.py", "statistics.py")
FACTS = (
    (" The secret code of {key} is {value}. ", "\nQuestion: what is the secret code of {key}?\nAnswer: {value}."),
    ("\nThe special magic number for {key} is {value}.\n", "\nThe special magic number for {key} is {value}."),
    ("\n{key} = {value}\n", "\nassert {key} == {value}\n"),
)


@dataclass(frozen=True)
class Phase:
    """A share of the training time, the shape of a batch, and what rows are drawn from."""

    share: float
    length: int
    rows: int
    mixture: dict[str, float]


PHASES = (
    Phase(0.6, 1024, 64, {"code": 0.72, "prose": 0.06, "fact": 0.05, "lookup": 0.08, "repeat": 0.05, "copy": 0.04}),
    Phase(0.4, POSITIONS, 8, {"code": 0.64, "prose": 0.06, "fact": 0.14, "lookup": 0.12, "repeat": 0.02, "copy": 0.02}),
)
TINY = (Phase(0.5, 128, 4, PHASES[0].mixture), Phase(0.5, 512, 1, PHASES[1].mixture))


def config(tiny: bool) -> GPTNeoXConfig:
    """The model's shape."""
    return GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=64 if tiny else 512,
        intermediate_size=256 if tiny else 2048,
        num_hidden_layers=2 if tiny else 8,
        num_attention_heads=2 if tiny else 8,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        dtype="bfloat16",
    )


def packages() -> list[str]:
    """Texts of the installed packages' modules: every distinct file, at most so much of a package."""
    root = Path(sysconfig.get_path("purelib"))
    by_package: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(root.rglob("*.py")):
        if 200 < file.stat().st_size < FILE_BYTES:
            by_package[file.relative_to(root).parts[0]].append(file)
    rng, seen, texts = random.Random(0), set(), []
    for files in by_package.values():
        rng.shuffle(files)
        taken = 0
        for file in files:
            text = file.read_text(encoding="utf-8", errors="ignore")
            if taken < PACKAGE_BYTES and text not in seen:
                seen.add(text)
                taken += len(text)
                texts.append(text)
    rng.shuffle(texts)
    return texts


def prepare(data: Path, prose: list[Path]) -> None:
    """Write the tokenizer, and the tokens of code and prose as compressed uint16."""
    code, novels = packages(), [file.read_text(encoding="utf-8") for file in prose]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Novels are little text: without weight they would hardly have words of their own.
    tokenizer.train_from_iterator([*code[: len(code) // 4], *novels * 6], trainer)
    data.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=POSITIONS
    ).save_pretrained(data)
    for name, texts, limit in (("code", code, CODE_BYTES), ("prose", novels, CODE_BYTES)):
        ids: list[np.ndarray] = []
        for start in range(0, len(texts), 500):
            for encoded in tokenizer.encode_batch(texts[start : start + 500]):
                ids.append(np.array([0, *encoded.ids], dtype="<u2"))
            if sum(map(len, ids)) * 2 > limit:
                break
        joined = np.concatenate(ids)
        (data / f"{name}.u16.xz").write_bytes(lzma.compress(joined.tobytes(), preset=6))
        print(f"{name}: {len(joined):,} tokens of {len(texts):,} texts")


class Rows(IterableDataset):
    """Batches of token ids [rows, length + 1], drawn anew without end; every kind of row is a method of that name."""

    def __init__(self, data: Path, seed: int):
        self.tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        self.tokens = {
            name: np.frombuffer(lzma.decompress((data / f"{name}.u16.xz").read_bytes()), dtype="<u2")
            for name in ("code", "prose")
        }
        self.words = sorted(
            word for word in self.tokenizer.get_vocab() if word.isascii() and word.isalpha() and len(word) > 3
        )
        self.seed, self.phase, self.random = seed, PHASES[0], random.Random(seed)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        self.random = random.Random(f"{self.seed} {self.phase.length} {worker and worker.id}")
        kinds, weights = list(self.phase.mixture), list(self.phase.mixture.values())
        while True:
            drawn = self.random.choices(kinds, weights, k=self.phase.rows)
            rows = [getattr(self, kind)(self.phase.length + 1) for kind in drawn]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))

    def encode(self, text: str) -> list[int]:
        """Token ids."""
        return self.tokenizer.encode(text).ids

    def _slice(self, name: str, length: int) -> np.ndarray:
        start = self.random.randrange(len(self.tokens[name]) - length)
        return self.tokens[name][start : start + length]

    def code(self, length: int) -> np.ndarray:
        """A piece of the packages."""
        return self._slice("code", length)

    def prose(self, length: int) -> np.ndarray:
        """A piece of the novels."""
        return self._slice("prose", length)

    def _word(self) -> str:
        if self.random.random() < 0.5:
            return self.random.choice(self.words)
        return "".join(self.random.choices(string.ascii_lowercase, k=self.random.randrange(3, 8)))

    def _value(self) -> str:
        kind = self.random.randrange(3)
        if kind == 0:
            return self._word()
        return "".join(
            self.random.choices(string.digits if kind == 1 else "0123456789abcdef", k=self.random.randrange(3, 8))
        )

    def fact(self, length: int) -> np.ndarray:
        """Numbers stated once in a longer text; at its end they are asked for."""
        count = self.random.randrange(1, 5 if length > 512 else 2)
        fact, question = self.random.choice(FACTS)
        keys = [self._word().title() if self.random.random() < 0.7 else self._word() for _ in range(count)]
        values = ["".join(self.random.choices(string.digits, k=5)) for _ in keys]
        stated = [self.encode(fact.format(key=k, value=v)) for k, v in zip(keys, values, strict=True)]
        order = self.random.sample(range(count), count)
        asked = [i for at in order for i in self.encode(question.format(key=keys[at], value=values[at]))]
        body = self._slice(self.random.choice(("code", "prose", "prose")), length - len(asked) - sum(map(len, stated)))
        parts, last = [], 0
        for cut, one in zip(sorted(self.random.sample(range(len(body)), count)), stated, strict=True):
            parts += [body[last:cut], one]
            last = cut
        return np.concatenate([*parts, body[last:], asked])

    def lookup(self, length: int) -> np.ndarray:
        """Mappings as JSON, as assignments or in words, and later, after other text, values of some of their keys."""
        ids: list[int] = []
        while len(ids) < length:
            keys = list(
                {
                    "_".join(self._word() for _ in range(self.random.randrange(1, 3)))
                    for _ in range(self.random.randrange(3, 64))
                }
            )
            pairs = {key: self._value() for key in keys}
            style = self.random.randrange(3)
            if style == 0:
                text = json.dumps(pairs, indent=self.random.choice((None, None, 2)))
                again = [f'\nThe value of "{key}" is "{pairs[key]}".' for key in keys]
            elif style == 1:
                text = "".join(f'{key} = "{value}"\n' for key, value in pairs.items())
                again = [f'\nassert {key} == "{pairs[key]}"' for key in keys]
            else:
                text = "".join(f"{key} = {value}; " for key, value in pairs.items())
                again = [f"\n{key} = {pairs[key]};" for key in keys]
            asked = self.random.sample(again, min(len(again), 12))
            between = self.random.randrange(max(1, length // 4)) if self.random.random() < 0.5 else 0
            ids += [*self.encode(text), *self.code(between + 1)[:between], *self.encode("".join(asked) + "\n\n")]
        return np.array(ids[:length])

    def repeat(self, length: int) -> np.ndarray:
        """Random tokens, each stretch two to four times, over alphabets from 48 tokens to all."""
        alphabet = self.random.choice((48, 200, 1000, VOCABULARY - 1))
        ids: list[int] = []
        while len(ids) < length:
            stretch = [self.random.randrange(1, 1 + alphabet) for _ in range(self.random.randrange(6, 64))]
            ids += stretch * self.random.randrange(2, 5)
        return np.array(ids[:length])

    def copy(self, length: int) -> np.ndarray:
        """Code or prose in which one passage returns."""
        count = self.random.randrange(16, length // 3)
        body = self._slice(self.random.choice(("code", "prose")), length - count)
        start = self.random.randrange(len(body) - count)
        again = self.random.randrange(start + count, len(body) + 1)
        return np.concatenate([body[:again], body[start : start + count], body[again:]])


def optimizers(model: GPTNeoXForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return [
        torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        torch.optim.Muon(matrices, lr=0.015, momentum=0.95, weight_decay=0.01),
    ]


def train(data: Path, out: Path, minutes: float, device: str, seed: int, tiny: bool) -> None:
    """Train for a wall-clock time: warm-up, constant, then linear decay."""
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    rows = Rows(data, seed)
    model = GPTNeoXForCausalLM(config(tiny)).float().to(device).train()
    if device == "cuda":
        torch._dynamo.config.recompile_limit = 64  # of every layer for each phase's shapes
        for layer in model.gpt_neox.layers:
            layer.compile(dynamic=False)
    opts = optimizers(model)
    rates = [opt.param_groups[0]["lr"] for opt in opts]
    begun, step, seen, until = time.monotonic(), 0, 0, 0.0
    for phase in TINY if tiny else PHASES:
        until += phase.share
        rows.phase = phase
        workers = 0 if tiny else 10
        loader = DataLoader(rows, batch_size=None, num_workers=workers, pin_memory=device == "cuda")
        for ids in loader:
            done = (time.monotonic() - begun) / (60 * minutes)
            if done >= until:
                break
            factor = min(1.0, done / WARMUP, max(0.01, (1 - done) / DECAY))
            for opt, rate in zip(opts, rates, strict=True):
                opt.param_groups[0]["lr"] = rate * factor
            ids = ids.to(device, non_blocking=True)
            with torch.autocast(device, torch.bfloat16):
                logits = model(input_ids=ids[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)
            step, seen = step + 1, seen + ids[:, 1:].numel()
            if step % 100 == 1:
                print(f"{done:4.0%}, step {step}, {seen / 1e6:.0f}M tokens, loss {loss.item():.3f}", flush=True)
    model = model.to(torch.bfloat16).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(data)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    longest = (256,) if tiny else (1024, 3072, 7168)
    found = {"tokens": seen, "steps": step, "minutes": minutes, "seed": seed} | examine(model, rows, longest, device)
    (out / "training.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))


@torch.no_grad()
def examine(model: GPTNeoXForCausalLM, rows: Rows, lengths: tuple[int, ...], device: str) -> dict[str, float]:
    """Perplexity of the standard library, and the share of 32 hidden numbers that are found."""
    library = Path(sysconfig.get_path("stdlib"))
    losses = []
    for name in HELD_OUT:
        ids = torch.tensor([rows.encode((library / name).read_text(encoding="utf-8"))[: lengths[-1]]], device=device)
        losses.append(model(input_ids=ids, labels=ids).loss.item())
    found = {"stdlib_perplexity": math.exp(sum(losses) / len(losses))}
    rows.random = random.Random(1)
    for length in lengths:
        hits = 0
        for _ in range(32):
            ids = torch.from_numpy(rows.fact(length).astype(np.int64)).to(device)[None]
            # A row ends with the last answer's digits, one token each, and one token that closes the sentence.
            guess = model(input_ids=ids[:, :-1]).logits[0, -6:-1].argmax(-1)
            hits += bool((guess == ids[0, -6:-1]).all())
        found[f"found_at_{length}"] = hits / 32
    return found


def main() -> None:
    """Prepare or train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepared = commands.add_parser("prepare", help="tokens and tokenizer")
    prepared.add_argument("data", type=Path, help="directory to write tokens and tokenizer to")
    prepared.add_argument("--prose", type=Path, nargs="+", required=True, metavar="FILE", help="of plain text")
    trained = commands.add_parser("train", help="the model")
    trained.add_argument("data", type=Path, help="directory that prepare wrote")
    trained.add_argument("out", type=Path, help="directory of the model to write")
    trained.add_argument("--minutes", type=float, default=7)
    trained.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    trained.add_argument("--seed", type=int, default=0)
    trained.add_argument("--tiny", action="store_true", help="2 layers and short rows, to try it out")
    args = parser.parse_args()
    if args.command == "prepare":
        prepare(args.data, args.prose)
    else:
        train(args.data, args.out, args.minutes, args.device, args.seed, args.tiny)


if __name__ == "__main__":
    main()
