"""From errors to exit codes: the one place that knows them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from pipetune.core.text import printable
from pipetune.errors import (
    InputError,
    InterruptedStudyError,
    NothingWorksError,
    PipetuneError,
    StudyConflictError,
)

_CODES: tuple[tuple[type[PipetuneError], int], ...] = (
    (InputError, 2),
    (NothingWorksError, 3),
    (StudyConflictError, 4),
)


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what pipetune raises into a message on standard error and the exit code of the contract."""
    try:
        yield
    except InterruptedStudyError as error:
        print(printable(f"pipetune: {error}"), file=sys.stderr)
        raise SystemExit(128 + error.signal_number) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except PipetuneError as error:
        print(printable(f"pipetune: {error}"), file=sys.stderr)
        code = next((code for kind, code in _CODES if isinstance(error, kind)), 1)
        raise SystemExit(code) from None
