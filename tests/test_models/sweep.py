"""Convert a tiny model of one type of transformers, load and run it, and say in one line what came of it."""

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
from kvconvert.errors import KvconvertError
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


@torch.no_grad()
def outcome(model_type: str, directory: Path) -> str:
    """ "weights and cache", "weights" or "cache" where a bundle computes what transformers does, or the refusal."""
    source = directory / "source"
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = model_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    model = model.eval().requires_grad_(False)
    randomise(model)
    model.save_pretrained(source)
    write_tokenizer(source)
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
        check(model, loaded, bundle, any(pages))
        if name == "cache":
            return f"cache alone: {refusals[0]}"
        return "weights and cache" if any(pages) else "weights"
    return refusals[0]


def check(model: PreTrainedModel, loaded: PreTrainedModel, bundle: Path, has_pages: bool) -> None:
    """Compare a bundle with the source that has its weights: at once, through the cache, and in an Engine.

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
    if has_pages:
        check_engine(model, loaded, size)


def check_engine(model: PreTrainedModel, loaded: PreTrainedModel, vocabulary: int) -> None:
    """Compare the likeliest tokens of requests that join and leave and share prefixes with the source's logits.

    Raises:
        ValueError: their probabilities differ, or the last prompt did not go on from the stored chunks of another.
    """
    generator = torch.Generator().manual_seed(2)
    long, short, other = (torch.randint(5, vocabulary, (1, n), generator=generator) for n in (300, 9, 131))
    prompts = [long[:, :140], short, other, long]
    engine, requests = Engine(loaded, max_batch=2, prompt_chunk=CHUNK), []
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
