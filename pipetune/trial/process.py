"""One trial host as the parent sees it: started, spoken to, and ended with everything it started."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from pipetune.trial.protocol import Event, PhaseEvent, Request, decode_event, encode

HOST_MARK = "PIPETUNE_TRIAL_HOST"
"""Set in the environment of hosts, so that user code which starts a study can be told apart."""
TAIL_BYTES = 4000
CLOSE_S = 3.0
"""How long a host may take to end by itself before its group is killed."""


class HostDiedError(Exception):
    """The host ended without an answer; `return_code` as subprocess gives it (negative for signals)."""

    def __init__(self, return_code: int) -> None:
        self.return_code = return_code
        super().__init__(f"return code {return_code}")


class HostProcess:
    """A process group of its own: a signal to the terminal does not reach it, and it is ended as a whole.

    Never a daemon: a daemon cannot have loader workers, and 0 workers would win by default.
    """

    def __init__(self, log_file: Path) -> None:
        self.log_file = log_file
        log_file.parent.mkdir(parents=True, exist_ok=True)
        self._reply_fd, child_fd = os.pipe()
        os.set_blocking(self._reply_fd, False)
        self._unread = b""
        self._owes_answer = False
        self._log: IO[bytes] = log_file.open("wb")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module in our own interpreter
                # -P: a file of the user's in the working folder must not take the place of a library.
                [sys.executable, "-P", "-m", "pipetune.trial.entry", str(child_fd), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(child_fd,),
                start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1", HOST_MARK: "1"},
            )
        finally:
            os.close(child_fd)

    @property
    def pid(self) -> int:
        """Process id, and id of its group."""
        return self._process.pid

    def send(self, request: Request) -> None:
        """Raises HostDiedError where it is gone."""
        self._owes_answer = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(request))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise HostDiedError(self._wait_for_code()) from None

    def receive(self, timeout_s: float) -> Event | None:
        """The next event, or None when none came in time. Raises HostDiedError where it is gone."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._next_unread()
            if event is not None:
                return event
            readable, _, _ = select.select([self._reply_fd], [], [], max(0.0, deadline - time.monotonic()))
            if readable:
                self._read_more()
            elif self.has_ended():
                # A worker that outlives the host keeps the pipe open, so its end alone does not tell.
                raise HostDiedError(self._wait_for_code())
            if time.monotonic() >= deadline:  # also where the user's code fills the pipe without an end
                return self._next_unread()

    def log_tail(self) -> str:
        """The end of what the host and its workers printed."""
        try:
            size = self.log_file.stat().st_size
            with self.log_file.open("rb") as file:
                file.seek(max(0, size - TAIL_BYTES))
                return file.read().decode(errors="replace")
        except OSError:
            return ""

    def close(self) -> None:
        """Let an idle host end by itself, then end whatever is left of its group; a busy one ends at once."""
        if self._owes_answer:
            self.kill()
            return
        self._end_requests()
        deadline = time.monotonic() + CLOSE_S
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """End the whole group at once. The leader is reaped last, so that its number cannot be another's."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._end_requests()
        if self._reply_fd >= 0:
            os.close(self._reply_fd)
            self._reply_fd = -1
        self._log.close()

    def _end_requests(self) -> None:
        """Close the host's standard input; doing it twice does nothing."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _next_unread(self) -> Event | None:
        while b"\n" in self._unread:
            line, _, self._unread = self._unread.partition(b"\n")
            event = decode_event(line)
            if event is not None:
                self._owes_answer = isinstance(event, PhaseEvent)
                return event
        return None

    def _read_more(self) -> None:
        data = os.read(self._reply_fd, 1 << 16)
        if not data:
            raise HostDiedError(self._wait_for_code())
        self._unread += data

    def has_ended(self) -> bool:
        """Whether the host itself is gone; what it started may still be there."""
        return self._end() is not None

    def _end(self) -> os.waitid_result | None:
        """How the host ended; None while it runs."""
        # WNOWAIT leaves it unreaped: its process group keeps its number until we have ended the group.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def _wait_for_code(self) -> int:
        deadline = time.monotonic() + CLOSE_S
        while (ended := self._end()) is None and time.monotonic() < deadline:
            time.sleep(0.01)
        if ended is None:
            return 0
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
