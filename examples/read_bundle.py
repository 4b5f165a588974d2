"""Read a bundle with numpy alone, after docs/bundle.md: one layer's weights, and one page of keys and values."""

import json
import re
import struct
import sys
from pathlib import Path

import numpy as np

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}


def read_tensors(path):
    """Every tensor of a safetensors file by name; bfloat16 as float32."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = {name: entry for name, entry in json.loads(data[8 : 8 + length]).items() if name != "__metadata__"}
    arrays = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        array = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        arrays[name] = (array.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else array
    return arrays


def unpack(words):
    """4-bit codes [rows, 8 columns] of AWQ words [rows, columns]."""
    codes = np.empty((*words.shape, 8), np.float32)
    for n, channel in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
        codes[..., channel] = (words >> 4 * n) & 15
    return codes.reshape(len(words), -1)


def weight(tensors, name, group_size):
    """The weight [out, in] of a quantized Linear, float32."""
    codes, zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    group = np.arange(len(codes)) // group_size
    return ((unpack(codes) - unpack(zeros)[group]) * scales.astype(np.float32)[group]).T


def rounded(x, bits, group_size, ratio):
    """Groups along the last axis, quantized and back."""
    groups = x.astype(np.float32).reshape(*x.shape[:-1], -1, group_size)
    low, extent = groups.min(-1, keepdims=True), np.ptp(groups, axis=-1, keepdims=True)
    scale = (extent * np.float32(ratio) / np.float32(2**bits - 1)).astype(np.float16).astype(np.float32)
    zero_point = (low + extent * np.float32((1 - ratio) / 2)).astype(np.float16).astype(np.float32)
    codes = np.clip(np.rint((groups - zero_point) / np.where(scale == 0, np.inf, scale)), 0, 2**bits - 1)
    return (codes * scale + zero_point).reshape(x.shape)


def page_of_keys(keys, layer, boosted=None):
    """A page of keys [heads, 128, channels], rotated as the layer says, rounded to nearest; boosted: [heads, n]."""
    kv, norm = layer["kv"], 1
    if kv["token_norm"] != "none":
        axes = (0, 2) if kv["token_norm"] == "joint" else (2,)
        size = np.sqrt(np.mean(keys**2, axes, keepdims=True)), np.mean(np.abs(keys), axes, keepdims=True)
        norm = size[kv["token_norm_measure"] == "mean_abs"].astype(np.float16).astype(np.float32)
    channels = np.swapaxes(keys / np.where(norm == 0, np.inf, norm), 1, 2)
    page = rounded(channels, kv["key_bits"], kv["key_group_size"], kv["key_clip_ratio"])
    if boosted is not None:  # [heads, n]
        fine = rounded(channels, 2 * kv["key_bits"], kv["key_group_size"], kv["key_clip_ratio"])
        np.put_along_axis(page, boosted[..., None], np.take_along_axis(fine, boosted[..., None], 1), 1)
    return np.swapaxes(page, 1, 2) * norm


def page_of_values(values, layer):
    """A page of values [heads, 128, channels] as the layer stores it."""
    return rounded(values, layer["kv"]["value_bits"], layer["value_group_size"], layer["kv"]["value_clip_ratio"])


def rotation(convention):
    """The matrix H of `sylvester(d)`."""
    i = np.arange(int(re.fullmatch(r"sylvester\((\d+)\)", convention)[1]))
    return np.array([[(-1.0) ** (a & b).bit_count() for b in map(int, i)] for a in map(int, i)]) / np.sqrt(len(i))


if __name__ == "__main__":
    bundle = Path(sys.argv[1])
    manifest = json.loads((bundle / "kvconvert.json").read_bytes())
    stored = read_tensors(bundle / "model.safetensors")
    for module in manifest["modules"]:
        if module["name"].startswith("model.layers.0.") and module["method"] != "kept":
            matrix = weight(stored, module["stored_name"] or module["name"], module["group_size"])
            print(module["name"], matrix.shape, f"mean magnitude {np.abs(matrix).mean():.4f}")
    layer = manifest["layers"][0]
    keys = np.random.default_rng(0).standard_normal((layer["num_key_value_heads"], 128, layer["head_dim"]))
    turned = keys @ rotation(layer["rotation"]) if layer["kv"]["rotate_keys"] == "hadamard" else keys
    error = np.abs(page_of_keys(turned.astype(np.float32), layer) - turned).mean()
    print(f"a page of random keys at {layer['kv']['key_bits']} bits: mean error {error:.4f}")
