"""Kernels of the plugin begin to be compiled before there is a cache."""

import torch
from vllm_serving import TINY, write_model

from kvconvert.kernels.attention import Scoring
from kvconvert.kernels.device import GPU, imagined
from kvconvert.kernels.launches import record_specializations
from kvconvert.vllm import attention
from kvconvert.vllm.blocks import LayerBlocks
from kvconvert.vllm.bundle import served_bundle
from kvconvert.vllm.prompts import Packing, Workspace
from kvconvert.vllm.step import DecodeTables

CPU = torch.device("cpu")
DTYPE = torch.bfloat16


def launches(served, blocks):
    """The launches of a rehearsal over a cache of `blocks` blocks."""
    memory = attention.stand_ins(list(served.layouts(DTYPE).values()), blocks, CPU)
    caches = [served.layer(index, CPU, DTYPE) for index in served.attending]
    layers = [LayerBlocks(*cache, DTYPE, own) for cache, own in zip(caches, memory, strict=True)]
    with imagined(GPU((9, 0), 132)):
        tables = DecodeTables(layers, 32, blocks)
        tables.include(layers)
        packing = Packing(layers[0], None, Workspace(torch.empty(16 << 20, dtype=torch.uint8)))
        with record_specializations() as found:
            attention.rehearse(layers, [(TINY["num_attention_heads"], Scoring(1.0))] * len(layers), tables, packing)
    return list(found)


def test_blocks_that_stand_in_launch_what_those_of_a_cache_do(tmp_path):
    served = served_bundle(str(write_model(tmp_path, "bundle-mixed", TINY | {"num_hidden_layers": 6})))
    found = launches(served, attention.STAND_INS)
    assert found == launches(served, 3000)
    assert sum(launch.name == "decode_kernel" for launch in found) == 6


def test_what_was_begun_is_waited_for(monkeypatch):
    order = []

    class Begun:
        def join(self):
            order.append("joined")

    monkeypatch.setattr(attention, "begin_to_compile", lambda *_: order.append("begun") or Begun())
    monkeypatch.setattr(attention, "make_ready", lambda *_: order.append("ready"))
    with imagined(GPU((9, 0), 132)):
        attention.begin(CPU, lambda: order.append("rehearsed"))
        attention.prepare(CPU, lambda: order.append("rehearsed"))
        attention.prepare(CPU)
    assert order == ["rehearsed", "begun", "joined", "rehearsed", "ready", "ready"]
