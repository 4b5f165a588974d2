"""`kvconvert eval --task`: problems whose answers can be checked, solved by a source and its bundle.

`problems` reads them and says how they are asked and checked, and `solving` lets models answer and compares.
"""

from __future__ import annotations

from kvconvert.fidelity.tasks.problems import TASKS
from kvconvert.fidelity.tasks.solving import TaskReport, solve

__all__ = ["TASKS", "TaskReport", "solve"]
