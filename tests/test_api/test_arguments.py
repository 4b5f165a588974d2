"""Arguments that public functions cannot use are refused in a sentence that names them and says what to give."""

import inspect
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvconvert import KVCache, KVScheme, Recipe, bench, calibrate, evaluate, export, load
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import CacheError, RecipeError, UsageError
from kvconvert.fidelity.retrieval import DrillCounts
from kvconvert.hub import pull, push
from kvconvert.models.devices import choose_device
from kvconvert.onnx.export import export_onnx
from kvconvert.planning.plan import plan
from kvconvert.report import write_report
from kvconvert.runtime import Engine, Sampling, seal_prompt, watch_inputs

CONFIG = LlamaConfig(num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=8, vocab_size=8)
MODEL = LlamaForCausalLM(CONFIG)
CACHE = KVCache(CONFIG, "kivi")
FUNCTIONS = (
    *(bench, calibrate, evaluate, export, export_onnx, load, open_bundle, plan, pull, push, write_report),
    *(Engine.__init__, Engine.add, Engine.room, Engine.run, Engine.stream, seal_prompt, watch_inputs),
    *(KVCache.__init__, KVCache.join, KVCache.leave, KVCache.load, KVCache.open_rows, KVCache.save),
    *(KVCache.set_modality_mask, KVScheme.from_dict, KVScheme.preset),
    *(Recipe.from_dict, Recipe.load, Recipe.of, Recipe.with_budget),
)
# Refused whatever they are, with the reason; and model and tokenizer of an Engine, which asks them what they can do.
ANYTHING = ("self", "tp_plan", "prompt_lookup_num_tokens", "assistant_model")
FITTING = dict.fromkeys(("bundle", "model", "work", "path", "source", "output", "name", "recipe", "file"), "kivi")
FITTING |= {"self": None, "repository": "user/name", "config": CONFIG, "scheme": "kivi", "prompt": [1], "tokens": None}
FITTING |= {"modality": "visual", "row": 0, "other": CACHE, "like": CACHE, "cache": CACHE}
PLACES = ("bundle", "model", "against", "work", "output", "file", "auto_from", "fidelity")
CALLS = {
    f"{function.__qualname__}: {name}": (function, name)
    for function in FUNCTIONS
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not parameter.VAR_KEYWORD and name not in ANYTHING
    if (function, name) not in ((Engine.__init__, "model"), (Engine.__init__, "tokenizer"))
}


@pytest.mark.parametrize("call", CALLS)
def test_an_argument_of_another_type_is_refused_by_every_public_function(call):
    function, wrong = CALLS[call]
    fitting = FITTING | ({"model": MODEL} if function is seal_prompt else {})
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: fitting.get(p.name) for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    with pytest.raises(UsageError, match=rf"^`{wrong}` is of type object; give .+\.$"):
        function(**given | {wrong: object()})


VALUES = {
    "calibrate(samples='3')": (lambda: calibrate("m", "w", samples="3"), "`samples` is '3'; give a whole number of at"),
    "calibrate(samples=True)": (lambda: calibrate("m", "w", samples=True), "`samples` is True; give a whole number"),
    "calibrate(seq_len=2.5)": (lambda: calibrate("m", "w", seq_len=2.5), "`seq_len` is 2.5; give a whole number of at"),
    "calibrate(seq_len=1)": (
        lambda: calibrate("m", "w", seq_len=1),
        "`seq_len` is 1; give a whole number of at least 2",
    ),
    "calibrate(seq_len=5.0)": (lambda: calibrate("m", "w", seq_len=5.0), "`seq_len` is 5.0; give a whole number"),
    "Sampling(temperature=-1.0)": (lambda: Sampling(temperature=-1.0), "`temperature` is -1; give 0 .greedy. or a"),
    "calibrate(seed=10**30)": (
        lambda: calibrate("m", "w", seed=10**30),
        "`seed` is a number of more than 64 bits; give a",
    ),
    "calibrate(restart=1)": (lambda: calibrate("m", "w", restart=1), "`restart` is 1; give True or False"),
    "calibrate(data=[3])": (
        lambda: calibrate("m", "w", data=[3]),
        r"`data` is \[3\]; give a source, or a list of sources",
    ),
    "export(device=3)": (lambda: export("w", "b", device=3), "`device` is 3; give 'cpu' or 'cuda'"),
    "export(device='abacus')": (lambda: export("w", "b", device="abacus"), "`device` may be cpu or cuda"),
    "load(None)": (lambda: load(None), "`bundle` is None; give a bundle's directory, or its id on the Hub"),
    "load(verify='fast')": (lambda: load("b", verify="fast"), "`verify` is 'fast'; give 'full' or 'headers'"),
    "evaluate(dtype='int8')": (lambda: evaluate("b", dtype="int8"), "`dtype` is 'int8'; give 'float32', 'bfloat16' or"),
    "bench(contexts='8')": (
        lambda: bench("b", contexts="8"),
        "`contexts` is '8'; give a list, each entry a whole number",
    ),
    "bench(contexts=[0])": (lambda: bench("b", contexts=[0]), r"`contexts` is \[0\]; give a list, each entry a whole"),
    "with_budget(kv_bits=nan)": (
        lambda: Recipe.load("auto").with_budget(kv_bits=float("nan")),
        "`kv_bits` is nan; give a",
    ),
    "with_budget(kv_bits=10**400)": (
        lambda: Recipe.load("auto").with_budget(kv_bits=10**400),
        "`kv_bits` is a number of more than 64 bits",
    ),
    "load(changes={3: 3})": (
        lambda: Recipe.load("default", {3: 3}),
        r"`changes` is \{3: 3\}; give values by table and key",
    ),
    "KVCache(plan={3: 3})": (
        lambda: KVCache(CONFIG, "kivi", plan={3: 3}),
        "`plan` is {3: 3}; give a dict from text to a",
    ),
    "add(stop_token_ids=tensor)": (
        lambda: Engine.add(None, [1], stop_token_ids=torch.ones(2)),
        "`stop_token_ids` is of type Tensor; give a list",
    ),
    "Sampling(temperature='hot')": (lambda: Sampling(temperature="hot"), "`temperature` is 'hot'; give 0 .greedy."),
    "Sampling(top_k=-1)": (lambda: Sampling(top_k=-1), "`top_k` is -1; give a whole number of at least 0"),
    "Sampling(settings=3)": (lambda: Sampling(settings=3), "`settings` is 3; give a dict"),
    "DrillCounts(probes=0)": (lambda: DrillCounts(probes=0), "`probes` is 0; give a whole number of at least 1"),
    "Engine(MODEL, 'x')": (lambda: Engine(MODEL, "x"), "`tokenizer` is of type str; give the one that `load` returns"),
    "Engine('bundle')": (lambda: Engine("bundle"), "`model` is of type str; give the model that `load` returns"),
}


