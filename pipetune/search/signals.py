"""SIGINT and SIGTERM as an orderly end: they break into a waiting trial, never into a write to the storage."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pipetune.errors import InterruptedStudyError

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Catches the signals while a study runs; outside of the main thread it does nothing."""

    def __init__(self) -> None:
        self._received: int | None = None
        self._may_raise = False
        self._previous: dict[int, Any] = {}

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle the signals inside, and put the former handlers back."""
        if threading.current_thread() is threading.main_thread():
            for caught in _CAUGHT:
                if signal.getsignal(caught) is signal.SIG_IGN:  # nohup asked for that
                    continue
                self._previous[caught] = signal.signal(caught, self._on_signal)
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """A signal raises InterruptedStudyError inside, at once; one that came before raises on entry."""
        self._may_raise = True
        try:
            self._raise_if_received()
            yield
        finally:
            self._may_raise = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - signal's own signature
        self._received = self._received or number
        if self._may_raise:
            self._may_raise = False
            self._raise_if_received()

    def _raise_if_received(self) -> None:
        if self._received is not None:
            name = signal.Signals(self._received).name
            raise InterruptedStudyError(f"interrupted by {name}", self._received)
