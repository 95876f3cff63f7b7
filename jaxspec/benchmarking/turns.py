"""Processes that measure on one device: they compile side by side, and time one after another."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

POLL_SECONDS = 0.05


@dataclasses.dataclass(frozen=True)
class Turns:
    """Advisory locks of a file that all processes name; without one, nothing waits.

    Attributes:
      file: made when it is missing, and another one beside it.
      latest: a reading of `time.perf_counter` from which on `alone` waits no longer.
    """

    file: Path | None = None
    latest: float | None = None

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """For work that others of its kind may run beside, but no timing."""
        if self.file is None:
            yield
            return
        with self.file.open("a") as busy:
            fcntl.flock(busy, fcntl.LOCK_SH)
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """For a timing: nothing else runs meanwhile, neither another timing nor what runs `together`.

        Raises TimeoutError where the others have not ended by `latest`.
        """
        if self.file is None:
            yield
            return
        with self.file.with_suffix(".turn").open("a") as turn, self.file.open("a") as busy:
            self._wait(turn)
            self._wait(busy)
            yield
        time.sleep(POLL_SECONDS)  # the next one takes its turn

    def _wait(self, lock: IO) -> None:
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if self.latest is not None and time.perf_counter() > self.latest:
                    raise TimeoutError(f"others still run: {lock.name}") from None
                time.sleep(POLL_SECONDS / 4)
