"""Kernels compiled ahead of time: nothing spills, everything fits, and figures are those of the committed table, if
that is of the same compiler.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch
from aot import covering, read_json
from aot_compile import groups
from aot_sass import find_loops, main_loop, parse
from compiled_toys import spilling_kernel

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "benchmarks" / "results" / "aot.json"
REGENERATE = "python benchmarks/aot.py --full --json benchmarks/results/aot.json"
FIGURES = ("registers", "stack", "local", "shared", "instructions", "loop", "matrix", "wide", "per_code")


def compiled(output: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Run the tool in a process of its own: here, the interpreter may stand in for the compiler."""
    command = [sys.executable, str(ROOT / "benchmarks" / "aot.py"), "--json", str(output), "--jobs", "2", *arguments]
    paths = str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    return done, read_json(output)


def differences(fresh: dict, table: dict) -> list[str]:
    """What the table says otherwise: figures are of its versions of Triton and ptxas, variants the same with any."""
    same_compiler = all(fresh[tool] == table[tool] for tool in ("triton", "ptxas"))
    known = {(row["module"], row["name"], row["capability"]): row for row in table["rows"]}
    found = []
    for row in fresh["rows"]:
        place = (row["module"], row["name"], row["capability"])
        if place not in known:
            found.append(f"{place} is not in the table")
            continue
        for figure in FIGURES if same_compiler else ():
            now, then = row[figure], known[place][figure]
            if now != then:
                found.append(f"{place}: {figure} {now}, {then} in the table")
    return found


def check(done: subprocess.CompletedProcess, fresh: dict) -> None:
    assert done.returncode == 0, done.stdout
    changed = differences(fresh, read_json(TABLE))
    assert not changed, "\n".join([*changed, f"If that is as it should be: {REGENERATE}"])


@pytest.mark.parametrize("group", list(groups([])), ids=lambda group: group.name)
def test_constants_of_a_launch_are_those_of_its_kernel(group):
    for variant in group.variants(90):
        types = variant.function.function.fn.__annotations__
        constants = {name for name in variant.function.arg_names if "constexpr" in types.get(name, "")}
        assert constants == variant.constants.keys(), variant.name


def test_an_argument_that_a_kernel_does_not_have_is_refused(device):
    x = torch.zeros(16, device=device)
    with pytest.raises(KeyError, match="STORED_ROWS"):
        spilling_kernel[(1,)](x, x, SIZE=16, STORED_ROWS=16)
    spilling_kernel[(1,)](x, x, SIZE=16, num_warps=1, enable_fp_fusion=False)


@pytest.mark.full
def test_the_usual_variants_of_decoding_compile_as_the_table_says(tmp_path):
    done, fresh = compiled(tmp_path / "aot.json", "--module", "decode")
    assert 5 < len(fresh["rows"]) < 30
    check(done, fresh)


@pytest.mark.full
def test_a_covering_set_of_variants_compiles_as_the_table_says(tmp_path):
    done, fresh = compiled(tmp_path / "aot.json")
    assert 20 < len(fresh["rows"]) <= 100
    check(done, fresh)


@pytest.mark.full
def test_every_variant_of_the_sweep_compiles_as_the_table_says(tmp_path):
    check(*compiled(tmp_path / "aot.json", "--full"))


@pytest.fixture(scope="module")
def toys(tmp_path_factory) -> dict[tuple[str, int], dict]:
    done, table = compiled(tmp_path_factory.mktemp("toys") / "aot.json", "--module", "compiled_toys", "--full")
    assert done.returncode == 1
    return {(row["name"], row["capability"]): row for row in table["rows"]}


@pytest.mark.full
def test_a_kernel_that_spills_is_reported_unless_it_says_why(toys):
    row = toys["spilling", 90]
    assert row["stack"] > 0
    assert any("spills" in problem for problem in row["problems"])
    assert toys["excused", 90]["stack"] > 0
    assert toys["excused", 90]["problems"] == []
    assert any("main loop access local memory" in problem for problem in toys["too-much", 90]["problems"])


