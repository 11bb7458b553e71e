import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from builders import failure

from pipetune.core.measurement import FailureKind, Phase
from pipetune.trial.guards import classify_error, classify_exit, describe_exit

KIND = FailureKind

# What torch, CUDA and the kernel say, word for word.
MESSAGES = [
    (KIND.GPU_OUT_OF_MEMORY, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"),
    (KIND.GPU_OUT_OF_MEMORY, "RuntimeError", "CUDA out of memory."),
    (KIND.GPU_OUT_OF_MEMORY, "RuntimeError", "CUDA error: out of memory\nCUDA kernel errors might be reported later"),
    (KIND.GPU_OUT_OF_MEMORY, "AcceleratorError", "CUDA error: out of memory"),
    (KIND.GPU_OUT_OF_MEMORY, "RuntimeError", "CUDA driver error: out of memory"),
    (KIND.GPU_OUT_OF_MEMORY, "RuntimeError", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    (KIND.GPU_OUT_OF_MEMORY, "RuntimeError", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    (
        KIND.GPU_OUT_OF_MEMORY,
        "RuntimeError",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ),
    (KIND.GPU_OUT_OF_MEMORY, "OutOfMemoryError", "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has"),
    (
        KIND.GPU_OUT_OF_MEMORY,
        "RuntimeError",
        "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ),
    (KIND.GPU_OUT_OF_MEMORY, "OutOfMemoryError", "HIP out of memory. Tried to allocate 20.00 MiB"),
    (
        KIND.HOST_OUT_OF_MEMORY,
        "RuntimeError",
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
    ),
    (KIND.HOST_OUT_OF_MEMORY, "MemoryError", ""),
    (KIND.HOST_OUT_OF_MEMORY, "_ArrayMemoryError", "Unable to allocate 7.45 GiB for an array with shape (1000000000,)"),
    (
        KIND.HOST_OUT_OF_MEMORY,
        "MemoryError",
        "Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\nMemoryError",
    ),
    (KIND.HOST_OUT_OF_MEMORY, "OSError", "[Errno 12] Cannot allocate memory"),
    (KIND.HOST_OUT_OF_MEMORY, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed. "),
    # Pinning asks the host for memory, and CUDA answers in the words that it has for its own.
    (
        KIND.HOST_OUT_OF_MEMORY,
        "RuntimeError",
        "Caught RuntimeError in pin memory thread for device 0.\nOriginal\nRuntimeError: CUDA error: out of memory",
    ),
    (
        KIND.SHARED_MEMORY,
        "RuntimeError",
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of",
    ),
    (
        KIND.SHARED_MEMORY,
        "RuntimeError",
        "unable to write to file </torch_12_34_0>: No space left on device (28)",
    ),
    (
        KIND.SHARED_MEMORY,
        "RuntimeError",
        "unable to allocate shared memory(shm) for file </torch_12_34_0>: No space left on device (28)",
    ),
    (
        KIND.SHARED_MEMORY,
        "RuntimeError",
        "unable to resize file </torch_12_34_0> to the right size: No space left on device (28)",
    ),
    (KIND.TIMEOUT, "RuntimeError", "DataLoader timed out after 30 seconds"),
    (KIND.CRASH, "RuntimeError", "DataLoader worker (pid 7) is killed by signal: Segmentation fault. "),
    (KIND.CRASH, "RuntimeError", "DataLoader worker (pid(s) 7, 8) exited unexpectedly"),
    (
        KIND.CRASH,
        "RuntimeError",
        "DataLoader worker (pid 7) exited unexpectedly with exit code 3. Details are lost due to multiprocessing.",
    ),
    # Too large, but not for the memory: a smaller batch must not be tried in silence.
    (KIND.ERROR, "RuntimeError", "CUDA error: invalid configuration argument"),
    (KIND.ERROR, "RuntimeError", "CUDA error: device-side assert triggered"),
    (KIND.ERROR, "ValueError", "sample 37: truncated JPEG"),
    (KIND.ERROR, "OSError", "[Errno 28] No space left on device: '/data/cache/7.npy'"),
    (
        KIND.ERROR,
        "RuntimeError",
        "unable to open shared memory object </torch_12_34_0> in read-write mode: Too many open files (24)",
    ),
]

IN_A_WORKER = """Caught an error in DataLoader worker process 1.
Original Traceback (most recent call last):
  File "job.py", line 9, in __getitem__
    raise error
"""


@pytest.mark.parametrize(("kind", "type_name", "message"), MESSAGES, ids=lambda value: str(value)[:60])
def test_an_error_gets_its_kind(kind, type_name, message):
    assert classify_error(type_name, message) is kind


@pytest.mark.parametrize(
    "ask",
    [lambda: torch.empty(2**60), lambda: np.empty(2**50), lambda: bytearray(2**60)],
    ids=["torch", "numpy", "python"],
)
def test_a_host_without_memory_is_known_by_what_it_really_says(ask):
    with pytest.raises((MemoryError, RuntimeError)) as error:
        ask()
    assert classify_error(type(error.value).__name__, str(error.value)) is KIND.HOST_OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("return_code", "log_tail", "kind"),
    [
        (-signal.SIGKILL, "", KIND.HOST_OUT_OF_MEMORY),
        (-signal.SIGBUS, "", KIND.SHARED_MEMORY),
        (-signal.SIGSEGV, "", KIND.CRASH),
        (-signal.SIGTERM, "", KIND.CRASH),
        (-signal.SIGABRT, "", KIND.CRASH),
        (-signal.SIGABRT, "terminate called after throwing an instance of 'std::bad_alloc'", KIND.HOST_OUT_OF_MEMORY),
        (-signal.SIGABRT, "terminate called ... CUDA error: device-side assert triggered", KIND.CRASH),
        (-40, "", KIND.CRASH),
        (0, "", KIND.CRASH),
        (1, "Traceback ...\nZeroDivisionError: division by zero", KIND.CRASH),
        (1, "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB", KIND.GPU_OUT_OF_MEMORY),
        (1, "DataLoader worker (pid 7) is killed by signal: Bus error.", KIND.SHARED_MEMORY),
    ],
)
def test_an_exit_without_an_answer_gets_its_kind(return_code, log_tail, kind):
    assert classify_exit(return_code, log_tail) is kind


@pytest.mark.parametrize(
    ("return_code", "words"),
    [
        (-signal.SIGSEGV, "the trial process was ended by SIGSEGV"),
        (-40, "the trial process was ended by signal 40"),
        (3, "the trial process exited with code 3 before it answered"),
    ],
)
def test_an_exit_is_described_in_words(return_code, words):
    assert describe_exit(return_code) == words


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("ValueError: sample 37: bad\nsecond line", "ValueError: sample 37: bad"),
        (f"ValueError: {IN_A_WORKER}ValueError: sample 37: bad\n", "ValueError: sample 37: bad"),
        ("", "no message"),
    ],
)
def test_a_headline_is_the_users_error(message, line):
    told = failure(kind=KIND.ERROR, phase=Phase.WARM_UP, message=message).headline()
    assert told == f"error in warm_up: {line}"


def test_a_headline_skips_what_comes_after_the_error():
    """An error of several lines ends in a remark, not in what went wrong."""
    error = (
        "RuntimeError: CUDA error: initialization error\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.\n\n"
    )
    told = failure(kind=KIND.ERROR, phase=Phase.WARM_UP, message=f"RuntimeError: {IN_A_WORKER}{error}").headline()
    assert told == "error in warm_up: RuntimeError: CUDA error: initialization error"


CHILD_OF_A_DOOMED_PARENT = """
import os, signal, subprocess, sys, time
from pipetune.trial.guards import WorkerInit
init = WorkerInit(lambda worker_id: print(os.getpid(), worker_id, flush=True))
if os.fork() == 0:
    init(3)
    time.sleep(60)
time.sleep(60)
"""


def test_a_worker_runs_the_users_init_and_dies_with_its_host():
    host = subprocess.Popen([sys.executable, "-c", CHILD_OF_A_DOOMED_PARENT], stdout=subprocess.PIPE)
    with host:
        pid, worker_id = map(int, host.stdout.readline().split())
        assert worker_id == 3
        worker = psutil.Process(pid)
        os.kill(host.pid, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while _is_alive(worker) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not _is_alive(worker)


def _is_alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
