"""One tiny random model per architecture: the home of every test that needs a model of some kind.

`ARCHITECTURES["gemma2"].build()` gives a float32 model of some hundred kilobytes, `.write(directory)` a checkpoint as
`save_pretrained` leaves it, with the reference model's tokenizer, and `.inputs()` what its forward pass takes (pixels
or audio features included). Weights are drawn anew so that attention is far from uniform, norms and biases are not
trivial, and what comes early in a prompt changes what is generated; equal calls give equal weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from kvconvert.methods import KVScheme
from tiny.media import MODALITIES
from tiny.texts import TEXTS, TOKENS, VOCABULARY

REFERENCE = Path(__file__).parents[2] / "examples" / "reference-lm"
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FEATURES = (
    "sliding",
    "chunked",
    "softcap",
    "sinks",
    "partial_rotary",
    "no_rotary",
    "learned_positions",
    "alibi",
    "kv_sharing",
    "qk_norm",
    "moe",
    "mla",
    "linear_attention",
    "parallel",
    "fused_projections",
    "no_pre_norm",
    "values_are_keys",
    "vision",
    "audio",
)


@dataclass(frozen=True)
class TinyModel:
    """One architecture's tiny model.

    Attributes:
        model_type: of its configuration.
        settings: configuration values.
        features: what is special about it, out of FEATURES.
        embedding: standard deviation of the embeddings; small where the model multiplies them.
        media: what the forward pass takes besides ids, for a batch; and how many tokens of which kind one piece has.
    """

    model_type: str
    settings: dict[str, Any]
    features: frozenset[str] = frozenset()
    embedding: float = 0.5
    media: Media | None = None

    @property
    def multimodal(self) -> bool:
        """Whether it is a vision-language or audio-language model."""
        return self.media is not None

    def config(self, **overrides: Any) -> PretrainedConfig:
        """The configuration; overrides of a multimodal model go to its text part."""
        settings = self.settings | overrides
        if "text_config" in self.settings:
            settings = self.settings | {"text_config": self.settings["text_config"] | overrides}
        return AutoConfig.for_model(self.model_type, **settings)

    def build(self, attention: str = "eager", seed: int = 0, **overrides: Any) -> PreTrainedModel:
        """A float32 model in evaluation mode, without gradients; overrides are configuration values."""
        auto = AutoModelForCausalLM if self.media is None else self.media.auto
        torch.manual_seed(seed)
        model = auto.from_config(self.config(**overrides), attn_implementation="eager").eval().requires_grad_(False)
        randomise(model, seed, self.embedding)
        if attention != "eager":
            # A vision or audio tower keeps its own attention.
            model.set_attn_implementation({"": attention, "text_config": attention} if self.multimodal else attention)
        return model

    def write(self, directory: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
        """Save a checkpoint with tokenizer; `max_shard_size` among the overrides goes to save_pretrained."""
        shards = {"max_shard_size": overrides.pop("max_shard_size")} if "max_shard_size" in overrides else {}
        self.build(**overrides).to(dtype).save_pretrained(directory, **shards)
        write_tokenizer(directory, self.multimodal)
        return directory

    def inputs(
        self, batch: int = 2, length: int = 24, seed: int = 1, pieces: int = 1, padding: int = 0
    ) -> dict[str, Tensor]:
        """Random ids [batch, length] with their mask, and `pieces` images (or recordings) per row inside them.

        The first `padding` columns of the first row are padding.
        """
        ids = random_ids(batch, length, seed)
        mask = torch.ones_like(ids)
        mask[0, :padding] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        if self.media is None or not pieces:
            return inputs
        whole = [self.media.start] * (self.media.start is not None) + [self.media.token] * self.media.count
        whole += [self.media.end] * (self.media.end is not None)
        step = (length - padding) // pieces
        if step < len(whole) + 3:
            raise ValueError(f"{pieces} pieces of {len(whole)} tokens do not fit into {length - padding}")
        for piece in range(pieces):
            first = padding + piece * step + 2
            ids[:, first : first + len(whole)] = torch.tensor(whole)
        generator = torch.Generator().manual_seed(seed + 1)
        return inputs | self.media.features(batch * pieces, generator) | self.media.token_type_ids(ids)

    def first_row(self, inputs: dict[str, Tensor], padding: int = 0) -> dict[str, Tensor]:
        """The first row of `inputs` by itself, without its padding."""
        batch, length = inputs["input_ids"].shape
        return {
            name: x[:1, padding:] if x.shape[:2] == (batch, length) else x[: len(x) // batch]
            for name, x in inputs.items()
        }


@dataclass(frozen=True)
class Media:
    """The pictures or sounds of one architecture.

    Attributes:
        auto: transformers' class that builds the model.
        token: id that stands for one patch or frame; start, end: ids around a piece, or None.
        count: tokens of one piece.
        features: arguments of the forward pass for so many pieces.
        token_types: name of an argument that marks the tokens of a piece, or None.
    """

    auto: type
    token: int
    count: int
    features: Callable[[int, torch.Generator], dict[str, Tensor]]
    start: int | None = None
    end: int | None = None
    token_types: str | None = None

    def token_type_ids(self, ids: Tensor) -> dict[str, Tensor]:
        """Token types [B, T], 1 for the tokens of a piece, where the model takes them."""
        return {self.token_types: (ids == self.token).long()} if self.token_types else {}


def randomise(model: PreTrainedModel, seed: int = 0, embedding: float = 0.5) -> None:
    """Draw weights that matter: projections keep the variance, norms about their start, a few channels large."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Embedding)}
    for name, parameter in model.named_parameters():
        parent, _, leaf = name.rpartition(".")
        if id(parameter) in embeddings:
            std = embedding if parameter.shape[0] >= VOCABULARY - len(TOKENS) else 0.3
            parameter.normal_(0, std, generator=generator)
            padding = embeddings[id(parameter)].padding_idx
            if padding is not None:
                parameter[padding] = 0
        elif (parameter.ndim > 1 and leaf == "bias") or leaf.endswith("_bias"):
            parameter.normal_(0, 0.1, generator=generator)
        elif parameter.ndim > 1 and "conv" not in parent.rpartition(".")[2]:
            fan_in = parameter.shape[-1] if parameter.ndim == 2 else 64
            parameter.normal_(0, 1.4 / fan_in**0.5, generator=generator)
        elif leaf == "bias":
            parameter.normal_(0, 0.1, generator=generator)
        elif leaf == "sinks":
            parameter.normal_(0, 1, generator=generator)
        elif leaf == "weight" and parameter.ndim == 1:
            parameter.add_(torch.empty_like(parameter).normal_(0, 0.2, generator=generator))
            if parameter.numel() >= 64:
                parameter[:: parameter.numel() // 4] += 1.5
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.75)