@pytest.mark.parametrize("call", [call for call, (_, name) in CALLS.items() if name in PLACES])
def test_a_path_that_is_empty_or_has_a_nul_is_refused(call):
    function, wrong = CALLS[call]
    parameters = inspect.signature(function).parameters.values()
    given = {p.name: FITTING.get(p.name) for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    for place in ("", "a\0b"):
        with pytest.raises(UsageError, match=rf"^`{wrong}` is {re.escape(repr(place))}; give .+\.$"):
            function(**given | {wrong: place})


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None, 2**63, -(2**63) - 1])
def test_a_list_of_numbers_has_whole_numbers_alone(wrong):
    with pytest.raises(UsageError, match=r"^`prompt` is .*; give the ids of its tokens\.$"):
        Engine.add(None, [1, wrong])


@pytest.mark.parametrize("call", VALUES)
def test_the_sentence_says_what_was_given_and_what_to_give(call):
    run, said = VALUES[call]
    with pytest.raises(UsageError, match=f"^(There is no device abacus; )?{said}"):
        run()


def test_an_argument_of_another_name_is_pythons_own_error():
    with pytest.raises(TypeError, match=r"^calibrate\(\) got an unexpected keyword argument 'sample'"):
        calibrate("model", "work", sample=3)


def test_one_device_of_a_machine_is_chosen_and_no_other():
    assert choose_device("cpu") == choose_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(UsageError, match="`device` is cpu:3; it may be cpu or cuda"):
        choose_device("cpu:3")


@pytest.mark.parametrize("name", ["layers.0.keymean", "layers.first.key_mean", "key_mean"])
def test_a_plan_with_other_tensors_is_refused(name):
    with pytest.raises(UsageError, match=f"`plan` has a tensor '{name}', which no KV plan has"):
        KVCache(CONFIG, "kivi", plan={name: torch.zeros(1)})


def test_rows_that_a_cache_does_not_have_are_refused():
    cache = KVCache(CONFIG, "kivi")
    cache.open_rows(2)
    with pytest.raises(CacheError, match="There is no row 5: the cache has 2"):
        cache.join(5, cache.beside())
    with pytest.raises(CacheError, match="Row 5 of the cache holds no sequence"):
        cache.leave(5)


@pytest.mark.parametrize("tokens", [torch.zeros(1, 3), torch.zeros(3, dtype=torch.bool)])
def test_a_mask_of_another_shape_or_dtype_is_refused(tokens):
    with pytest.raises(UsageError, match=r"`tokens` is torch\.\w+ \[.*\]; give bool \[rows, new tokens\]"):
        KVCache(CONFIG, "kivi").set_modality_mask(tokens, "visual")


def test_a_session_is_not_written_over_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cache = KVCache(CONFIG, "kivi")
    MODEL.set_attn_implementation("kvconvert")
    with torch.no_grad():
        MODEL(input_ids=torch.tensor([[1, 2]]), cache=cache)
    with pytest.raises(CacheError, match="is no file, so no session replaces it"):
        cache.save(".")


def test_a_recipe_of_other_fields_is_refused():
    with pytest.raises(RecipeError, match="A Recipe cannot have this `kv`: Input should be an instance of KVScheme"):
        Recipe(kv="kivi")
    with pytest.raises(RecipeError, match=r"^A Recipe has no field `nme`; did you mean name\?$"):
        Recipe(nme="mine")
    with pytest.raises(RecipeError, match=r"A Recipe cannot have this `weights\.bit`"):
        Recipe(weights={"bit": 3})
    with pytest.raises(RecipeError, match=r"has the key 'kv' in `changes`; write table\.key"):
        Recipe.load("default", {"kv": 3})
    with pytest.raises(RecipeError, match=r"\[kv\] key_bits = b'2' is not possible: choose one of 1, 2"):
        Recipe.load("default", {"kv.key_bits": b"2"})
    with pytest.raises(RecipeError, match=r"^The recipe default asks for \[weights\] bits = 9"):
        Recipe.of(Recipe(weights={"bits": 9}))


def test_a_recipe_is_read_from_a_path(tmp_path):
    (tmp_path / "mine.toml").write_text('[kv]\npreset = "kivi"\n')
    assert Recipe.load(tmp_path / "mine.toml").kv == KVScheme.preset("kivi")
