"""A cache that was saved and loaded goes on with the same numbers, and nothing else is loaded."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.models import ARCHITECTURES, random_ids, tiny_model

from kvconvert import KVCache
from kvconvert.errors import CacheError, UsageError
from kvconvert.kernels.pages.records import pages_of
from kvconvert.kernels.states import pack, unpack
from kvconvert.methods import PRESETS, KVScheme
from kvconvert.runtime.cache import session
from kvconvert.runtime.hf.generation import adopt

PAGED = [name for name in PRESETS if not PRESETS[name].compresses_prompts()]
ALWAYS = ("kivi", "kitty", "oscar-g128")


@pytest.fixture(scope="module")
def llama():
    return tiny_model("llama", attention="kvconvert", num_hidden_layers=2, gain=3.0)


@torch.no_grad()
def read(model, cache, ids):
    """Logits after ids that follow what the cache holds."""
    return model(ids, past_key_values=cache).logits[:, -1]


@torch.no_grad()
def steps(model, cache, first, count):
    """Logits of greedy steps."""
    found, token = [], first
    for _ in range(count):
        found.append(read(model, cache, token))
        token = found[-1].argmax(-1, keepdim=True)
    return torch.stack(found)


def check(model, new_cache, file, tokens=370, count=20):
    ids = random_ids(1, tokens)
    kept = new_cache()
    first = read(model, kept, ids).argmax(-1, keepdim=True)
    steps(model, kept, first, 3)
    kept.save(file)
    loaded = KVCache.load(file, new_cache())
    assert loaded.get_seq_length() == tokens + 3
    assert loaded.stats().bytes_used == kept.stats().bytes_used
    # Enough for another page, and then a second turn of several tokens.
    pages = loaded.stats().pages
    assert torch.equal(steps(model, loaded, first, count), steps(model, kept, first, count))
    assert loaded.stats().pages > pages
    turn = random_ids(1, 40, seed=7)
    assert torch.equal(read(model, loaded, turn), read(model, kept, turn))
    return loaded


@pytest.mark.quick("kitty")
@pytest.mark.parametrize("scheme", [pytest.param(n, marks=() if n in ALWAYS else pytest.mark.full) for n in PAGED])
def test_a_loaded_session_goes_on_bit_for_bit(llama, tmp_path, scheme):
    check(llama, lambda: KVCache(llama.config, scheme), tmp_path / "session.safetensors")


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_sliding_windows_are_saved_with_what_has_left_them(tmp_path, name):
    model = ARCHITECTURES[name].build("kvconvert")
    scheme = KVScheme(sink_tokens=3, key_recent_tokens=20)
    check(model, lambda: KVCache(model.config, scheme), tmp_path / "session.safetensors", tokens=505, count=12)


def test_a_session_shorter_than_a_page_and_one_in_bfloat16(llama, tmp_path):
    check(llama, lambda: KVCache(llama.config, "kitty"), tmp_path / "short", tokens=9, count=130)
    model = tiny_model("llama", attention="kvconvert", num_hidden_layers=1).to(torch.bfloat16)
    check(model, lambda: KVCache(model.config, "kivi"), tmp_path / "bf16")


def saved(model, file, tokens=200, scheme="kivi"):
    cache = KVCache(model.config, scheme)
    read(model, cache, random_ids(1, tokens))
    cache.save(file)
    return file


def test_a_bundles_model_loads_its_own_sessions_alone(tmp_path):
    model = tiny_model("llama", num_hidden_layers=2)
    adopt(model, [KVScheme.preset("kivi")] * 2, {})
    model.kv_seal, cache = "a" * 64, None
    ids = random_ids(1, 150)
    cache = model.new_kv_cache()
    read(model, cache, ids)
    cache.save(tmp_path / "session")
    loaded = KVCache.load(tmp_path / "session", model)
    again = torch.cat([ids, random_ids(1, 20, seed=3)], 1)
    expected = model.generate(again, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    found = model.generate(again, past_key_values=loaded, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert found.tolist() == expected.tolist()
    model.kv_seal = "b" * 64
    with pytest.raises(CacheError, match="saved with another model, KV scheme or KV plan"):
        KVCache.load(tmp_path / "session", model)
    model.kv_seal = "a" * 64
    with pytest.raises(CacheError, match=r"tokens are torch.float32 and the model computes in torch.bfloat16"):
        KVCache.load(tmp_path / "session", model.to(torch.bfloat16))


def test_what_is_not_the_same_is_refused_by_name(llama, tmp_path):
    file = saved(llama, tmp_path / "session")
    for other in (
        KVCache(llama.config, "kitty"),
        KVCache(tiny_model("llama", num_hidden_layers=2, rope_theta=5.0).config, "kivi"),
    ):
        with pytest.raises(CacheError, match="saved with another model, KV scheme or KV plan"):
            KVCache.load(file, other)
        assert other.get_seq_length() == 0
    with pytest.raises(UsageError, match="no model of a bundle"):
        KVCache.load(file, llama)
    full = KVCache(llama.config, "kivi")
    read(llama, full, random_ids(1, 3))
    with pytest.raises(UsageError, match="holds tokens already"):
        KVCache.load(file, full)
    with pytest.raises(CacheError, match="out of pages"):
        KVCache.load(
            saved(llama, tmp_path / "long", tokens=700), KVCache(llama.config, "kivi", kv_memory=10_000, plan=None)
        )


def test_a_file_that_was_changed_is_refused(llama, tmp_path):
    file = saved(llama, tmp_path / "session")
    tensors = load_file(file)
    for name in ("layers.0.keys", "layers.1.value_pages"):
        changed = dict(tensors)
        changed[name] = changed[name].clone()
        changed[name].view(-1)[0] += 1
        save_file(changed, tmp_path / "changed")
        with pytest.raises(CacheError, match=f"{name} is not what was saved"):
            KVCache.load(tmp_path / "changed", KVCache(llama.config, "kivi"))
    del changed["layers.0.keys"]
    save_file(changed, tmp_path / "changed")
    with pytest.raises(CacheError, match=r"layers.0.keys is not what was saved"):
        KVCache.load(tmp_path / "changed", KVCache(llama.config, "kivi"))
    fields = json.loads(bytes(tensors["description"].numpy()))
    text = json.dumps(fields | {"length": 100}, sort_keys=True).encode()
    save_file(tensors | {"description": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, tmp_path / "changed")
    with pytest.raises(CacheError, match="its description was changed"):
        KVCache.load(tmp_path / "changed", KVCache(llama.config, "kivi"))
    (tmp_path / "changed").write_bytes(file.read_bytes()[:-7])
    with pytest.raises(CacheError, match="no session that `save` wrote"):
        KVCache.load(tmp_path / "changed", KVCache(llama.config, "kivi"))
    save_file({"weight": torch.zeros(2)}, tmp_path / "changed")
    with pytest.raises(CacheError, match="it holds no session"):
        KVCache.load(tmp_path / "changed", KVCache(llama.config, "kivi"))
    with pytest.raises(CacheError, match="cannot be read"):
        KVCache.load(tmp_path / "absent", KVCache(llama.config, "kivi"))


@pytest.fixture(scope="module")
def session_file(llama, tmp_path_factory):
    return saved(llama, tmp_path_factory.mktemp("session") / "session", tokens=300)


@pytest.fixture(scope="module")
def hybrid_session(tmp_path_factory):
    """A model with states, and a session of it."""
    model = tiny_model("qwen3_next", attention="kvconvert")
    return model, saved(model, tmp_path_factory.mktemp("session") / "session", tokens=30)


def reseal(file, tensors, fields):
    """Write a session whose description fits its seal, whatever it says."""
    text = session._sealed({name: field for name, field in fields.items() if name != "seal"})
    save_file(tensors | {"description": torch.frombuffer(bytearray(text), dtype=torch.uint8)}, file)


PAGES = [("groups", 0, "keys", "pages"), ("groups", 0, "values", "pages")]


@pytest.mark.each_value
@pytest.mark.parametrize("value", [None, -1, 0.5, "1", 2**20, 2**62, 10**400, float("nan"), [], {}, [[]], True])
@pytest.mark.parametrize(
    "place",
    [
        *[("length",), ("groups",), ("groups", 0), ("groups", 0, "layers"), ("groups", 0, "layers", 0)],
        *[("groups", 0, "sink_tokens"), ("groups", 0, "dropped"), ("groups", 0, "values"), *PAGES, ("format",)],
        *[("groups", 0, "keys", "buffered"), ("fingerprint",), ("tensors",), ("further",)],
    ],
    ids=str,
)
def test_a_description_that_was_changed_and_sealed_again_is_one_sentence(llama, session_file, tmp_path, place, value):
    tensors = load_file(session_file)
    fields = json.loads(bytes(tensors["description"].numpy()))
    part = fields
    for step in place[:-1]:
        part = part[step]
    part[place[-1]] = value
    reseal(tmp_path / "changed", tensors, fields)
    with pytest.raises(CacheError, match=r"^The session \S+ cannot be loaded: .{1,200}\.$"):
        KVCache.load(tmp_path / "changed", KVCache(llama.config, "kivi"))


@pytest.mark.parametrize(
    "change",
    [None, *(lambda t: t.view(-1), lambda t: t[:1], lambda t: t[:, :1], lambda t: t[..., :0]), torch.Tensor.double],
)
@pytest.mark.parametrize("name", ["layers.0.keys", "layers.1.values", "layers.1.value_pages", "layers.0.key_pages"])
def test_tensors_of_another_shape_or_type_are_refused_whatever_their_hash(llama, session_file, tmp_path, name, change):
    tensors = load_file(session_file)
    fields = json.loads(bytes(tensors.pop("description").numpy()))
    tensors = {n: t if n != name or change is None else change(t).contiguous() for n, t in tensors.items()}
    if change is None:
        del tensors[name]
    reseal(tmp_path / "changed", tensors, fields | {"tensors": {n: session._sha256(t) for n, t in tensors.items()}})
    cache = KVCache(llama.config, "kivi")
    with pytest.raises(CacheError, match="cannot be loaded"):
        KVCache.load(tmp_path / "changed", cache)
    cache.reset()


@pytest.mark.parametrize(
    ("scheme", "field", "value"),
    [
        *[("kitty", "channels", 16), ("kitty", "channels", 255), ("kitty", "scale", float("nan"))],
        *[("kivi", "offset", float("inf")), ("oscar-g128", "norm", float("nan"))],
        *[("kivi", "keys", float("nan")), ("kivi", "values", float("-inf")), ("kivi", "keys", -1e30)],
    ],
)
def test_numbers_that_no_session_holds_are_refused_whatever_their_hash(llama, tmp_path, scheme, field, value):
    file, cache = saved(llama, tmp_path / "session", tokens=300, scheme=scheme), KVCache(llama.config, scheme)
    tensors = load_file(file)
    fields = json.loads(bytes(tensors.pop("description").numpy()))
    KVCache.load(file, cache)
    page_format = next(iter(cache.stores())).key_pages.format
    cache.reset()
    if field in ("keys", "values"):
        tensors[f"layers.1.{field}"].view(-1)[3] = value
    else:
        numbers = getattr(pages_of(tensors["layers.0.key_pages"], page_format), field)
        numbers[(-1,) * numbers.dim()] = value
    reseal(tmp_path / "changed", tensors, fields | {"tensors": {n: session._sha256(t) for n, t in tensors.items()}})
    with pytest.raises(CacheError, match=r"holds NaN, infinity, or numbers beyond|holds numbers that no page can hold"):
        KVCache.load(tmp_path / "changed", cache)
    assert not cache.get_seq_length()


@pytest.mark.parametrize("name", ["recurrent", "conv.0x", "other.0", "index.0.0", "conv.10000", "conv.-1", "\x1b.0"])
def test_states_that_a_layer_does_not_have_are_refused_whatever_their_hash(hybrid_session, tmp_path, name):
    model, file = hybrid_session
    tensors = load_file(file)
    fields = json.loads(bytes(tensors.pop("description").numpy()))
    tensors[f"layers.0.states.{name}"] = torch.ones(1, 2)
    reseal(tmp_path / "changed", tensors, fields | {"tensors": {n: session._sha256(t) for n, t in tensors.items()}})
    cache = KVCache(model.config, "kivi")
    with pytest.raises(CacheError, match="do not fit this cache"):
        KVCache.load(tmp_path / "changed", cache)
    assert not cache.get_seq_length()


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    """Models as bundles have them, and a session of each."""
    made = {}
    for name in ("llama", "qwen3_next", "falcon_h1"):
        model = ARCHITECTURES[name].build("kvconvert")
        adopt(model, [KVScheme.preset("kivi")] * model.config.num_hidden_layers, {})
        cache = model.new_kv_cache()
        read(model, cache, random_ids(1, 30))
        file = tmp_path_factory.mktemp("adopted") / name
        cache.save(file)
        made[name] = model, file
    return made


@pytest.mark.parametrize(
    "change",
    [
        *[lambda t: torch.cat([t, t], 1), lambda t: torch.cat([t, t], -1), lambda t: t.flatten(1)],
        *[lambda t: t.int(), lambda t: t.to(torch.float64), None],
    ],
)
@pytest.mark.parametrize(
    ("name", "part"),
    [("qwen3_next", "recurrent.0"), ("falcon_h1", "conv.0")],
)
def test_states_of_another_shape_than_the_models_are_refused(adopted, tmp_path, name, part, change):
    model, file = adopted[name]
    tensors = load_file(file)
    fields = json.loads(bytes(tensors.pop("description").numpy()))
    state = tensors.pop(f"layers.0.states.{part}")
    if change is not None:
        tensors[f"layers.0.states.{part}"] = change(state).contiguous()
    reseal(tmp_path / "changed", tensors, fields | {"tensors": {n: session._sha256(t) for n, t in tensors.items()}})
    with pytest.raises(CacheError, match="cannot be loaded"):
        KVCache.load(tmp_path / "changed", model)
    assert KVCache.load(file, model).get_seq_length() == 30


@pytest.mark.parametrize("value", [float("nan"), 1e30, -1e30])
@pytest.mark.parametrize("name", ["conv.0", "recurrent.0"])
def test_states_that_no_model_makes_are_refused_whatever_their_hash(adopted, tmp_path, name, value):
    model, file = adopted["qwen3_next"]
    tensors = load_file(file)
    fields = json.loads(bytes(tensors.pop("description").numpy()))
    state = tensors[f"layers.0.states.{name}"]
    if name == "recurrent.0":  # packed
        spoiled = unpack(state)
        spoiled.view(-1)[3] = value
        pack(spoiled, state)
    else:
        state.view(-1)[3] = value
    reseal(tmp_path / "changed", tensors, fields | {"tensors": {n: session._sha256(t) for n, t in tensors.items()}})
    with pytest.raises(CacheError, match=rf"{name} holds NaN, infinity, or numbers beyond"):
        KVCache.load(tmp_path / "changed", model)


@pytest.mark.parametrize("change", [lambda t: t[..., :8], lambda t: torch.cat([t, t]), lambda t: t[:1]])
def test_tokens_of_another_shape_than_the_models_are_refused(adopted, tmp_path, change):
    model, file = adopted["llama"]
    tensors = load_file(file)
    fields = json.loads(bytes(tensors.pop("description").numpy()))
    tensors = {name: change(tensor).contiguous() for name, tensor in tensors.items()}
    reseal(tmp_path / "changed", tensors, fields | {"tensors": {n: session._sha256(t) for n, t in tensors.items()}})
    with pytest.raises(CacheError, match="what it holds of layer 0 is not what the model makes"):
        KVCache.load(tmp_path / "changed", model)


def test_a_pipe_is_no_session(llama, tmp_path):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(CacheError, match="no session"):
        KVCache.load(tmp_path / "pipe", KVCache(llama.config, "kivi"))
    with pytest.raises(CacheError, match="pipe is no file, so no session replaces it"):
        saved(llama, tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo()


def test_what_cannot_be_saved_is_refused_by_name(llama, tmp_path):
    for scheme, reason in (("minikv", "compresses whole prompts"), ("calibquant-1bit", "compresses whole prompts")):
        with pytest.raises(CacheError, match=reason):
            saved(llama, tmp_path / "session", scheme=scheme)
    two = KVCache(llama.config, "kivi")
    read(llama, two, random_ids(2, 5))
    with pytest.raises(CacheError, match="there are 2 sequences"):
        two.save(tmp_path / "session")
    padded = KVCache(llama.config, "kivi")
    llama(random_ids(1, 5), attention_mask=torch.tensor([[0, 1, 1, 1, 1]]), past_key_values=padded)
    with pytest.raises(CacheError, match="it has padding"):
        padded.save(tmp_path / "session")
    with pytest.raises(CacheError, match="there are 0 sequences"):
        KVCache(llama.config, "kivi").save(tmp_path / "session")
    one = KVCache(llama.config, "kivi")
    read(llama, one, random_ids(1, 5))
    with pytest.raises(CacheError, match=r"cannot be written \(File name too long\)"):
        one.save(tmp_path / ("s" * 300))
    assert not list(tmp_path.iterdir())


def test_a_session_that_becomes_a_pipe_after_its_header_was_read_is_refused_unread(llama, tmp_path, monkeypatch):
    file, read_header = saved(llama, tmp_path / "session"), session.read_header

    def replaced(path):
        found = read_header(path)
        path.unlink()
        os.mkfifo(path)
        return found

    monkeypatch.setattr(session, "read_header", replaced)
    with pytest.raises(CacheError, match="it cannot be read"):
        KVCache.load(file, KVCache(llama.config, "kivi"))