def write_tokenizer(directory: Path, multimodal: bool = False) -> None:
    """The reference model's tokenizer; multimodal models get the special tokens of `tiny.texts.TOKENS` besides."""
    if not multimodal:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(REFERENCE / name, directory / name)
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(REFERENCE)
    tokenizer.add_special_tokens({"additional_special_tokens": list(TOKENS)})
    found = {token: tokenizer.convert_tokens_to_ids(token) for token in TOKENS}
    if found != TOKENS:
        raise ValueError(f"the tokenizer gives {found}, the models expect {TOKENS}")
    tokenizer.save_pretrained(directory)


def random_ids(batch: int, length: int, seed: int = 1) -> Tensor:
    """Token ids [batch, length] of 1..99."""
    return torch.randint(1, 100, (batch, length), generator=torch.Generator().manual_seed(seed))


def tiny_model(model_type: str, attention: str = "eager", gain: float = 4.0, **overrides: Any) -> PreTrainedModel:
    """A causal model of a type by transformers' own initialisation times `gain`, with four layers and 128 ids."""
    settings = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
        "pad_token_id": 0,
    }
    config = AutoConfig.for_model(model_type)
    for name, value in (settings | overrides).items():
        setattr(config, name, value)
    if model_type == "gpt_oss":
        config.num_local_experts, config.num_experts_per_tok = 4, 2
    if getattr(config, "layer_types", None):
        sliding = "sliding_attention" in config.layer_types
        pattern = ["sliding_attention", "full_attention"] * 2 if sliding else config.layer_types
        config.layer_types = pattern[: config.num_hidden_layers]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(gain)
    return model


def low_bit(model: PreTrainedModel, *schemes: KVScheme | str) -> PreTrainedModel:
    """The model with the attention and the caches of a bundle, layers taking turns with schemes, or presets of which
    the rotation of values is not folded.
    """
    from kvconvert.runtime.hf.generation import adopt

    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    chosen = [s if isinstance(s, KVScheme) else KVScheme.preset(s).with_online_rotation() for s in schemes]
    adopt(model, [chosen[i % len(chosen)] for i in range(layers)], {})
    return model


AUTO = {"causal": AutoModelForCausalLM, "image": AutoModelForImageTextToText, "any": AutoModelForMultimodalLM}


def _text(name: str) -> TinyModel:
    model_type, features, embedding, settings = TEXTS[name]
    return TinyModel(model_type or name, settings, frozenset(features.split()), embedding)


def _multimodal(name: str) -> TinyModel:
    model_type, features, embedding, auto, media, settings = MODALITIES[name]
    media = Media(AUTO[auto], **media)
    return TinyModel(model_type or name, settings, frozenset(features.split()), embedding, media)


ARCHITECTURES: dict[str, TinyModel] = {name: _text(name) for name in TEXTS} | {
    name: _multimodal(name) for name in MODALITIES
}


def representatives(names: Sequence[str]) -> list[str]:
    """The first architecture, and few others that together have every feature of all those named."""
    missing = frozenset().union(*(ARCHITECTURES[name].features for name in names))
    chosen = [names[0]]
    while missing := missing - ARCHITECTURES[chosen[-1]].features:
        chosen.append(max(names, key=lambda name: len(ARCHITECTURES[name].features & missing)))
    return chosen


def architectures(names: Sequence[str] = tuple(ARCHITECTURES)) -> list[Any]:
    """Architectures as parameters of a test, of which all but the representatives are left to the full suite."""
    few = representatives(names)
    return [name if name in few else pytest.param(name, marks=pytest.mark.full) for name in names]
