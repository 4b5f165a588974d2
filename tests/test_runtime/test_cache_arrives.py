"""No answer without the bundle's cache: whatever model, files, or host do, it is used, or there is an error."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from tiny.checkpoints import save_checkpoint
from tiny.models import GREEDY, random_ids
from transformers import AutoModelForCausalLM, BatchEncoding, DynamicCache
from transformers.models.llama.modeling_llama import LlamaModel

from kvconvert import KVCache, calibrate, export, load
from kvconvert.cli import cli
from kvconvert.errors import CacheError, UsageError
from kvconvert.fidelity.scoring import feed
from kvconvert.models import CACHE, CACHE_NAMES

NONE_ARRIVED = "read tokens, and none of them reached the low-bit KV cache"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Of a model whose trainer has left `use_cache` off in both files."""
    root = tmp_path_factory.mktemp("arrives")
    save_checkpoint(root / "model", max_position_embeddings=512, use_cache=False)
    settings = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    (root / "model" / "generation_config.json").write_text(json.dumps(settings))
    calibrate(root / "model", root / "work", recipe="kv-only", samples=1, seq_len=32, progress=False)
    return export(root / "work", root / "bundle", progress=False)


@pytest.fixture
def replaced(monkeypatch):
    """The language model of every Llama reads into a cache of its own, as one would that takes it by another name."""
    read = LlamaModel.forward

    def forward(self, *args, **kwargs):
        return read(self, *args, **kwargs | {CACHE: DynamicCache(config=self.config)})

    monkeypatch.setattr(LlamaModel, "forward", forward)


def test_a_cache_has_both_names(bundle):
    model, _ = load(bundle)
    ids = random_ids(1, 140)
    expected = model.generate(ids, max_new_tokens=3, **GREEDY)
    for name in CACHE_NAMES:
        cache = model.new_kv_cache()
        assert torch.equal(model.generate(ids, max_new_tokens=3, **{name: cache}, **GREEDY), expected)
        assert cache.stats().tokens == 142
        assert model(ids, **{name: model.new_kv_cache()})[CACHE].stats().tokens == 140
    two = dict(zip(CACHE_NAMES, (model.new_kv_cache(), DynamicCache()), strict=True))
    for call in (model, model.generate):
        with pytest.raises(CacheError, match="was given two caches, past_key_values and cache; pass one"):
            call(ids, **two)


def test_a_prompt_continues_what_its_cache_holds(bundle):
    model, _ = load(bundle)
    ids, cache = random_ids(1, 20), model.new_kv_cache()
    turn = model.generate(ids, max_new_tokens=3, cache=cache, **GREEDY)
    for other in (ids[:, :5], ids, turn[:, :-1]):  # 22 tokens are held
        with pytest.raises(UsageError, match=rf"holds 22 tokens and the prompt has {other.shape[1]}; give the cache's"):
            model.generate(other, max_new_tokens=2, cache=cache, **GREEDY)
    # The new tokens alone, with a mask of all, are what the whole text is.
    twin = model.new_kv_cache()
    model.generate(ids, max_new_tokens=3, cache=twin, **GREEDY)
    alone = model.generate(turn[:, -1:], attention_mask=torch.ones_like(turn), max_new_tokens=2, cache=twin, **GREEDY)
    assert torch.equal(alone[:, 1:], model.generate(turn, max_new_tokens=2, cache=cache, **GREEDY)[:, 23:])


def test_what_is_no_prompt_or_no_cache_is_refused(bundle):
    model, _ = load(bundle)
    with pytest.raises(UsageError, match="`input_ids` has no tokens"):
        model.generate(torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=2, **GREEDY)
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises(UsageError, match=rf"the token id {wrong}, and the model has the ids 0 to \d+; encode"):
            model.generate(torch.tensor([[3, wrong]]), max_new_tokens=2, **GREEDY)
    ids = random_ids(1, 4)
    for given, said in (
        (ids[0], r"is torch\.int64 of shape \[4\]; give token ids"),
        (ids.float(), r"is torch\.float32 of shape \[1, 4\]; give token ids"),
        (ids.numpy(), "is of type ndarray; give a tensor"),
        (BatchEncoding({"input_ids": ids}), r"is of type BatchEncoding; unpack it, as in generate\(\*\*inputs\)"),
    ):
        with pytest.raises(UsageError, match=f"`input_ids` {said}"):
            model.generate(given, max_new_tokens=2, **GREEDY)
    with pytest.raises(UsageError, match="`attention_mask` is of 2 tokens and the prompt of 4; give the mask"):
        model.generate(ids, attention_mask=torch.ones(1, 2), max_new_tokens=2, **GREEDY)
    other = copy.deepcopy(model.config)
    other.num_hidden_layers += 1
    strange = KVCache(other, "kivi")
    for call in (model, model.generate):
        with pytest.raises(UsageError, match=r"cache is of type str; give `model.new_kv_cache\(\)`"):
            call(random_ids(1, 4), cache="default")
        with pytest.raises(CacheError, match=r"made for another model \(\d layers in the cache, \d in the model\)"):
            call(random_ids(1, 4), **{CACHE: strange})
    with pytest.raises(CacheError, match="made for another model"):
        model(random_ids(1, 4), None, None, strange)
    assert strange.get_seq_length() == 0


def test_files_that_turn_the_cache_off_are_overruled(bundle, caplog):
    model, _ = load(bundle)
    ids = random_ids(1, 140)
    with_cache = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, **GREEDY)
    assert isinstance(with_cache[CACHE], KVCache)
    assert with_cache[CACHE].stats().pages > 0
    assert isinstance(model(ids)[CACHE], KVCache)
    assert not caplog.records
    without = model.generate(ids, max_new_tokens=3, use_cache=False, return_dict_in_generate=True, **GREEDY)
    assert without.get(CACHE) is None
    assert "without the KV cache" in caplog.text


@pytest.mark.usefixtures("replaced")
def test_a_model_that_reads_into_another_cache_is_an_error(bundle):
    model, _ = load(bundle)
    ids = random_ids(1, 140)
    for read in (lambda: model.generate(ids, max_new_tokens=3, **GREEDY), lambda: model(ids, use_cache=True)):
        with pytest.raises(CacheError, match=NONE_ARRIVED):
            read()
    answer = CliRunner().invoke(cli, ["generate", str(bundle), "--prompt", "It was a dark night"])
    assert answer.exit_code == 1
    assert NONE_ARRIVED in answer.stderr


@pytest.mark.usefixtures("replaced")
def test_a_source_that_reads_into_another_cache_is_not_scored(bundle):
    source = AutoModelForCausalLM.from_pretrained(bundle.parent / "model", attn_implementation="kvconvert")
    with pytest.raises(CacheError, match=NONE_ARRIVED):
        feed(SimpleNamespace(model=source), KVCache(source.config, "kivi"), random_ids(1, 140))


def test_a_host_that_replaces_the_cache_before_the_model_is_called_is_an_error(bundle, monkeypatch):
    model, _ = load(bundle)
    prepare = type(model)._prepare_cache_for_generation

    def replacing(self, generation_config, model_kwargs, *args):
        prepare(self, generation_config, model_kwargs, *args)
        model_kwargs[CACHE] = DynamicCache(config=self.config)

    monkeypatch.setattr(type(model), "_prepare_cache_for_generation", replacing)
    with pytest.raises(CacheError, match="into a DynamicCache and not into the low-bit KV cache"):
        model.generate(random_ids(1, 140), max_new_tokens=3, **GREEDY)
