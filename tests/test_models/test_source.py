"""What a source checkpoint can be, and how each thing it cannot be is said."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny.checkpoints import save_checkpoint

from kvconvert.convert.checks import check_purpose
from kvconvert.convert.layer_runner import LayerRunner
from kvconvert.errors import CheckpointError, KvconvertError, NumericError, UnsupportedModelError, unreadable
from kvconvert.models.source import open_source
from kvconvert.models.weight_files import INDEX_FILE
from kvconvert.recipes.recipe import Recipe

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("source") / "single", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("source") / "sharded", dtype=torch.bfloat16, max_shard_size="100KB")


@pytest.fixture
def model(sharded, tmp_path):
    """A copy of the sharded checkpoint that a test may damage."""
    return shutil.copytree(sharded, tmp_path / "model")


def shards(directory):
    return sorted(directory.glob("model-*.safetensors"))


def test_reads_exactly_the_stored_tensors_from_one_file_or_several(single, sharded):
    expected = load_file(single / WEIGHTS)
    assert len(shards(sharded)) > 2
    for directory in (single, sharded):
        source = open_source(str(directory))
        tensors = source.read("")
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert set(source.read("model.layers.1.")) == {name for name in expected if name.startswith("model.layers.1.")}
    assert list(source.read(["model.norm.weight"])) == ["model.norm.weight"]


def test_info_identifies_every_weight_file_by_content(sharded, tmp_path):
    info = open_source(str(sharded)).info()
    assert info.id == "sharded"
    assert set(info.weights_sha256) == {file.name for file in shards(sharded)}
    other = shutil.copytree(sharded, tmp_path / "sharded")
    assert open_source(str(other)).info() == info
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    assert open_source(str(other)).info().config_sha256 != info.config_sha256


def test_licence_comes_from_the_model_card(model):
    (model / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: none\n")
    assert open_source(str(model)).info().licence == "apache-2.0"


def missing_directory(model):
    shutil.rmtree(model)


def empty_directory(model):
    for file in model.iterdir():
        file.unlink()


def no_config(model):
    (model / "config.json").unlink()


def broken_config(model):
    (model / "config.json").write_text("{")


def only_pickles(model):
    for file in shards(model):
        file.unlink()
    (model / INDEX_FILE).unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04")


def no_weights(model):
    for file in shards(model):
        file.unlink()
    (model / INDEX_FILE).unlink()


def truncated_shard(model):
    file = shards(model)[1]
    file.write_bytes(file.read_bytes()[:-7])


def shard_of_a_few_bytes(model):
    shards(model)[1].write_bytes(b"\x01\x02")


def garbled_header(model):
    file = shards(model)[1]
    data = bytearray(file.read_bytes())
    data[8] = ord("!")
    file.write_bytes(data)


def missing_shard(model):
    shards(model)[1].unlink()


def extra_shard(model):
    shutil.copyfile(shards(model)[0], model / "model-00099-of-00099.safetensors")


def missing_index(model):
    (model / INDEX_FILE).unlink()


def tensor_not_in_its_shard(model):
    file = shards(model)[1]
    tensors = load_file(file)
    tensors.pop(sorted(tensors)[0])
    save_file(tensors, file)


def tensor_not_in_the_index(model):
    file = shards(model)[1]
    save_file(load_file(file) | {"model.stray": torch.zeros(2)}, file)


def index_that_leads_elsewhere(model):
    index = json.loads((model / INDEX_FILE).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "../model.safetensors"
    (model / INDEX_FILE).write_text(json.dumps(index))


def nested_index(model):
    (model / INDEX_FILE).write_text('{"weight_map":' + "[" * 100_000 + "]" * 100_000 + "}")


def index_of_other_bytes(model):
    shutil.copyfile(shards(model)[0], model / INDEX_FILE)


def quantized_by_a_long_name(model):
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "x" * 10**5}}
    (model / "config.json").write_text(json.dumps(config))


def dtype_of_no_weights(model):
    config = json.loads((model / "config.json").read_text()) | {"dtype": "int4"}
    (model / "config.json").write_text(json.dumps(config))


def index_beside_a_single_file(model):
    shutil.copyfile(shards(model)[0], model / WEIGHTS)


def type_of_a_long_name(model):
    file = shards(model)[0]
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header[next(name for name in header if name != "__metadata__")]["dtype"] = "F" * 17
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def no_layers(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 0}))


def unmerged_adapter(model):
    (model / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def already_quantized(model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "hqq", "bits": 4}}))


def integer_weights(model):
    file = next(f for f in shards(model) if any(name.endswith(".weight") for name in load_file(f)))
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing_directory, "There is no model directory"),
        (empty_directory, "is empty"),
        (no_config, r"no config\.json"),
        (broken_config, r"config\.json cannot be read \(.*; correct it, or fetch it again"),
        (only_pickles, r"pickled weights \(pytorch_model\.bin\).*save_pretrained"),
        (no_weights, "holds no weights"),
        (truncated_shard, r"model-00002-of-\d+\.safetensors is truncated"),
        (shard_of_a_few_bytes, r"model-00002-of-\d+\.safetensors is truncated"),
        (garbled_header, "is truncated or damaged: its header should be JSON"),
        (type_of_a_long_name, r"the dtype of tensor \S+ should be one of"),
        (no_layers, r"config\.json says that the number of layers is 0, and it should be at least 1"),
        (missing_shard, r"model-00002-of-\d+\.safetensors .* is missing"),
        (extra_shard, r"model-00099-of-00099\.safetensors that .* does not name"),
        (missing_index, "fetch the index"),
        (tensor_not_in_its_shard, "says that .* holds .*, but it does not"),
        (tensor_not_in_the_index, r"holds model\.stray, which .* does not name"),
        (nested_index, r"index\.json cannot be read \(.*; correct it, or fetch it again"),
        (index_of_other_bytes, r"index\.json cannot be read \(.*; correct it, or fetch it again"),
        (quantized_by_a_long_name, r"already quantized \(xxx"),
        (dtype_of_no_weights, r"dtype is torch\.int4, and it should be torch\.float16"),
        (index_that_leads_elsewhere, "not a safetensors file beside it"),
        (index_beside_a_single_file, "remove the wrong one"),
        (unmerged_adapter, "unmerged LoRA adapter.*merge"),
        (already_quantized, r"already quantized \(hqq\)"),
        (integer_weights, "as I8; converting needs weights in"),
    ],
)
def test_a_checkpoint_that_cannot_be_converted_is_refused_in_one_sentence(model, damage, said):
    damage(model)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_source(str(model))
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 1000  # nothing of a file is shown at length


def test_a_file_that_the_system_does_not_let_read_is_not_to_be_fetched_again():
    refused = unreadable(Path("config.json"), PermissionError(13, "Permission denied"))
    assert refused == "config.json cannot be read (Permission denied); check the file and its permissions."


def test_a_name_that_is_no_path_and_no_hub_id_is_not_looked_up():
    with pytest.raises(CheckpointError, match="There is no model directory"):
        open_source("./no/such/place")


def test_code_that_comes_with_a_model_is_never_run(model):
    (model / "config.json").write_text(
        json.dumps({"model_type": "homemade", "auto_map": {"AutoConfig": "homemade.HomemadeConfig"}})
    )
    (model / "homemade.py").write_text("raise SystemExit('this code ran')\n")
    with pytest.raises(UnsupportedModelError, match="without running the model's own code"):
        open_source(str(model))


@pytest.mark.parametrize(
    ("field", "value"), [("intermediate_size", 128.0), ("eos_token_id", "</s>"), ("rope_scaling", {"type": "longrope"})]
)
def test_a_configuration_that_transformers_does_not_accept_is_refused_with_its_reason(model, field, value):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(
        CheckpointError, match=r"does not accept .*config\.json \(.*(intermediate_size|eos_token|longrope)"
    ):
        open_source(str(model))


@pytest.mark.parametrize(
    ("field", "value"),
    [("is_encoder_decoder", True), ("is_encoder_decoder", ["x"]), ("text_config", -1.5), ("text_config", "gelu")],
)
def test_what_no_bundle_may_say_no_source_says_either(model, field, value):
    """Else a bundle would be made that nothing reads."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(KvconvertError, match=r"config\.json says that (is_encoder_decoder|the language model's part)"):
        open_source(str(model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True, and kvconvert converts models that only decode"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "ForSequenceClassification, which generates no text"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel, which generates no text; choose a model that does"),
    ],
)
def test_a_model_that_is_no_decoder_of_text_is_called_that_and_not_damaged(model, changes, said):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModelError, match=said):
        check_purpose(open_source(str(model)).config, Recipe.load("weights-only"))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("pad_token_id", 4096, "its pad_token_id, 4096, is not among its 4,096 tokens"),
        ("rope_theta", "10000", "'str'"),
        (
            "rope_scaling",
            {"rope_type": "longrope", "factor": 2, "short_factor": [1.0] * 3, "long_factor": [1.0] * 3},
            "",
        ),
    ],
)
def test_a_configuration_of_which_transformers_builds_no_model_is_refused(model, field, value, said):
    config = json.loads((model / "config.json").read_text())
    config.pop("rope_parameters", None)
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 4096, field: value}))
    source = open_source(str(model))
    with pytest.raises(UnsupportedModelError, match=f"builds no causal language model from .*{said}"):
        LayerRunner(source, torch.device("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(model, value):
    source = open_source(str(model))
    name = "model.layers.1.mlp.up_proj.weight"
    file = model / source.weight_map[name]
    tensors = load_file(file)
    tensors[name][3, 5] = value
    save_file(tensors, file)
    with pytest.raises(NumericError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_source(str(model)).read_finite("model.layers.1.")


def test_a_tensor_of_a_type_that_bundles_do_not_hold_is_described(single, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(single, model)
    file = model / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["model.scales"] = {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [end, end + 4]}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :] + bytes(4))
    info = open_source(str(model)).tensors["model.scales"]
    assert (info.dtype, info.shape) == ("F8_E8M0", [4])
