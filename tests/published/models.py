"""Checkpoints with the configurations that authors published, made small enough to convert on a CPU in seconds.

`configurations.json` holds fields of config.json and generation_config.json under the model's name on the Hub, as they
were published but for two things: lists with one entry per layer are given by their repeating part, and long lists of
rotary factors are rounded. What tends to break a conversion is kept: the vocabulary and its special tokens, head sizes,
query heads per KV head, windows, rotary parameters, biases, tied embeddings, old names of fields. Layers, widths and
experts are reduced, and weights are random; so are those of vision towers and of layers for drafts, whose tensors'
names are under "drafts". Fields of the newest models are the defaults that transformers gives their types; where these
name no end of texts, it is the vocabulary's last id.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny.models import randomise
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvconvert.models.configuration import model_class

DATA: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("configurations.json").read_text("utf-8"))
EXPERTS = 16  # the most active ones of a token are 10
PER_LAYER = ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "intermediate_size")
PER_LAYER += ("activation_sparsity_pattern", "rope_theta", "partial_rotary_factors", "moe_layer_freq")
PER_LAYER += ("swiglu_limits", "swiglu_limits_shared", "sparse_attention_freq")
_TOWER = (
    ("num_hidden_layers", "layers", "depth"), ("hidden_size", "width"), ("num_attention_heads", "heads", "num_heads")
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One published model.

    Attributes:
        config: fields of its config.json, reduced.
        generation: of its generation_config.json.
        begins: its tokenizer begins every text with the bos token.
        refusals: words of the message with which a recipe is refused, by the recipe's name.
        drafts: names of tensors of layers that predict further tokens, which transformers does not load.
    """

    config: dict[str, Any]
    generation: dict[str, Any]
    begins: bool
    refusals: dict[str, str]
    drafts: tuple[str, ...] = ()

    def write(self, directory: Path, seed: int = 0) -> Path:
        """Save a checkpoint whose config.json has the fields as they were published."""
        self.write_configuration(directory)
        if self.is_unknown:  # no model of transformers has weights of this form
            save_file({"model.embed_tokens.weight": torch.ones(8, 8)}, directory / "model.safetensors")
            write_tokenizer(directory, self)
            return directory
        config = AutoConfig.from_pretrained(directory)
        torch.manual_seed(seed)
        model = model_class(config).from_config(config, attn_implementation="eager").eval().requires_grad_(False)
        text = config.get_text_config()
        scale = text.hidden_size**0.5 if "gemma" in text.model_type else getattr(text, "embedding_multiplier", 1)
        randomise(model, seed, 0.5 / scale)
        stored = self.config.get("torch_dtype") or self.config.get("dtype") or "float32"
        model.to(getattr(torch, stored)).save_pretrained(directory)
        if self.drafts:
            file = directory / "model.safetensors"
            extra = {name: torch.ones(8, 8, dtype=model.dtype) for name in self.drafts}
            save_file(load_file(file) | extra, file, metadata={"format": "pt"})
        self.write_configuration(directory)  # as published again
        write_tokenizer(directory, self)
        return directory

    def write_configuration(self, directory: Path) -> None:
        """Write config.json and generation_config.json."""
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        (directory / "generation_config.json").write_text(json.dumps(self.generation))

    @property
    def is_unknown(self) -> bool:
        """Whether transformers has no such model without code of its authors."""
        return self.config["model_type"] not in CONFIG_MAPPING

    @property
    def text(self) -> dict[str, Any]:
        """Fields of the language model."""
        return self.config.get("text_config", self.config)

    @property
    def special_ids(self) -> list[int]:
        """Ids of special tokens, in order."""
        named = [*self.config.items(), *self.text.items(), *self.generation.items()]
        found = [value for key, value in named if key.endswith(("token_id", "token_index")) and value is not None]
        ids = {one for value in found for one in (value if isinstance(value, list) else [value])}
        return sorted(one for one in ids if 0 <= one < self.text["vocab_size"])


def published(name: str) -> Published:
    """The model of that name."""
    entry = DATA[name]
    refusals = {recipe: entry[recipe] for recipe in ("default", "kv-only") if recipe in entry}
    config = entry["config"]
    if "text_config" not in config:
        config = _reduced(config, entry["layers"])
    else:
        text = _reduced(config["text_config"], entry["layers"])
        tower = _reduced_tower(config["vision_config"])
        config = config | {"text_config": text, "vision_config": tower}
        for part, name in ((config, "projector_hidden_size"), (tower, "out_hidden_size")):
            part |= {name: text["hidden_size"]} if name in part else {}
    return Published(config, entry["generation"], entry.get("begins", True), refusals, tuple(entry.get("drafts", ())))


