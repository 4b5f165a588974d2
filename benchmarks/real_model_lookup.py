"""Values of keys in a JSON object: what `benchmarks/real_model.py` asks besides numbers hidden in prose."""

from __future__ import annotations

import json
import random

from transformers import PreTrainedTokenizerBase

from kvconvert.fidelity.recall import PASSKEY_ANSWER_TOKENS, Drill, has_plain_template

QUESTION = 'What is the value of "item_{key}"?'
ANSWER = 'The value of "item_{key}" is "'
_OBJECT = "<<<object>>>"


class ObjectBook:
    """Writes prompts that hold a JSON object of near-identical keys and ask for the value of one.

    Keys differ in three digits and values have five, so that prompts of as many pairs are equally long for every
    tokenizer that has one token per digit. A model with a chat template is asked in it, and its answer is begun up to
    the value; any other continues a text.

    Args:
        tokenizer: of the model.
        seed: of keys and values.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int):
        self.tokenizer, self.random = tokenizer, random.Random(seed)
        self.head, self.tail = "", "\n"
        if has_plain_template(tokenizer):
            content = f"Read this JSON object.\n\n{_OBJECT}\n\n{QUESTION}"
            message = [{"role": "user", "content": content}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            self.head, _, self.tail = text.partition(_OBJECT)
        elif tokenizer.bos_token is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
            self.head = tokenizer.bos_token

    def encode(self, text: str) -> list[int]:
        """Token ids without special tokens of the tokenizer's own."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def drill(self, pairs: int, depth: float) -> Drill:
        """An object of so many pairs; the key at a share `depth` of them is asked for."""
        keys = [f"{key:03d}" for key in self.random.sample(range(1000), pairs)]
        values = {key: str(self.random.randrange(10_000, 100_000)) for key in keys}
        asked = keys[round(depth * (pairs - 1))]
        shown = json.dumps({f"item_{key}": value for key, value in values.items()})
        cue = (self.tail + ANSWER).replace("{key}", asked)
        return Drill(self.encode(self.head + shown), self.encode(cue), values[asked], depth)

    def drills(self, pairs: int, count: int, positions: int) -> list[Drill]:
        """`count` of them, evenly spaced over the object; none where the model has too few positions."""
        made = [self.drill(pairs, (i + 0.5) / count) for i in range(count)]
        longest = max(len(drill.context) + len(drill.cue) for drill in made) + PASSKEY_ANSWER_TOKENS
        return made if longest <= positions else []
