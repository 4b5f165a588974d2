"""Single-token passes that are planned for whole groups before any layer runs, as captured steps need them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager

import torch

from kvconvert.runtime.cache.compress import compress, read_flags, seal
from kvconvert.runtime.cache.forward_pass import Chunk, ForwardPass
from kvconvert.runtime.cache.group_tables import GroupTables
from kvconvert.runtime.cache.registry import runs_steps
from kvconvert.runtime.cache.sequence import Sequence
from kvconvert.runtime.cache.store import Group

# All new tokens are real, and layers bring their own mask functions.
_STEP = Chunk(torch.zeros(1, dtype=torch.int64))


class PlannedStep:
    """A pass of one new token in every occupied row of a cache.

    Planning stores nothing yet: `launches()` is the context in which a model runs its layers, which then launch
    kernels over the tables and do no bookkeeping. It may be entered any number of times, or replaced by the replay of a
    recording; every run writes the same numbers to the same places. `finish()` ends the pass.

    Args:
        groups: of all the cache's layers; `runs_steps` accepts each.

    Attributes:
        continues: whether it is like the step before it, so that nothing is planned: every occupied row has got one
            token more, and room for it.
        tables: of each group.

    Raises:
        CacheError: what is stored has become unusable, or an open prompt cannot be sealed for want of pages.
        NumericError: an open prompt holds numbers that cannot be stored.
    """

    def __init__(self, groups: list[Group]):
        self.groups = groups
        self._before: list[tuple[tuple[Sequence, ...], ForwardPass | None, int]] = []
        self.continues = all(_continues(group) for group in groups)
        if self.continues:
            self.tables = [group.tables for group in groups]
            for group, tables in zip(groups, self.tables, strict=True):
                group.logical += 1
                group.waiting += 1
                tables.advance()
            return
        for group in groups:
            read_flags(group, wait=False)
            seal(group)
            if group.keep_for_sharing and group.forward_pass is not None:
                compress(group, seal=False)
        self.tables: list[GroupTables] = []
        for group in groups:
            self._before.append((group.sequences, group.forward_pass, group.passes))
            latest = group.begin(1)
            group.append(latest, _STEP, check=False)
            self.tables.append(group.registry.prepare_step(group, latest))

    def key(self) -> Hashable:
        """What a recording of the pass's kernels depends on: the tables, and how much work they have room for."""
        return tuple(
            (id(tables), tables.work_key(group, self.continues))
            for group, tables in zip(self.groups, self.tables, strict=True)
        )

    @contextmanager
    def launches(self) -> Iterator[None]:
        """Within the context layers launch kernels and do nothing else."""
        stores = [store for group in self.groups for store in group.stores]
        passes = [store.forward_pass for store in stores]
        try:
            for group, tables in zip(self.groups, self.tables, strict=True):
                tables.spread_step()
                first = group.logical - 1
                group.rehearsal = ForwardPass(first, 1, _STEP, appended=group.sequences, step_tables=tables)
            yield
        finally:
            for group in self.groups:
                group.rehearsal = None
            for store, forward_pass in zip(stores, passes, strict=True):
                store.forward_pass, store.pending = forward_pass, None

    def abandon(self) -> None:
        """Undo the plan of a pass whose kernels did not run: its tokens were never stored."""
        for index, group in enumerate(self.groups):
            group.logical -= 1
            if self.continues:
                # Sequences may have been asked for since, and know of the token then.
                group.drop_newest()
            else:
                sequences, group.forward_pass, group.passes = self._before[index]
                group.sequences = sequences
                for store in group.stores:
                    store.sequences = sequences
            group.touch()

    def finish(self) -> None:
        """Count the tokens as stored and compress what is complete.

        Raises:
            CacheError: the pages have a fixed capacity and no room left.
            NumericError: a page holds numbers that cannot be stored.
        """
        if self.continues:
            for group in self.groups:
                group.attended = group.logical
            return
        for group in self.groups:
            latest = group.forward_pass
            for store in group.stores:
                store.forward_pass = store.ended = latest
                store.passes, store.sequences = group.passes, latest.appended
            latest.ended = len(group.stores)
            group.attended = latest.start + 1
            if not group.keep_for_sharing:
                compress(group, seal=False)


def _continues(group: Group) -> bool:
    """Whether a step is like the group's step before it."""
    tables = group.tables
    return (
        tables is not None
        and tables.steps_left > 0
        and tables.belongs_to(group)
        and not group.changed
        and group.changed is not None
        and group.error is None
        and not group.keep_for_sharing
    )


def can_plan_steps(groups: list[Group]) -> bool:
    """Whether kernels can follow the tables of all groups."""
    return bool(groups) and all(group.rows and runs_steps(group) for group in groups)
