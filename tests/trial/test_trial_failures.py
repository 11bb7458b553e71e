"""Trials that go wrong: each ends as a named kind, leaves no process, and does not harm the next."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from trial_kit import QUICK, config, family, host_pids, hosts, left_after

import pipetune
from pipetune.core.measurement import FailureKind, Measurement, Phase, TrialFailure
from pipetune.core.space import Amp, TrialConfig
from pipetune.errors import WorkloadError
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import TrialTimeouts

# A workload that misbehaves as the file `fault` beside it says; it is sound while there is none.
JOB = """
FAULT = HERE / "fault"

def fault():
    return FAULT.read_text() if FAULT.exists() else ""

class Corrupt(Exception):
    def __init__(self, index, why):
        super().__init__(f"sample {index}: {why}")

class Faulty(Rows):
    def __getitem__(self, index):
        name = fault()
        if name.startswith("sample") and index >= 64:
            os.write(1, f"the sample prints {name}\\n".encode())  # in one piece: the other worker prints too
            if name == "sample raises its own":
                raise Corrupt(100, "truncated JPEG")
            if name == "sample names no utf-8":
                raise ValueError("cannot read photo-\\udce9.jpg")
            if name == "sample exits":
                os._exit(3)
            if name == "sample is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if name == "sample bus error":
                os.kill(os.getpid(), signal.SIGBUS)
            if name == "sample hangs":
                time.sleep(10**6)
        return super().__getitem__(index)

def init(worker_id):
    if fault() == "init hangs":
        time.sleep(10**6)

def collate(items):
    if fault() == "collate hangs":
        time.sleep(10**6)
    return torch.utils.data.default_collate(items)

def train_step(model, batch, optimizer, step):
    name = fault()
    if name.startswith("step"):
        print(f"the step prints {name}", flush=True)
    if name == "step raises":
        raise RuntimeError("shapes do not match")
    if name == "step leaves python":
        sys.exit("enough")
    if name == "step is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "step is killed once":
        FAULT.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "step segfaults":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "step hangs":
        time.sleep(10**6)
    if name == "step closes the way back":
        os.close(int(sys.argv[1]))
    with step.autocast():
        value = loss(model, batch)
        if name == "step overflows":  # finite, but without a finite gradient
            value = (model[0](batch[0]) * 0).abs().sqrt().mean()
    if name == "step gives nan":
        value = value * float("nan")
    step.backward(value)
    if name == "step never updates":
        return
    step.update()

def build():
    return workload(
        dataset=Faulty(), train_step=train_step, shuffle=False, worker_init_fn=init, collate_fn=collate, drop_last=True
    )
