"""Every error that pipetune raises on purpose: what is wrong, where, and what to do."""

from collections.abc import Sequence


class PipetuneError(Exception):
    """Anything that pipetune reports instead of a result."""


class InputError(PipetuneError):
    """What the user gave cannot be used; the message names it and the remedy."""


MAX_PROBLEMS_TOLD = 50


class ConfigError(InputError):
    """A file has one or more problems, all listed together; of a hopeless file the first MAX_PROBLEMS_TOLD."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        told = [f"  {problem}" for problem in self.problems[:MAX_PROBLEMS_TOLD]]
        more = len(self.problems) - len(told)
        super().__init__("\n".join([f"{source}: {count}", *told, *([f"  ... and {more} more"] if more else [])]))


class WorkloadError(InputError):
    """The user's own code failed before anything could be tuned; carries its traceback as text."""

    def __init__(self, message: str, traceback_text: str = "") -> None:
        self.traceback_text = traceback_text
        super().__init__(f"{message}\n\n{traceback_text.rstrip()}" if traceback_text else message)


class NothingWorksError(PipetuneError):
    """No configuration ran to its end; no file is written."""


class StudyConflictError(PipetuneError):
    """The study folder is locked, or holds a study of something else."""


class InterruptedStudyError(PipetuneError):
    """A signal ended the study; the best so far is in a provisional file."""

    def __init__(self, message: str, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(message)
