"""What went wrong, decided from texts and exit codes; and the promise that no process outlives its parent."""

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Callable

from pipetune.core.measurement import FailureKind

_PR_SET_PDEATHSIG = 1

# Lower-case fragments of messages; the first list that matches decides. From torch, CUDA, cuDNN and cuBLAS.
_TEXTS: tuple[tuple[FailureKind, tuple[str, ...]], ...] = (
    (
        FailureKind.SHARED_MEMORY,
        (
            "insufficient shared memory",
            "bus error",
            "unable to write to file </torch_",
            "unable to resize file </torch_",
            "unable to allocate shared memory",
            "shm_open",
            "no space left on device: '/dev/shm",
        ),
    ),
    (
        FailureKind.GPU_OUT_OF_MEMORY,
        (
            "cuda out of memory",
            "cuda error: out of memory",
            "cublas_status_alloc_failed",
            "cudnn_status_alloc_failed",
            "cudnn_status_not_initialized",
            "hip out of memory",
            "xpu out of memory",
            "cuda driver error: out of memory",
            "ur_result_error_out_of_device_memory",
        ),
    ),
    (
        FailureKind.HOST_OUT_OF_MEMORY,
        (
            "defaultcpuallocator",
            "cannot allocate memory",
            "unable to allocate",
            "std::bad_alloc",
            "cuda error: out of host memory",
            "failed to pin memory",
            "cudahostalloc",
        ),
    ),
    (FailureKind.TIMEOUT, ("dataloader timed out after",)),
)

_DEADLY_SIGNALS = {signal.SIGBUS: FailureKind.SHARED_MEMORY, signal.SIGKILL: FailureKind.HOST_OUT_OF_MEMORY}


def classify_error(type_name: str, message: str) -> FailureKind:
    """Kind of an exception from its type's name and text."""
    text = message.lower()
    if "in pin memory thread" in text and "out of memory" in text:
        # Pinning asks the host for memory, and CUDA refuses it in the words that it has for its own.
        return FailureKind.HOST_OUT_OF_MEMORY
    if type_name == "OutOfMemoryError":
        return FailureKind.GPU_OUT_OF_MEMORY
    for kind, fragments in _TEXTS:
        if any(fragment in text for fragment in fragments):
            return kind
    if type_name == "MemoryError":
        return FailureKind.HOST_OUT_OF_MEMORY
    if "dataloader worker" in text and ("exited unexpectedly" in text or "killed by signal" in text):
        return _killed_worker(text)
    return FailureKind.ERROR


def classify_exit(return_code: int, log_tail: str) -> FailureKind:
    """Kind of a host that ended without an answer: from its signal, else from what it printed last.

    SIGKILL that we did not send is the kernel's answer to a full memory; SIGBUS a full shared memory.
    """
    if return_code < 0 and -return_code in _DEADLY_SIGNALS:
        return _DEADLY_SIGNALS[signal.Signals(-return_code)]
    from_log = classify_error("", log_tail)
    return from_log if from_log.is_memory else FailureKind.CRASH


def describe_exit(return_code: int) -> str:
    """`the trial process was ended by SIGSEGV` or `... exited with code 3`."""
    if return_code < 0:
        return f"the trial process was ended by {signal_name(-return_code)}"
    return f"the trial process exited with code {return_code} before it answered"


def signal_name(number: int) -> str:
    """`SIGSEGV`, or `signal 40` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when the thread of `parent` that started it ends (Linux only)."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)


def die_with(process: int) -> None:
    """Kill this process when `process` ends, whoever started it (Linux only).

    The kernel's signal serves where it is the parent. A worker of a fork server has the server for a parent, so
    there a thread waits; it starts before any of the user's code runs, and workers do not fork.
    """
    if not sys.platform.startswith("linux"):
        return
    if os.getppid() == process:
        die_with_parent(process)
        return
    try:
        watched = os.pidfd_open(process)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_die_after, args=(watched,), daemon=True).start()


def _die_after(watched: int) -> None:
    select.select([watched], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


class WorkerInit:
    """A worker_init_fn that ties the worker to its host, then runs the user's own."""

    def __init__(self, user_function: Callable[[int], None] | None) -> None:
        self.user_function = user_function
        self._host = os.getpid()

    def __call__(self, worker_id: int) -> None:
        """Run once in each new worker."""
        die_with(self._host)
        if self.user_function is not None:
            self.user_function(worker_id)


def _killed_worker(text: str) -> FailureKind:
    if "signal: killed" in text or "sigkill" in text:
        return FailureKind.HOST_OUT_OF_MEMORY
    return FailureKind.CRASH
