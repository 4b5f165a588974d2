"""Read a bundle with numpy alone, after docs/bundle.md: one layer's weights, and one page of keys and values."""

import argparse
import json
import struct
from pathlib import Path

import numpy as np

DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4"}  # numpy has no bfloat16


def read_tensors(path):
    """Every tensor of a safetensors file by name; of bfloat16 the words."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def unpack(words):
    """4-bit codes [rows, 8 columns] of AWQ words [rows, columns]."""
    shifts = 4 * np.array([0, 4, 1, 5, 2, 6, 3, 7])  # of output channels 8c, 8c + 1, ...
    return (words[..., None] >> shifts & 15).reshape(len(words), -1).astype(np.float32)


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


def sylvester(size):
    """The orthonormal Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(size)).astype(np.float32)


def page_of_keys(keys, layer, boosted):
    """A page of keys [heads, 128, channels], rotated and rounded to nearest; boosted: [heads, n] channels."""
    kv, norm = layer["kv"], np.float32(1)
    if kv["rotate_keys"] == "hadamard":
        keys = keys @ sylvester(keys.shape[-1])
    if kv["token_norm"] != "none":
        axes = (0, 2) if kv["token_norm"] == "joint" else (2,)
        l2, mean_abs = np.sqrt(np.mean(keys**2, axes, keepdims=True)), np.mean(np.abs(keys), axes, keepdims=True)
        norm = (mean_abs if kv["token_norm_measure"] == "mean_abs" else l2).astype(np.float16).astype(np.float32)
    channels = np.swapaxes(keys / np.where(norm == 0, np.inf, norm), 1, 2)
    page = rounded(channels, kv["key_bits"], kv["key_group_size"], kv["key_clip_ratio"])
    fine = rounded(channels, 2 * kv["key_bits"], kv["key_group_size"], kv["key_clip_ratio"])
    np.put_along_axis(page, boosted[..., None], np.take_along_axis(fine, boosted[..., None], 1), 1)
    return np.swapaxes(page, 1, 2) * norm


def page_of_values(values, layer):
    """A page of values [heads, 128, channels] as the layer stores it."""
    return rounded(values, layer["kv"]["value_bits"], layer["value_group_size"], layer["kv"]["value_clip_ratio"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path, help="directory of the bundle")
    bundle = parser.parse_args().bundle
    try:
        modules = json.loads((bundle / "kvconvert.json").read_bytes())["modules"]
    except OSError as error:
        parser.error(f"{bundle} is no bundle ({error.strerror}: {error.filename})")
    module = next((module for module in modules if module["bits"] == 4), None)
    if module is None:
        parser.error(f"{bundle} has no weights of 4 bits; give a bundle that has, such as one of the recipe default")
    print(module["name"], weight(read_tensors(bundle / "model.safetensors"), module["name"], module["group_size"]))
