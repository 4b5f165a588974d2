"""Loops of a compiled kernel, found in the listing of NVIDIA's disassembler (`nvdisasm -c`).

A loop is a natural loop of the control flow graph: a branch back to a block that dominates it, and all blocks from
which that branch can be reached without passing the loop's head. Blocks that the assembler moved out of line therefore
count where they belong, and a jump back from one of them makes no loop of its own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_MATRIX = re.compile(r"(HMMA|HGMMA|IMMA|IGMMA|QMMA|QGMMA|DMMA|OMMA|UTC\w*MMA)\b")
# Blocks of memory moved by the copy engines, and loads of 16 bytes per thread, to registers or to shared memory.
_WIDE = re.compile(r"(LDG|LDGSTS|LD)\.(\w+\.)*128\b|(UBLKCP|UTMALDG|UTMACCTL\.PF)\b")
_LOCAL = re.compile(r"(LDL|STL)\b")


@dataclass(frozen=True)
class Instruction:
    """One line of a listing: the labels before it, its predicate ("" if none), opcode with suffixes, and operands."""

    labels: tuple[str, ...]
    predicate: str
    opcode: str
    operands: str

    @property
    def is_matrix(self) -> bool:
        """Whether tensor cores execute it."""
        return bool(_MATRIX.match(self.opcode))

    @property
    def is_wide_load(self) -> bool:
        """Whether it reads global memory 16 bytes per thread, or in bulk."""
        return bool(_WIDE.match(self.opcode))

    @property
    def is_bulk_copy(self) -> bool:
        """Whether a copy engine executes it, for any number of bytes."""
        return self.opcode.startswith("U")

    @property
    def is_local(self) -> bool:
        """Whether it accesses local memory, where spilled registers are."""
        return bool(_LOCAL.match(self.opcode))


@dataclass(frozen=True)
class Loop:
    """A natural loop: indices of its instructions in the listing, in order, without padding."""

    body: tuple[int, ...]

    def count(self, listing: list[Instruction], what: str) -> int:
        """Instructions of the body whose property `what` is true."""
        return sum(getattr(listing[i], what) for i in self.body)


def parse(text: str) -> list[Instruction]:
    """The instructions of a kernel's listing."""
    listing, labels = [], []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels.append(label[1])
        elif found := _INSTRUCTION.match(line):
            listing.append(Instruction(tuple(labels), found[2] or "", found[3], found[4]))
            labels = []
    return listing


def find_loops(listing: list[Instruction]) -> list[Loop]:
    """All natural loops, in the order of their heads; loops with the same head are one."""
    starts = _block_starts(listing)
    block_of = {start: number for number, start in enumerate(starts)}
    ends = [*starts[1:], len(listing)]
    labels = {label: block_of[i] for i, instruction in enumerate(listing) for label in instruction.labels}
    after = [_successors(listing[end - 1], number, labels, len(starts)) for number, end in enumerate(ends)]
    before = defaultdict(set)
    for block, targets in enumerate(after):
        for target in targets:
            before[target].add(block)
    dominators = _dominators(after, before)
    bodies: dict[int, set[int]] = {}
    for block, targets in enumerate(after):
        for head in targets:
            if block in dominators and head in dominators[block]:
                bodies.setdefault(head, {head}).update(_reaching(block, head, before))
    loops = []
    for head in sorted(bodies):
        body = (i for block in sorted(bodies[head]) for i in range(starts[block], ends[block]))
        loops.append(Loop(tuple(i for i in body if listing[i].opcode != "NOP")))
    return loops


def main_loop(listing: list[Instruction]) -> Loop | None:
    """The loop that the kernel's time goes to, None without loops.

    It is the loop with the most matrix instructions, of equal ones the shortest: of nested ones the innermost, of those
    over pages the one without full-precision tokens. A kernel with matrix instructions outside of loops only has none,
    but waits. Without any matrix instruction, it is the loop with the most instructions that contains no other.
    """
    loops = find_loops(listing)
    if not any(instruction.is_matrix for instruction in listing):
        innermost = [loop for loop in loops if not any(set(other.body) < set(loop.body) for other in loops)]
        return max(innermost, key=lambda loop: len(loop.body), default=None)
    most = max((loop.count(listing, "is_matrix") for loop in loops), default=0)
    if not most:
        return None
    best = (loop for loop in loops if loop.count(listing, "is_matrix") == most)
    return min(best, key=lambda loop: (len(loop.body), loop.body[0]))


def _is_jump(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] in ("BRA", "EXIT", "RET", "BRX", "JMP", "KILL")


def _block_starts(listing: list[Instruction]) -> list[int]:
    after_jumps = {i + 1 for i, instruction in enumerate(listing[:-1]) if _is_jump(instruction)}
    return sorted({0} | after_jumps | {i for i, instruction in enumerate(listing) if instruction.labels})


def _successors(last: Instruction, block: int, labels: dict[str, int], blocks: int) -> set[int]:
    """Blocks that can follow one which ends with `last`. Calls return, and therefore do not end a block."""
    follows = {block + 1} if block + 1 < blocks else set()
    if not _is_jump(last):
        return follows
    conditional = last.predicate not in ("", "PT", "UPT") or bool(re.match(r"!?U?P\d", last.operands))
    target = _TARGET.search(last.operands)
    targets = {labels[target[1]]} if last.opcode.startswith("BRA") and target else set()
    return targets | (follows if conditional or last.opcode.startswith("BRA.DIV") else set())


def _dominators(after: list[set[int]], before: dict[int, set[int]]) -> dict[int, set[int]]:
    """For each block that can be reached, the blocks that every way to it passes."""
    reached, waiting = {0}, [0]
    while waiting:
        new = after[waiting.pop()] - reached
        reached |= new
        waiting += new
    order = sorted(reached)
    dominators = {block: set(order) for block in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            common = set.intersection(*(dominators[other] for other in before[block] if other in reached)) | {block}
            if common != dominators[block]:
                dominators[block], changed = common, True
    return dominators


def _reaching(block: int, head: int, before: dict[int, Iterable[int]]) -> set[int]:
    """Blocks from which `block` can be reached without passing `head`, and both of these."""
    found, waiting = {head, block}, [block] if block != head else []
    while waiting:
        new = set(before[waiting.pop()]) - found
        found |= new
        waiting += new
    return found
