"""One call at a time in a thread beside the caller's own work."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType


class Aside:
    """Runs calls one after another; a block of `with` ends when the last has.

    An exception of a call is raised by whatever waits for it, unless the block ends with one of its own.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def begin(self, call: Callable[[], None]) -> None:
        """Run a call in a thread, after the one before."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(call,))
        self._thread.start()

    def wait(self) -> None:
        """Return when nothing runs any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # raised where it is waited for
            self._error = error

    def __enter__(self) -> Aside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self._thread is not None:
            self._thread.join()
