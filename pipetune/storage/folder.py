"""The study folder: what lies where, and the lock that keeps two studies out of it."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from pipetune.errors import InputError, StudyConflictError


class StudyFolder:
    """`best.yaml`, the Optuna journal, the trial hosts' logs and the lock of one study."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    @property
    def best_file(self) -> Path:
        """The result."""
        return self.path / "best.yaml"

    @property
    def journal_file(self) -> Path:
        """Optuna's journal."""
        return self.path / "study.journal"

    @property
    def log_folder(self) -> Path:
        """One file a trial host."""
        return self.path / "logs"

    def __enter__(self) -> Self:
        """Make the folder and lock it. Raises StudyConflictError where another process has it."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock_fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise InputError(f"study folder {self.path}: {error.strerror}; choose another with --study-dir") from error
        try:
            # The kernel lets go of it however the process ends.
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock_fd)
            if not isinstance(error, BlockingIOError):
                raise InputError(
                    f"study folder {self.path} cannot be locked ({error.strerror}); choose one on a local disk "
                    "with --study-dir"
                ) from error
            raise StudyConflictError(
                f"study folder {self.path} is in use by another pipetune; wait for it, or choose another "
                "folder with --study-dir"
            ) from None
        # A killed run may have left Optuna's own lock behind; under ours nobody else writes.
        (self.path / f"{self.journal_file.name}.lock").unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the lock."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
