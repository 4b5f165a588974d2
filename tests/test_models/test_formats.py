"""Checkpoints whose weights are stored in another form: what is read from them, and what is refused."""

import contextlib
import json
import math
import os
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.checkpoints import save_checkpoint, save_text
from tiny.llama import write_recipe
from tiny.mixtures import tiny_mixture
from tiny.models import write_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvconvert
import kvconvert.runtime
from kvconvert.bundle.reader import open_bundle
from kvconvert.errors import CheckpointError, UnsupportedModelError
from kvconvert.models import QUANTIZED, check_model
from kvconvert.models.formats import FORMATS
from kvconvert.models.formats.floats import Mxfp4, dequantize_blocks
from kvconvert.models.formats.gguf import check_header
from kvconvert.models.source import open_source

BLOCK = (128, 48)  # neither divides a weight of the tiny models
VOCABULARY = 400
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def set_quantization(directory, **quantization):
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))


def blocks_of(weight, block):
    """Slices of the blocks of a matrix, with their places in the grid."""
    for i, top in enumerate(range(0, weight.shape[0], block[0])):
        for j, left in enumerate(range(0, weight.shape[1], block[1])):
            yield i, j, (slice(top, top + block[0]), slice(left, left + block[1]))


def to_fp8(weight, block):
    """A matrix in fp8 with a factor for each block, block by block."""
    grid = [-(-size // step) for size, step in zip(weight.shape, block, strict=True)]
    codes, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(grid)
    for i, j, place in blocks_of(weight, block):
        scales[i, j] = weight[place].float().abs().max() / 448
        codes[place] = (weight[place].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return codes, scales


def write_fp8(directory, block=BLOCK):
    """A tiny Llama whose Linears are fp8; returns its weights as they are to be read."""
    save_checkpoint(directory, dtype=torch.bfloat16, intermediate_size=144, vocab_size=4096)
    tensors = load_file(directory / "model.safetensors")
    expected = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        codes, scales = to_fp8(tensors[name], block)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        expected[name] = torch.empty_like(expected[name])
        for i, j, place in blocks_of(codes, block):
            expected[name][place] = (codes[place].float() * scales[i, j]).bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    set_quantization(directory, quant_method="fp8", activation_scheme="dynamic", weight_block_size=list(block))
    return expected


def write_mxfp4(directory):
    """A tiny gpt-oss whose experts are mxfp4; returns their weights as they are to be read."""
    model = tiny_mixture("gpt_oss").to(torch.bfloat16)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    tensors = load_file(directory / "model.safetensors")
    expected = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32), generator=generator)
        values = FP4[codes] * (scales - 127.0).exp2().unsqueeze(-1)
        expected[name] = values.flatten(2).transpose(1, 2).bfloat16().contiguous()
        tensors[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        tensors[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    set_quantization(directory, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    return expected


def shorten_tokenizer(file):
    """Keep the first tokens only: every reader of a GGUF file goes through all of them one by one."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < VOCABULARY}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
    file.write_text(json.dumps(tokenizer), encoding="utf-8")


def write_gguf(directory, kind="F16", special=()):
    """A tiny Llama in llama.cpp's names and order of rows; returns the file, the model, and the weights to be read.

    `special` are its last tokens, the first of which begin and end a text.
    """
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (pip install '.[gguf]')")
    model = save_checkpoint(directory / "model", dtype=torch.float16, vocab_size=VOCABULARY)
    shorten_tokenizer(model / "tokenizer.json")
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    file = directory / f"tiny-{kind}.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    vocabulary = sorted(tokenizer["vocab"], key=tokenizer["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    ordinary = len(vocabulary) - len(special)
    vocabulary[ordinary:] = special
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * ordinary + [3] * len(special))
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in tokenizer["merges"]]
    writer.add_token_merges([" ".join(pair) for pair in merges if {*pair, "".join(pair)} <= {*vocabulary}])
    writer.add_bos_token_id(ordinary if special else 0)
    writer.add_eos_token_id(ordinary + 1 if special else 0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    expected = {}
    for name, tensor in load_file(model / "model.safetensors").items():
        base, _, part = name.rpartition(".")
        values = tensor.float().numpy()
        stored = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else gguf.GGMLQuantizationType[kind]
        rows = {"q_proj": heads, "k_proj": kv_heads}.get(base.rpartition(".")[2])
        if rows:  # llama.cpp rotates neighbouring channels, transformers those of two halves
            values = values.reshape(rows, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        data = gguf.quantize(values, stored)
        writer.add_tensor(f"{names.get_name(base)}.{part}", data, raw_dtype=stored)
        read = torch.from_numpy(gguf.dequantize(data, stored).copy())
        if rows:
            read = read.reshape(rows, -1, 2, read.shape[1]).transpose(1, 2).reshape(read.shape)
        expected[name] = read.to(torch.float16 if kind == "F16" else torch.bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, model, expected


def assert_reads(source, expected):
    tensors = source.read("")
    assert tensors.keys() == expected.keys() == source.tensors.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype, name
        assert torch.equal(tensors[name], tensor), name
        assert source.tensors[name].shape == list(tensor.shape)


def converted(model, folder, group_size=16, **recipe):
    file = write_recipe(folder / "recipe.toml", **recipe)
    file.write_text(file.read_text().replace("group_size = 16", f"group_size = {group_size}"))
    work = kvconvert.calibrate(
        model, folder / "work", recipe=str(file), data=save_text(folder), samples=2, seq_len=16, progress=False
    )
    return kvconvert.export(work.path, folder / "bundle", progress=False)


def logits(model):
    with torch.no_grad():
        return model(torch.arange(40, 60)[None]).logits


def test_every_fp8_weight_is_its_code_times_the_factor_of_its_block(tmp_path):
    expected = write_fp8(tmp_path)
    source = open_source(str(tmp_path))
    assert_reads(source, expected)
    assert source.stored_as == "fp8, one scale for each 128 x 48 weights"
    assert not hasattr(source.config, "quantization_config")


@pytest.mark.parametrize("scale", [torch.tensor([[126, 129]], dtype=torch.uint8), torch.tensor([[0.5, 4.0]])])
def test_fp8_scales_may_be_exponents(scale):
    weight = torch.ones(2, 3, 4).to(torch.float8_e4m3fn)
    found = dequantize_blocks(weight, scale.expand(2, 1, 2), (4, 2), torch.float32)
    assert torch.equal(found, torch.tensor([0.5, 0.5, 4, 4]).expand(2, 3, 4))
    if scale.dtype == torch.uint8:
        packed = scale.view(torch.float8_e8m0fnu).expand(2, 1, 2)
        assert torch.equal(dequantize_blocks(weight, packed, (4, 2), torch.float32), found)


def test_fp8_blocks_larger_than_a_weight_take_no_more_than_it():
    weight, scale = torch.ones(6, 4).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0, 4.0, 5.0]])
    found = dequantize_blocks(weight, scale, (2**40, 1), torch.float32)
    assert torch.equal(found, scale.expand(6, 4))
    assert torch.equal(dequantize_blocks(weight.T, scale.T, (1, 2**40), torch.float32), found.T)


def test_a_single_fp8_scale_counts_for_all_weights(tmp_path):
    write_fp8(tmp_path, block=(4096, 4096))
    expected = open_source(str(tmp_path)).read("")
    set_quantization(tmp_path, quant_method="fp8", activation_scheme="static")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = tensors[name].reshape(())
        tensors[name.replace("weight_scale_inv", "activation_scale")] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert_reads(open_source(str(tmp_path)), expected)


def test_mxfp4_experts_are_read_as_numbers_times_powers_of_two(tmp_path):
    expected = write_mxfp4(tmp_path)
    assert_reads(open_source(str(tmp_path)), expected)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
def test_gguf_tensors_get_the_names_and_the_order_of_transformers(tmp_path, kind):
    file, model, expected = write_gguf(tmp_path, kind)
    source = open_source(str(file))
    assert_reads(source, expected)
    assert source.config.model_type == "llama"
    assert source.id == file.name
    assert kind in source.stored_as
    if kind == "F16":
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        assert torch.allclose(logits(source.load(torch.float32)), logits(plain), atol=1e-5)


def test_a_gguf_file_gives_its_tokenizer(tmp_path):
    file, model, _ = write_gguf(tmp_path)
    source = open_source(str(file))
    text = "The miller walked 12 miles to town."
    found = AutoTokenizer.from_pretrained(source.directory)(text, add_special_tokens=False).input_ids
    assert found == AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False).input_ids
    assert source.config.eos_token_id == 0


@pytest.mark.parametrize(("name", "warned"), [("deepseek-v3", True), ("llama-bpe", False), ("gpt-2", False)])
def test_a_gguf_file_whose_way_to_split_texts_is_unknown_warns(tmp_path, monkeypatch, caplog, name, warned):
    gguf = pytest.importorskip("gguf")
    told = gguf.GGUFWriter.add_tokenizer_pre
    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_pre", lambda writer, _: told(writer, name))
    file, *_ = write_gguf(tmp_path)
    open_source(str(file))
    assert (f"splits texts as {name!r}, which transformers does not know" in caplog.text) == warned


def test_a_gguf_file_without_a_tokenizer_wants_one_beside_it(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (pip install '.[gguf]')")
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_list", lambda *_: None)
    with pytest.raises(CheckpointError, match="holds no tokenizer; put the model's tokenizer"):
        open_source(str(write_gguf(tmp_path)[0]))


def test_a_gguf_file_is_the_same_source_by_a_relative_path(tmp_path, monkeypatch):
    file, *_ = write_gguf(tmp_path)
    monkeypatch.chdir(tmp_path)
    sources = [open_source(name) for name in (str(file), file.name)]
    first, second = [(source.directory / "config.json").read_text() for source in sources]
    assert first == second


@pytest.mark.parametrize(
    "special",
    [
        ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"],
        ["<begin of text>", "<end\n>", "    "],
    ],
)
def test_special_tokens_beyond_ascii_or_with_spaces_keep_their_ids(tmp_path, special):
    file, *_ = write_gguf(tmp_path, special=special)
    source = open_source(str(file))
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    ids = [VOCABULARY - 3, VOCABULARY - 2, VOCABULARY - 1]
    assert tokenizer.convert_tokens_to_ids(special) == ids
    assert (source.config.bos_token_id, source.config.eos_token_id) == (ids[0], ids[1])
    assert tokenizer("".join(special), add_special_tokens=False).input_ids == ids
    assert tokenizer.decode(tokenizer("naïve 日本", add_special_tokens=False).input_ids) == "naïve 日本"


def test_special_tokens_of_which_the_file_tells_no_kind_keep_their_ids(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (pip install '.[gguf]')")
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_types", lambda *_: None)
    source = open_source(str(write_gguf(tmp_path, special=["<\uff5ca\uff5c>", "<\uff5cb\uff5c>"])[0]))
    assert (source.config.bos_token_id, source.config.eos_token_id) == (VOCABULARY - 2, VOCABULARY - 1)


def test_a_token_that_is_listed_twice_is_refused(tmp_path):
    file, *_ = write_gguf(tmp_path, special=["<a>", "<a>"])
    with pytest.raises(CheckpointError, match=r"lists the token '<a>' more than once; fetch it again"):
        open_source(str(file))


WRITERS = {"fp8": write_fp8, "mxfp4": write_mxfp4, "gguf": lambda folder: write_gguf(folder, "Q8_0")[2]}


@pytest.mark.quick("gguf")
@pytest.mark.parametrize("form", WRITERS)
def test_a_bundle_of_it_is_that_of_the_same_weights_in_full(form, tmp_path):
    """Byte for byte, but for what the manifest says of the source."""
    folder = tmp_path / "source"
    folder.mkdir()
    expected = WRITERS[form](folder)
    model = next(folder.glob("*.gguf"), folder)
    opened = open_source(str(model))
    plain = tmp_path / "plain"
    opened.load(opened.config.dtype).save_pretrained(plain)
    save_file(expected, plain / "model.safetensors", {"format": "pt"})
    for file in opened.directory.glob("tokenizer*"):
        (plain / file.name).write_bytes(file.read_bytes())
    bundles = []
    for source in (model, plain):
        (work := tmp_path / f"of-{source.stem}").mkdir()
        bundles.append(converted(source, work))
    found, same = (open_bundle(bundle) for bundle in bundles)
    weights = [(bundle / "model.safetensors").read_bytes() for bundle in bundles]
    assert weights[0] == weights[1]
    assert found.manifest.source.stored_as == opened.stored_as
    assert opened.stored_as in (bundles[0] / "README.md").read_text()
    assert same.manifest.source.stored_as is None
    quantization = json.loads((bundles[0] / "config.json").read_text())["quantization_config"]
    assert quantization == json.loads((bundles[1] / "config.json").read_text())["quantization_config"]
    loaded, _ = kvconvert.runtime.load(bundles[0])
    assert logits(loaded).isfinite().all()


def test_weights_that_are_kept_are_written_in_full(tmp_path):
    folder = tmp_path / "model"
    expected = write_fp8(folder)
    bundle = converted(folder, tmp_path, method="none", kv="kivi")
    written = load_file(bundle / "model.safetensors")
    assert all(torch.equal(written[name], expected[name]) for name in expected)


def missing_weight(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def missing_scale(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]


def other_grid(tensors):
    tensors["model.layers.1.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)


def packed_weight(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(144, 32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (missing_weight, "without model.layers.1.mlp.up_proj.weight"),
        (missing_scale, "up_proj.weight as F8_E4M3"),
        (other_grid, "do not fit the weight_block_size"),
        (packed_weight, "up_proj.weight as I8 with scales of F32"),
    ],
)
def test_fp8_tensors_that_do_not_belong_together_are_refused(tmp_path, damage, message):
    write_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        open_source(str(tmp_path))


def test_other_quantizations_are_refused_by_name(tmp_path):
    save_checkpoint(tmp_path, dtype=torch.bfloat16)
    set_quantization(tmp_path, quant_method="hqq", bits=4)
    with pytest.raises(CheckpointError, match=r"already quantized \(hqq\).*fp8, mxfp4"):
        open_source(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()  # which are not fetched for that
    with pytest.raises(CheckpointError, match=r"already quantized \(hqq\)"):
        check_model(tmp_path)
    assert (*FORMATS,) == QUANTIZED
    save_checkpoint(tmp_path, dtype=torch.bfloat16)
    set_quantization(tmp_path, quant_method="fp8", weight_block_size=[128])
    with pytest.raises(CheckpointError, match="weight_block_size"):
        open_source(str(tmp_path))


@pytest.mark.parametrize(
    "stated",
    [
        {"quant_method": ["awq"]},
        {"quant_method": "awq", "bits": 4, "group_size": "x"},
        {"quant_method": "awq", "bits": 4, "group_size": "x" * 5000},
        {"quant_method": "gptq", "bits": [4] * 5000, "group_size": 16},
        {"quant_method": "compressed-tensors", "format": "x" * 5000},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": 5},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": [1]}},
        {
            **{"quant_method": "compressed-tensors", "format": "pack-quantized", "sparsity_config": [1]},
            "config_groups": {"a": {"weights": {"num_bits": 4}}},
        },
        {
            **{"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "config_groups": {"a": {"weights": {"num_bits": [4], "strategy": "group", "group_size": 32}}},
        },
    ],
    ids=lambda stated: str(stated)[:100],
)
def test_settings_of_another_type_are_refused_in_a_sentence(tmp_path, stated):
    save_checkpoint(tmp_path)
    set_quantization(tmp_path, **stated)
    with pytest.raises(CheckpointError, match=r"^[^\n]*\.$") as caught:
        open_source(str(tmp_path))
    assert len(str(caught.value)) < 1000


def test_mxfp4_blocks_need_their_scales(tmp_path):
    info = open_source(str(save_checkpoint(tmp_path))).tensors["model.norm.weight"]
    with pytest.raises(CheckpointError, match="x_scales, which it needs"):
        Mxfp4().encoded({"x_blocks": info}, torch.bfloat16, tmp_path)
    with pytest.raises(CheckpointError, match="no mxfp4 weights"):
        Mxfp4().encoded({"x_blocks": info, "x_scales": info}, torch.bfloat16, tmp_path)


def test_gguf_files_that_cannot_be_read_are_refused(tmp_path):
    file, *_ = write_gguf(tmp_path)
    (tmp_path / "other.gguf").write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(CheckpointError, match="holds 2 GGUF files"):
        open_source(str(tmp_path))
    with pytest.raises(CheckpointError, match="no GGUF file, or damaged"):
        open_source(str(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").write_bytes(file.read_bytes().replace(b"blk.0.ffn_up", b"blk.0.ffn_no"))
    with pytest.raises(UnsupportedModelError, match=r"no place for blk\.0\.ffn_no"):
        open_source(str(tmp_path / "other.gguf"))
    (tmp_path / "other.gguf").write_bytes(file.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match="damaged"):
        open_source(str(tmp_path / "other.gguf"))


def gguf_text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def gguf_header(*values: bytes, tensors: bytes = b"", count: int = 0) -> bytes:
    fields = b"".join(gguf_text(b"a%d" % i) + value for i, value in enumerate(values))
    return b"GGUF" + struct.pack("<IQQ", 3, count, len(values)) + fields + tensors


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "begin with GGUF"),
        (b"GGUF", "ends within"),
        (gguf_header()[:-9] + struct.pack("<Q", 2**62), "ends within"),
        (gguf_header(struct.pack("<IIQ", 9, 9, 1) * 100_000), "entries of type 9"),  # lists in lists in lists
        (gguf_header(struct.pack("<IIQ", 9, 0, 2**62)), "more than 800,000 numbers"),
        (gguf_header(struct.pack("<IIQ", 9, 8, 800_000)), "ends within"),
        (gguf_header(struct.pack("<IIQ", 9, 8, 800_001)), "more than 800,000 texts"),
        (gguf_header(struct.pack("<IQ", 8, 2**62)), "ends within"),
        (gguf_header(struct.pack("<I", 77)), "type 77"),
        (gguf_header(tensors=gguf_text(b"x") + struct.pack("<I", 2**31), count=1), "dimensions"),
        (gguf_header(tensors=gguf_text(b"x") + struct.pack("<IQQ", 2, 2**62, 2), count=1), "more than the file"),
    ],
)
def test_a_gguf_header_that_claims_what_the_file_cannot_hold_is_refused_at_once(tmp_path, content, reason):
    pytest.importorskip("gguf", reason="needs the package gguf (pip install '.[gguf]')")
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=reason):
        open_source(str(tmp_path / "x.gguf"))


def test_the_lists_of_a_gguf_header_are_counted_together(tmp_path):
    texts, numbers = (struct.pack("<IIQ", 9, kind, 450_000) + bytes(size * 450_000) for kind, size in ((8, 8), (0, 1)))
    for lists, reason in (
        ([texts] * 2, "more than 800,000 texts"),
        ([numbers] * 2, "more than 800,000 numbers"),
        ([numbers], "450,000 numbers beside 0 texts"),
    ):
        (tmp_path / "x.gguf").write_bytes(gguf_header(*lists))
        with pytest.raises(ValueError, match=reason):
            check_header(tmp_path / "x.gguf")


def test_the_header_of_the_largest_vocabulary_is_read(tmp_path):
    texts = [struct.pack("<IIQ", 9, 8, count) + bytes(8 * count) for count in (262_144, 514_906)]
    numbers = [struct.pack("<IIQ", 9, kind, 262_144) + bytes(4 * 262_144) for kind in (5, 6)]
    (tmp_path / "x.gguf").write_bytes(gguf_header(*texts, *numbers))
    check_header(tmp_path / "x.gguf")


def test_a_gguf_file_that_claims_many_blocks_is_refused_before_its_configuration_is_made(tmp_path):
    file, *_ = write_gguf(tmp_path)
    content = file.read_bytes()
    at = content.index(b"llama.block_count") + len(b"llama.block_count") + 4
    file.write_bytes(content[:at] + struct.pack("<I", 2**31) + content[at + 4 :])
    with pytest.raises(CheckpointError, match="block_count is 2147483648"):
        open_source(str(file))


def damaged(directory, shapes, **quantization):
    """A tiny Llama one of whose Linears has tensors of these shapes in place of its weight."""
    save_checkpoint(directory)
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    made = {f"model.layers.0.mlp.up_proj{part}": torch.ones(shape).to(dtype) for part, (shape, dtype) in shapes.items()}
    save_file(tensors | made, directory / "model.safetensors", {"format": "pt"})
    set_quantization(directory, **quantization)
    return str(directory)


def quantized_shapes(codes, scales, dtype=torch.int32):
    return {".qweight": (codes, dtype), ".qzeros": (codes, dtype), ".scales": (scales, torch.float16)}


def packed_shapes(codes, scales, size):
    return {
        ".weight_packed": (codes, torch.int32),
        ".weight_scale": (scales, torch.float16),
        ".weight_shape": (size, torch.int64),
    }


def pack_quantized(group_size):
    weights = {"num_bits": 4, "strategy": "group", "group_size": group_size, "type": "int"}
    groups = {"a": {"weights": weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("shapes", "quantization"),
    [
        *(
            (quantized_shapes(codes, scales), {"quant_method": method, "bits": 4, "group_size": 16})
            for method in ("awq", "gptq")
            for codes, scales in (((), ()), ((0, 16), (0, 128)), ((3,), ()))
        ),
        *((packed_shapes((128, 8), (128, n), (2,)), pack_quantized(16)) for n in (0, 3)),
        *((packed_shapes(codes, scales, ()), pack_quantized(16)) for codes, scales in (((), ()), ((0,), (0,)))),
        *((packed_shapes((128, 8), (128, 4), (2,)), pack_quantized(size)) for size in (0, -16)),
        *(
            (
                {".weight": (shape, torch.float8_e4m3fn), ".weight_scale_inv": ((2,), torch.float32)},
                {"quant_method": "fp8", "weight_block_size": [128, 128]},
            )
            for shape in ((), (64,))
        ),
    ],
)
def test_quantized_weights_of_no_possible_shape_are_one_sentence(tmp_path, shapes, quantization):
    with pytest.raises(CheckpointError) as caught:
        open_source(damaged(tmp_path, shapes, **quantization))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "x.gguf"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_place_of_a_models_is_refused_unread(tmp_path, name, make):
    save_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    make(tmp_path / name)  # reading a pipe would wait for ever
    with pytest.raises(CheckpointError):
        open_source(str(tmp_path))


@pytest.mark.quick("tokenizer_config", "mkfifo")
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/nowhere"), None])
def test_what_is_no_file_is_not_taken_for_an_absent_one(tmp_path, name, make):
    file, *_ = write_gguf(tmp_path)
    for place in (tmp_path / "model", tmp_path):
        path = place / name
        path.unlink(missing_ok=True)
        if make is not None:
            make(path)
    for model in (tmp_path / "model", file):
        with contextlib.nullcontext() if make is None else pytest.raises(CheckpointError, match=f"{name} is no file"):
            open_source(str(model))


def gguf_with(file, *fields):
    """A GGUF file with further fields, each of a name and what follows it."""
    content = file.read_bytes()
    tensors, count = struct.unpack_from("<QQ", content, 8)
    made = b"".join(struct.pack("<Q", len(name)) + name + value for name, value in fields)
    reader = pytest.importorskip("gguf").GGUFReader(file)
    # Data begin at a multiple of 32.
    made += struct.pack("<Q", 1) + b"~" + struct.pack("<I", 8)
    made += struct.pack("<Q", fill := -(len(made) + 8) % 32) + bytes(fill)
    head = content[:8] + struct.pack("<QQ", tensors, count + len(fields) + 1)
    assert reader.data_offset % 32 == 0
    file.write_bytes(head + made + content[24:])
    return str(file)


@pytest.mark.parametrize("name", ["qwen2.block_count", "mistral.block_count", "llama.block_count"])
def test_a_gguf_file_that_claims_blocks_for_ever_is_refused_by_any_name(tmp_path, name):
    file, *_ = write_gguf(tmp_path)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=r"claims that|damaged"):
        open_source(gguf_with(file, (name.encode(), struct.pack("<II", 4, 10**9))))


@pytest.mark.parametrize("made", ["GGUFReader", "get_tensor_name_map"])
def test_a_gguf_file_is_read_once_and_its_names_are_mapped_once(tmp_path, monkeypatch, made):
    file, *_ = write_gguf(tmp_path)
    gguf, calls = pytest.importorskip("gguf"), []
    make = getattr(gguf, made)
    monkeypatch.setattr(gguf, made, lambda *of: calls.append(of) or make(*of))
    open_source(str(file))
    open_source(str(file))
    assert len(calls) == 2  # nothing of the first file is kept for the second


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**6}, {"num_hidden_layers": 10**9}])
def test_a_configuration_beside_a_gguf_file_is_bounded_like_any_other(tmp_path, changes):
    file, model, _ = write_gguf(tmp_path)
    config = json.loads((model / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json says"):
        open_source(str(file))


@pytest.mark.parametrize(("kind", "count", "size"), [(0, 2**20, 1), (8, 2**22, 8)])
def test_lists_of_a_gguf_file_take_no_minutes(tmp_path, kind, count, size):
    file, *_ = write_gguf(tmp_path)
    with pytest.raises(CheckpointError, match="its lists have"):
        open_source(gguf_with(file, (b"x", struct.pack("<IIQ", 9, kind, count) + bytes(size * count))))


def test_a_gguf_file_has_no_thousands_of_fields(tmp_path):
    file, *_ = write_gguf(tmp_path)
    with pytest.raises(CheckpointError, match=r"it claims \d+ fields"):
        open_source(gguf_with(file, *((b"k%d" % i, struct.pack("<IB", 0, 0)) for i in range(5000))))


def test_tensors_that_do_not_fit_a_gguf_files_own_metadata_are_one_sentence(tmp_path):
    file, model, _ = write_gguf(tmp_path)
    config = json.loads((model / "config.json").read_text()) | {"num_key_value_heads": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = open_source(str(file))
    with pytest.raises(CheckpointError, match="does not fit what its metadata say"):
        source.read("")


@pytest.mark.parametrize("offset", [1, 64, 2**64 - 64])
def test_tensors_of_a_gguf_file_have_bytes_of_their_own(tmp_path, offset):
    file, *_ = write_gguf(tmp_path)
    content = bytearray(file.read_bytes())
    name = pytest.importorskip("gguf").GGUFReader(file).tensors[0].name.encode()
    at = content.index(gguf_text(name)) + 8 + len(name)
    dimensions = struct.unpack_from("<I", content, at)[0]
    struct.pack_into("<Q", content, at + 8 + 8 * dimensions, offset)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="begins before what lies in front of it ends"):
        open_source(str(file))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("name", ["layer_norm_rms_epsilon", "rope.freq_base"])
def test_a_gguf_file_whose_numbers_make_no_model_is_refused(tmp_path, name, value):
    file, *_ = write_gguf(tmp_path)
    content = bytearray(file.read_bytes())
    struct.pack_into("<f", content, content.index(name.encode()) + len(name) + 4, value)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"eps is|theta is"):
        open_source(str(file))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("rope.scaling.factor", 8.0), ("rope.scale_linear", 4.0), ("attention.sliding_window", 7.0)],
        *[("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0), ("attention.layer_norm_epsilon", 0.1)],
    ],
)
def test_what_a_gguf_file_states_of_its_model_and_transformers_passes_over_is_refused(tmp_path, name, value):
    file, model, _ = write_gguf(tmp_path)
    gguf_with(file, (f"llama.{name}".encode(), struct.pack("<If", 6, value)))
    with pytest.raises(UnsupportedModelError, match=rf"says that llama\.{name} is {value}.*config\.json"):
        open_source(str(file))
    shutil.copyfile(model / "config.json", tmp_path / "config.json")
    open_source(str(file))


@pytest.mark.parametrize(
    ("architecture", "blocks", "said"), [("gemma3", 62, "query_pre_attn_scalar is 168"), ("gemma3", 26, "no tokenizer")]
)
def test_a_gguf_file_of_a_model_whose_scale_it_cannot_say_is_refused(tmp_path, architecture, blocks, said):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), architecture)
    writer.add_block_count(blocks)
    writer.add_context_length(8192)
    writer.add_embedding_length(5376)
    writer.add_feed_forward_length(64)
    writer.add_head_count(32)
    writer.add_head_count_kv(16)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_vocab_size(32)
    writer.add_tensor("token_embd.weight", torch.zeros(32, 5376, dtype=torch.float16).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises((UnsupportedModelError, CheckpointError), match=said):
        open_source(str(tmp_path / "model.gguf"))


def test_a_gguf_file_that_states_no_scaling_is_read(tmp_path):
    file, *_ = write_gguf(tmp_path)
    open_source(gguf_with(file, (b"llama.rope.scaling.factor", struct.pack("<If", 6, 1.0))))


@pytest.mark.parametrize(
    ("name", "value"), [("rms_norm_eps", -1.0), ("rms_norm_eps", float("nan")), ("rope_theta", 0.0)]
)
def test_a_source_whose_bundle_would_be_refused_is_refused_itself(tmp_path, name, value):
    save_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(CheckpointError, match=name):
        open_source(str(tmp_path))


def test_a_configuration_of_terabytes_is_refused_unread(tmp_path):
    save_checkpoint(tmp_path)
    os.truncate(tmp_path / "config.json", 10**12)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read \(1,000,000,000,000 bytes"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_tokenizer_of_another_kind_than_a_gguf_file_says_is_refused(tmp_path, monkeypatch, kind):
    gguf = pytest.importorskip("gguf")
    told = gguf.GGUFWriter.add_tokenizer_model

    def tell(writer, _):
        told(writer, kind)
        writer.add_array("tokenizer.ggml.scores", [-float(place) for place in range(VOCABULARY)])

    monkeypatch.setattr(gguf.GGUFWriter, "add_tokenizer_model", tell)
    file, *_ = write_gguf(tmp_path)
    with pytest.raises(CheckpointError, match=f"gives ids beyond its {VOCABULARY} tokens"):
        open_source(str(file))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"token_type": [1] * 9}, "tokens and not as many finite kinds"),
        ({"scores": [0.0] * 9}, "tokens and not as many finite scores"),
        ({"scores": [math.nan] * VOCABULARY}, "tokens and not as many finite scores"),
        ({"model": "llama", "add_space_prefix": False}, "lets no text begin with a space"),
    ],
)
def test_a_gguf_file_whose_texts_would_become_other_tokens_is_refused(tmp_path, monkeypatch, fields, reason):
    gguf = pytest.importorskip("gguf")
    told = gguf.GGUFWriter.add_key_value
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}

    def tell(writer, key, value, *kind, **more):
        told(writer, key, fields.pop(key, value), *kind, **more)
        if key == "tokenizer.ggml.bos_token_id":
            left = {"tokenizer.ggml.scores": [-float(place) for place in range(VOCABULARY)]} | fields
            fields.clear()
            for name, value in left.items():
                writer.add_array(name, value) if isinstance(value, list) else writer.add_bool(name, value)

    monkeypatch.setattr(gguf.GGUFWriter, "add_key_value", tell)
    file, *_ = write_gguf(tmp_path, special=["<unk>", "\u2581", "\u2581a"])
    with pytest.raises(CheckpointError, match=reason):
        open_source(str(file))


def test_a_gguf_file_whose_context_has_no_tokens_is_refused(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    told = gguf.GGUFWriter.add_context_length
    monkeypatch.setattr(gguf.GGUFWriter, "add_context_length", lambda writer, _: told(writer, 0))
    file, *_ = write_gguf(tmp_path)
    with pytest.raises(CheckpointError, match="max_position_embeddings is 0"):
        open_source(str(file))


def test_weights_that_become_a_pipe_after_they_were_looked_at_are_refused_unread(tmp_path):
    save_checkpoint(tmp_path)
    source = open_source(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")  # reading it would wait for ever
    with pytest.raises(CheckpointError, match="no regular file"):
        source.read("")