def _reduced_tower(config: dict[str, Any]) -> dict[str, Any]:
    """Two layers and two heads of a vision tower."""
    config = dict(config)
    layers, hidden = (next(name for name in names if name in config) for names in _TOWER[:2])
    heads = next(name for name in _TOWER[2] if name in config)
    config[hidden] = config[hidden] // config[heads] * 2
    config[heads] = config[layers] = 2
    return config | ({"intermediate_size": 256} if "intermediate_size" in config else {})


def _reduced(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Few layers, KV heads and experts; widths keep their remainder modulo 128, on which groups of weights depend."""
    config = copy.deepcopy(config)

    def rename(*names: str) -> str | None:
        return next((name for name in names if name in config), None)

    def shrink(name: str, size: int) -> None:
        if isinstance(config.get(name), int):
            config[name] = min(config[name], size + config[name] % 128)

    heads_name = rename("num_attention_heads", "n_head", "n_heads")
    hidden_name = rename("hidden_size", "n_embd", "n_embed", "d_model")
    kv_name = rename("num_attention_groups") or "num_key_value_heads"
    heads, hidden = config[heads_name], config[hidden_name]
    kv_heads = config.get(kv_name, 1 if config.get("multi_query") else heads)
    ratio = heads // kv_heads
    ratio = ratio if ratio < 9 else 7 if ratio % 2 else 4
    fewer = 1 if ratio > 3 else min(kv_heads, 3 if kv_heads % 2 else 2)
    config[heads_name] = ratio * fewer
    if kv_name in config:
        config[kv_name] = fewer
    if "attention_other_setting" in config:
        other = config["attention_other_setting"]
        other["num_attention_heads"] = other["num_attention_heads"] * fewer // kv_heads
        other["num_attention_groups"] = fewer
    if config.get("num_global_key_value_heads"):
        config["num_global_key_value_heads"] = max(1, config["num_global_key_value_heads"] * fewer // kv_heads)
    if "head_dim" in config or "kv_lora_rank" in config:
        shrink(hidden_name, 256)
    else:
        config[hidden_name] = hidden // heads * config[heads_name]
    config[rename("num_hidden_layers", "n_layer", "n_layers")] = layers
    every = layers + config.get("num_nextn_predict_layers", 0) if "moe_layers_enum" in config else layers
    sparse = config.get("sparse_attention_config", {})
    for fields in (config, sparse):
        for name in fields.keys() & {*PER_LAYER}:
            if isinstance(fields[name], list) and fields[name]:
                fields[name] = (fields[name] * every)[:every]
    if isinstance(config.get("intermediate_size"), list):
        config["intermediate_size"] = [256] * layers
    if config.get("num_kv_shared_layers"):
        config["num_kv_shared_layers"] = 2
    for name in ("intermediate_size", "intermediate_size_mlp", "ffn_dim", "block_ff_dim", "dense_intermediate_size"):
        shrink(name, 512)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "q_lora_rank"):
        shrink(name, 128)
    shrink("share_expert_dim", 128)
    shrink("hidden_size_per_layer_input", 16)
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if config.get(name):
            config[name] = min(config[name], EXPERTS)
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = min(config["first_k_dense_replace"], layers - 1)
    if "moe_layer_end_index" in config:
        config["moe_layer_end_index"] = layers - 1
    if "word_embed_proj_dim" in config:
        config["word_embed_proj_dim"] = config[hidden_name] * config["word_embed_proj_dim"] // hidden
    if "mamba_n_heads" in config:
        inner = config["mamba_expand"] * config[hidden_name]
        config["mamba_n_heads"] = inner // config["mamba_d_head"]
        if "mamba_d_ssm" in config:
            config["mamba_d_ssm"] = inner
    for name in ("block_dim", "conv_dim"):
        if name in config:
            config[name] = config[hidden_name]
    if "num_heads" in config:
        config["num_heads"] = config[heads_name]
    return config


def write_tokenizer(directory: Path, model: Published) -> None:
    """A tokenizer of single bytes, spread over the whole vocabulary, with the special tokens at their ids."""
    size, special = model.text["vocab_size"], model.special_ids
    reserved = {f"<|{one}|>": one for one in special}
    free = (one for one in range(size))
    vocabulary = dict(reserved)
    step = size // 300
    taken = set(special)
    for number, character in enumerate(bytes_to_unicode().values()):
        place = number * step
        while place in taken:
            place += 1
        vocabulary[character] = place
        taken.add(place)
    vocabulary |= {f"w{one}": one for one in free if one not in taken}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in reserved])
    names = {}
    for role in ("bos", "eos", "pad"):
        one = (model.generation | model.text).get(f"{role}_token_id")
        one = one[0] if isinstance(one, list) else one
        if one in special and (role != "bos" or model.begins):
            names[f"{role}_token"] = f"<|{one}|>"
    if "bos_token" in names:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{names['bos_token']} $A", special_tokens=[(names["bos_token"], vocabulary[names["bos_token"]])]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(directory)
