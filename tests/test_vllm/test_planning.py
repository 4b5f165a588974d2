"""vLLM's planner gives every layer blocks of its pages' size, which other layers' states and windows do not undo.

No engine is started: `planning.py` asks the planner of the Python that `KVCONVERT_VLLM_PYTHON` names.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_vllm.planning import MARKER, MEMORY

PYTHON = os.environ.get("KVCONVERT_VLLM_PYTHON")
pytestmark = pytest.mark.skipif(not PYTHON, reason="KVCONVERT_VLLM_PYTHON names no Python with vLLM and kvconvert")
NARROW = {"key_bits": 2, "value_bits": 2, "sink_tokens": 4}
WIDE = NARROW | {"key_bits": 8, "value_bits": 8}


def layers(
    types: list[str], *schemes: dict[str, Any] | None, heads: int = 8, head_dim: int = 128, value_dim: int | None = None
) -> list[dict[str, Any]]:
    """Layers of these types; ours have the schemes in turn."""
    sizes = {"heads": heads, "head_dim": head_dim, "value_dim": value_dim or head_dim}
    return [
        {"type": kind, "scheme": schemes[index % len(schemes)] if kind == "full_attention" else None} | sizes
        for index, kind in enumerate(types)
    ]


FULL = ["full_attention"]
WINDOWS = (["sliding_attention"] * 5 + FULL) * 10
STATES = (["linear_attention"] * 3 + FULL) * 12
MIXED = (NARROW, NARROW, WIDE, NARROW | {"key_bits": 3}, None, NARROW | {"key_bits": 1, "value_bits": 1})
CASES: dict[str, dict[str, Any]] = {
    # Llama 3 8B with one scheme, and as `auto` leaves it.
    "alike": {"layers": layers(FULL * 32, NARROW), "layout": "LBNHC"},
    "mixed": {"layers": layers(FULL * 32, *MIXED), "layout": "BLNHC"},
    "drafts": {"layers": layers(FULL * 32, NARROW), "layout": "LBNHC", "drafts": 4},
    # Gemma 3 27B on a GPU, and on a CPU, whose backend cannot have pages of several sizes side by side.
    "windows": {"layers": layers(WINDOWS, NARROW, heads=16), "layout": "BLHNC"},
    "mixed beside windows": {"layers": layers(WINDOWS, *MIXED[:5], heads=16), "layout": "BLHNC"},
    "windows on a CPU": {"layers": layers(WINDOWS, NARROW, heads=16), "layout": "LBHNC"},
    # MiMo-V2-Flash.
    "values of fewer channels": {
        "layers": layers(WINDOWS[:48], NARROW, heads=4, head_dim=192, value_dim=128),
        "layout": "BLHNC",
    },
    # Qwen3-Next.
    "states": {"layers": layers(STATES, NARROW, heads=2, head_dim=256), "layout": "LBNHC"},
}


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Any]]:
    script = Path(__file__).with_name("planning.py")
    asked = json.dumps(list(CASES.values()))
    ended = subprocess.run([PYTHON, str(script)], input=asked, capture_output=True, text=True, timeout=900)
    lines = [line for line in ended.stdout.splitlines() if line.startswith(MARKER)]
    assert lines, ended.stderr
    return dict(zip(CASES, json.loads(lines[0].removeprefix(MARKER)), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name != "windows on a CPU"])
def test_a_token_takes_the_bytes_of_its_pages(name, plans):
    plan = plans[name]
    (own,) = [group for group in plan["groups"] if group["spec"] == "LowBitSpec"]
    # In bf16 a token of the same layers takes this many.
    full = [one for one in CASES[name]["layers"] if one["type"] == "full_attention"]
    exact = sum(2 * one["heads"] * (one["head_dim"] + one["value_dim"]) for one in full)
    per_token = plan["bytes_per_block"] / own["block"]
    assert plan["pages"] / 128 <= per_token <= 1.03 * plan["pages"] / 128
    if "mixed" not in name:
        assert per_token < 0.2 * exact


def test_blocks_that_a_cpu_has_side_by_side_are_padded_and_still_smaller_than_full_precision(plans):
    plan = plans["windows on a CPU"]
    assert plan["pages"] < plan["bytes_per_block"] < 0.3 * 128 * 10 * 4 * 16 * 128


def test_requests_of_8192_tokens_that_30_gb_hold(plans):
    held = {name: plan["blocks"] // plan["row"] for name, plan in plans.items()}
    full_precision = MEMORY // (8192 * 32 * 4 * 8 * 128)
    assert held["alike"] > 4.5 * full_precision
    assert held["mixed"] > 2 * full_precision


def test_other_layers_share_blocks_in_few_groups(plans):
    for name in ("windows", "mixed beside windows", "states"):
        others = [group for group in plans[name]["groups"] if group["spec"] != "LowBitSpec"]
        assert sum(group["layers"] for group in others) == sum(
            one["type"] != "full_attention" for one in CASES[name]["layers"]
        )
        assert len(others) <= 10


def test_drafts_that_fit_one_block_take_no_more_blocks(plans):
    assert plans["drafts"]["first"] == plans["alike"]["first"]
    assert plans["drafts"]["row"] == plans["alike"]["row"]


def test_our_layers_see_blocks_of_one_page_whatever_vllms_blocks_are(plans):
    for name, plan in plans.items():
        (own,) = [group for group in plan["groups"] if group["spec"] == "LowBitSpec"]
        assert {tuple(view[:3]) for view in plan["views"].values()} == {(plan["blocks"] * own["block"] // 128, 1, 1)}, (
            name
        )
