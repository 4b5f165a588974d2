"""Convert a model of one type of transformers, load and run it, and say in one line what came of it."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tiny.every_type import tiny_config
from tiny.models import randomise, write_tokenizer
from tiny.structures import architecture_of, separated
from torch import Tensor
from transformers import PreTrainedModel

from kvconvert.bundle.reader import open_bundle
from kvconvert.convert.export import export
from kvconvert.convert.pipeline import calibrate
from kvconvert.errors import KvconvertError, UnsupportedModelError
from kvconvert.kernels.linear.awq_format import AwqWeight, dequantize_weight
from kvconvert.methods import KVScheme
from kvconvert.models.configuration import model_class
from kvconvert.recipes.recipe import Recipe, WeightsRecipe
from kvconvert.runtime import Engine, load

TEXT = " ".join(f"The miller walked {number} miles to town." for number in range(40))
EXACT = KVScheme(key_bits=16, value_bits=16)
AWQ = Recipe(weights=WeightsRecipe(method="awq", group_size=16), kv=EXACT)
CACHE_ONLY = Recipe(weights=WeightsRecipe(method="none"), kv=EXACT)
# Largest difference from transformers' own logits in float32, as a share of the largest logit: sums in other orders.
CLOSE = 5e-3
PROMPT, GENERATED, CHUNK = 140, 3, 128


def outcome(model_type: str, directory: Path) -> str:
    """`conversion` of a tiny model of that type."""
    source = directory / "source"
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = model_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = model.eval().requires_grad_(False)
    randomise(model)
    model.save_pretrained(source)
    write_tokenizer(source)
    return conversion(model, source)


@torch.no_grad()
def conversion(model: PreTrainedModel, source: Path) -> str:
    """What a bundle computes as transformers does: "weights and cache" or "weights"; or the refusal.

    Args:
        model: in float32.
        source: the directory where it is stored; others are made beside it.
    """
    directory = source.parent
    (directory / "text.txt").write_text(TEXT)
    refusals = []
    for name, recipe in (("weights", AWQ), ("cache", CACHE_ONLY)):
        place = directory / name
        try:
            work = calibrate(
                source,
                place / "work",
                recipe=recipe,
                data=directory / "text.txt",
                samples=2,
                seq_len=24,
                progress=False,
            )
            bundle = export(work.path, place / "bundle", progress=False)
            loaded, _ = load(bundle, dtype=torch.float32)
        except KvconvertError as refusal:
            refusals.append(str(refusal).replace(str(directory), "").strip())
            continue
        pages = [layer.kv is not None for layer in open_bundle(bundle).manifest.layers]
        check(model, loaded, bundle)
        found = "weights"
        if any(pages):
            try:
                check_engine(model, Engine(loaded, max_batch=2, prompt_chunk=CHUNK))
                found = "weights and cache"
            except UnsupportedModelError:
                found = "weights and cache, no Engine"
        return f"cache alone: {refusals[0]}" if name == "cache" else found
    return refusals[0]


def check(model: PreTrainedModel, loaded: PreTrainedModel, bundle: Path) -> None:
    """Compare a bundle with the source that has its weights: at once, and token by token through the cache.

    Raises:
        ValueError: the logits differ.
    """
    manifest = open_bundle(bundle).manifest
    if any(module.method != "kept" for module in manifest.modules):
        _take_weights(model, bundle)
    size = min(model.config.get_text_config().vocab_size, 4000)
    ids = torch.randint(5, size, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    expected = model(input_ids=ids, use_cache=False).logits
    _compare("the bundle's", loaded(input_ids=ids, use_cache=False).logits, expected)
    generated = loaded.generate(
        ids, max_new_tokens=GENERATED, min_new_tokens=GENERATED, do_sample=False, output_logits=True,
        return_dict_in_generate=True, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    expected = model(input_ids=generated.sequences, use_cache=False).logits[:, PROMPT - 1 : -1]
    _compare("generation's", torch.stack(generated.logits, 1), expected)


def check_engine(model: PreTrainedModel, engine: Engine) -> None:
    """Compare the likeliest tokens of requests that join and leave and share prefixes with the source's logits.

    Raises:
        ValueError: their probabilities differ, or the last prompt did not go on from the stored chunks of another.
    """
    vocabulary, generator = min(model.config.get_text_config().vocab_size, 4000), torch.Generator().manual_seed(2)
    long, short, other = (torch.randint(5, vocabulary, (1, n), generator=generator) for n in (300, 9, 131))
    prompts = [long[:, :140], short, other, long]
    requests = []
    for number, ids in enumerate(prompts):
        new = (4, 9)[number % 2]
        requests.append(engine.add(ids, max_new_tokens=new, stop_token_ids=[], likeliest=20))
        engine.step()
    engine.run()
    if requests[-1].cached_tokens != CHUNK:
        raise ValueError(f"{requests[-1].cached_tokens} tokens came from a stored prefix, not {CHUNK}")
    for ids, request in zip(prompts, requests, strict=True):
        whole = torch.cat([ids, torch.tensor([request.tokens])], 1)
        expected = model(input_ids=whole, use_cache=False).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        found = torch.tensor([each.likeliest for each in request.logprobs])
        _compare("the Engine's", found[..., 1], expected.gather(1, found[..., 0].long()))


def _take_weights(model: PreTrainedModel, bundle: Path) -> None:
    separated(model, architecture_of(model.config))
    parameters = dict(model.named_parameters())
    stored: dict[str, Tensor] = {}
    for file in bundle.glob("model*.safetensors"):
        stored |= load_file(file)
    for module in open_bundle(bundle).manifest.modules:
        name = module.stored_name or module.name
        if module.method != "kept":
            packed = AwqWeight(*(stored[f"{name}.{part}"] for part in AwqWeight._fields))
            parameters[f"{module.name}.weight"].copy_(dequantize_weight(packed, torch.float32))
        for part in ("weight", "bias"):
            if f"{name}.{part}" in stored and f"{module.name}.{part}" in parameters:
                parameters[f"{module.name}.{part}"].copy_(stored[f"{name}.{part}"])


def _compare(what: str, found: Tensor, expected: Tensor) -> None:
    error = float((found - expected).abs().max() / expected.abs().max())
    if not error < CLOSE:
        raise ValueError(f"{what} logits differ from transformers' by {error:.2g} of the largest one")