"""

KIND = FailureKind
RUNNING = {Phase.WORKER_START, Phase.WARM_UP, Phase.MEASURE}
START = {Phase.WORKER_START}
STEP = {Phase.WARM_UP}
END = {Phase.MEASURE}
STALL_S = 2


class Fault(NamedTuple):
    name: str
    trial: TrialConfig
    kind: FailureKind
    phases: set[Phase]
    words: str  # a regular expression


SERIAL, FORKED = config(0), config(2)
FAULTS = [
    Fault("sample raises its own", FORKED, KIND.ERROR, RUNNING, "sample 100: truncated JPEG"),
    Fault("sample names no utf-8", SERIAL, KIND.ERROR, RUNNING, "cannot read photo-"),
    Fault("sample exits", FORKED, KIND.CRASH, RUNNING, "worker exited with code 3"),
    Fault("sample is killed", FORKED, KIND.HOST_OUT_OF_MEMORY, RUNNING, "signal: Killed|SIGKILL"),
    Fault("sample bus error", FORKED, KIND.SHARED_MEMORY, RUNNING, "signal: Bus error|SIGBUS"),
    Fault("sample hangs", FORKED, KIND.TIMEOUT, RUNNING, "try multiprocessing_context='spawn'"),
    Fault("sample hangs", SERIAL, KIND.TIMEOUT, RUNNING, "a sample that never returns"),
    Fault("collate hangs", FORKED, KIND.TIMEOUT, START, "without a sign of life"),
    Fault("init hangs", FORKED, KIND.TIMEOUT, START, "without a sign of life"),
    Fault("step raises", SERIAL, KIND.ERROR, STEP, "RuntimeError: shapes do not match"),
    Fault("step leaves python", SERIAL, KIND.ERROR, STEP, "SystemExit: enough"),
    Fault("step is killed", FORKED, KIND.HOST_OUT_OF_MEMORY, STEP, "ended by SIGKILL"),
    Fault("step segfaults", FORKED, KIND.CRASH, STEP, "ended by SIGSEGV"),
    Fault("step closes the way back", SERIAL, KIND.CRASH, STEP, "exited with code 1"),
    Fault("step gives nan", SERIAL, KIND.NON_FINITE, END, "NaN or infinite"),
    # The scaler skips every update, so the loss stays finite, the weights stay as they are, and the trial looks fast.
    Fault("step overflows", config(0, amp=Amp.FP16), KIND.NON_FINITE, END, "gradients overflowed"),
    Fault("step never updates", SERIAL, KIND.INVALID_DATA, END, r"step\.update\(\)"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faulty")


@pytest.fixture(scope="module")
def runner(folder):
    with hosts(folder, JOB, timeouts=TrialTimeouts(set_up_s=60, stall_s=STALL_S, total_s=60)) as runner:
        yield runner


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}, {fault.trial.label()}")
def test_a_fault_has_a_name_and_ends_with_its_trial(runner, begin, fault):
    # GIVEN a workload that is going to fail, and perhaps hosts that have worked well with it
    before, opened = host_pids(runner), _open_files()
    begin(fault.name)
    # WHEN it does
    outcome = runner.run(fault.trial, QUICK)
    # THEN the failure tells what, where and what was printed last
    assert isinstance(outcome, TrialFailure)
    assert (outcome.config, outcome.kind) == (fault.trial, fault.kind), outcome
    assert outcome.phase in fault.phases
    assert re.search(fault.words, outcome.message + outcome.traceback_text)
    # What torch prints of workers that are killed together may fill the tail.
    if fault.name.startswith(("sample", "step")) and fault.kind not in {KIND.SHARED_MEMORY, KIND.HOST_OUT_OF_MEMORY}:
        assert f"prints {fault.name}" in outcome.log_tail
    # AND it points at the user's code
    if fault.kind is KIND.ERROR:
        first, *_ = [line for line in outcome.traceback_text.splitlines() if line.strip().startswith("File")]
        assert str(Path(pipetune.__file__).parent) not in first
        assert "job.py" in outcome.traceback_text
        assert re.search(fault.words, outcome.headline())
    # AND it came in time
    least_s = STALL_S if fault.kind is KIND.TIMEOUT else 0
    assert least_s < outcome.seconds < least_s + 10
    # AND no process of its host is left, while the other host still waits
    kept = host_pids(runner)
    assert set(kept) <= set(before)
    assert (fault.trial.num_workers == 0) not in runner._hosts
    for pid in set(before) - set(kept):
        assert left_after(2, lambda pid=pid: family(pid)) == []
    # AND the next trial is sound
    begin("")
    assert isinstance(runner.run(config(fault.trial.num_workers), QUICK), Measurement)
    if len(host_pids(runner)) == len(before):
        assert len(_open_files()) == len(opened)


def test_memory_that_a_neighbour_took_for_a_moment_bars_nothing(runner, begin):
    # GIVEN a host that is killed as if memory had run out, and is not when the trial is repeated
    begin("step is killed once")
    assert isinstance(runner.run(FORKED, QUICK), Measurement)


def test_the_whole_trial_has_a_limit_too(tmp_path):
    """Signs of life do not extend it."""
    limit = TrialTimeouts(set_up_s=60, stall_s=3, total_s=1)
    with hosts(tmp_path, "build = workload", timeouts=limit) as runner:
        outcome = runner.run(SERIAL, MeasureLimits(min_s=5, max_s=5, window_s=0.05, warm_up_s=0.05))
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind is KIND.TIMEOUT
    assert outcome.seconds < 3


STORE = """
class Store(Rows):
    queues = None

    def __getitem__(self, index):
        if Store.queues is None:
            Store.queues = asked, answered = queue.Queue(), queue.Queue()
            def serve():
                while True:
                    answered.put(asked.get())
            threading.Thread(target=serve, daemon=True).start()
        asked, answered = Store.queues
        asked.put(index)
        answered.get(timeout=20)  # blocks in a process that was forked after the first use
        return super().__getitem__(index)

def build():
    return workload(dataset=Store(), multiprocessing_context="fork")
"""


def test_the_forking_host_has_not_touched_the_dataset(tmp_path):
    with hosts(tmp_path, STORE, timeouts=TrialTimeouts(set_up_s=60, stall_s=5, total_s=60)) as runner:
        assert runner.describe().dataset_samples == 256
        for trial in (SERIAL, FORKED, config(1)):
            assert isinstance(runner.run(trial, QUICK), Measurement)


def test_a_first_sample_that_hangs_is_ended(tmp_path):
    code = "def build():\n    print('building', flush=True)\n    return workload(dataset=Rows(sleep_s=10**6))"
    with hosts(tmp_path, code, timeouts=TrialTimeouts(set_up_s=5)) as runner:
        with pytest.raises(WorkloadError, match=r"was not built within 5 s \(still in first_sample\)") as error:
            runner.describe()
        assert "building" in str(error.value)
        assert host_pids(runner) == []


def _open_files():
    """What this process holds open, and the folder that is listed."""
    return list(Path("/proc/self/fd").iterdir())