@pytest.mark.full
def test_narrow_loads_and_too_few_wide_ones_are_reported(toys):
    assert any("wide loads" in problem for problem in toys["narrow", 80]["problems"])
    assert toys["wide", 80]["problems"] == []
    assert any("1024 bytes" in problem and "2048" in problem for problem in toys["wide-few", 80]["problems"])


@pytest.mark.full
def test_a_missing_matrix_product_is_reported(toys):
    assert any("matrix" in problem for problem in toys["no-tensor-cores", 90]["problems"])


@pytest.mark.full
def test_shared_memory_is_held_against_the_architecture(toys):
    assert toys["max_capacity", 89]["shared"] > 99 << 10
    assert any("shared memory" in problem for problem in toys["max_capacity", 89]["problems"])
    assert toys["max_capacity", 90]["problems"] == []


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 89, 90, 100])
def test_instructions_per_code_are_those_of_the_loop(toys, capability):
    row = toys["counted", capability]
    # Each count has an addition before it; beside them is only what loads the next number and closes the loop.
    assert 80 <= row["loop"] <= 100
    assert row["per_code"] == row["loop"]
    assert any("instructions per code" in problem for problem in row["problems"])


NESTED = """
kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   IADD3 R0, R0, 0x1, RZ ;
.L_x_2:
        /*0020*/                   LDG.E.128 R4, [R2.64] ;
        /*0030*/               @P1 BRA `(.L_x_4) ;
.L_x_3:
        /*0040*/                   HMMA.16816.F32 R8, R4, R6, R8 ;
        /*0050*/                   NOP ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   BRA.U UP0, `(.L_x_1) ;
        /*0080*/                   EXIT ;
.L_x_4:
        /*0090*/                   STL [R1], R4 ;
        /*00a0*/                   BRA `(.L_x_3) ;
.L_x_5:
        /*00b0*/                   BRA `(.L_x_5);
"""


def test_the_main_loop_is_the_inner_one_with_its_blocks_out_of_line():
    listing = parse(NESTED)
    loop = main_loop(listing)
    assert [listing[i].opcode for i in loop.body] == ["LDG.E.128", "BRA", "HMMA.16816.F32", "BRA", "STL", "BRA"]
    assert (loop.count(listing, "is_matrix"), loop.count(listing, "is_wide_load"), loop.count(listing, "is_local")) == (
        1,
        1,
        1,
    )
    # The padding's endless loop cannot be reached.
    assert len(find_loops(listing)) == 2


def test_a_jump_back_into_a_loop_makes_no_loop():
    listing = parse(NESTED)
    heads = {listing[loop.body[0]].labels for loop in find_loops(listing)}
    assert heads == {(".L_x_1",), (".L_x_2",)}


def test_a_covering_set_has_every_pair_and_is_small():
    rows = [{"a": a, "b": b, "c": c, "d": d} for a in range(4) for b in range(4) for c in range(3) for d in range(2)]
    rows.append({"a": 9})
    chosen = covering(rows)
    assert len(chosen) < 24
    assert chosen == covering(rows)
    for first, second in combinations("abcd", 2):
        have = {(rows[i].get(first), rows[i].get(second)) for i in chosen}
        assert {(row[first], row[second]) for row in rows[:-1]} <= have
    assert len(rows) - 1 in chosen


def test_figures_are_compared_with_those_of_the_same_compiler():
    row = {"module": "m", "name": "n", "capability": 90} | dict.fromkeys(FIGURES, 100) | {"per_code": None}
    table = {"triton": "1", "ptxas": "1", "rows": [row]}
    fresh = {"triton": "1", "ptxas": "1", "rows": [row | {"registers": 101}]}
    assert "registers 101, 100" in differences(fresh, table)[0]
    assert differences(fresh | {"triton": "2"}, table) == []
    assert "not in the table" in differences({"triton": "2", "ptxas": "1", "rows": [row | {"name": "new"}]}, table)[0]
