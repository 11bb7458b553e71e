"""Single costs before the trials: what a probe says of a known loader and a known step, and what it leaves behind."""

import gc
import os
import random
import signal
import time
from itertools import chain, repeat
from multiprocessing import active_children
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import psutil
import pytest
import torch
from builders import trial_config
from torch import nn
from torch.utils.data import Dataset, IterableDataset
from trial_kit import QUICK, config, family, host_pids, hosts, left_after, lines

from pipetune.core.measurement import FailureKind, Measurement, Phase, TrialFailure
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp
from pipetune.training.workload import Workload
from pipetune.trial.feed import DataEndedError, Feed
from pipetune.trial.host import Channel, Host
from pipetune.trial.loader import build_loader
from pipetune.trial.probes import one_batch_loader, only_batch, probe_loader, probe_step
from pipetune.trial.protocol import LoaderProbeRequest, MeasureLimits, ProbedEvent, StepProbeRequest, TrialRequest
from pipetune.trial.runner import TrialTimeouts
from pipetune.trial.session import Session

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning",
    "ignore:This process .* is multi-threaded:DeprecationWarning",  # what forking from pytest itself gives, on 3.12
)

CPU = torch.device("cpu")
SAMPLE_S = 0.01
PROBE_S = 0.2
MIB = 2**20


@pytest.fixture(scope="module", autouse=True)
def _quick_steps():
    """On a busy machine threads wait for each other; and each step probe collects garbage, all of pytest's included."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


class Rows(Dataset):
    """Each sample waits."""

    def __init__(self, length=64, sleep_s=0.0):
        self.length, self.sleep_s = length, sleep_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        return torch.full((8,), float(index)), index % 2


class Busy(Rows):
    """Each sample works."""

    def __getitem__(self, index):
        end_s = time.thread_time() + SAMPLE_S
        while time.thread_time() < end_s:
            pass
        return super().__getitem__(index)


class Uneven(Rows):
    """One sample after another waits for 5 ms and for 15 ms."""

    def __getitem__(self, index):
        self.sleep_s = 0.015 if index % 2 else 0.005
        return super().__getitem__(index)


class Heavy(Rows):
    """Holds 64 MiB: from the start, so that workers share it, or in each worker."""

    def __init__(self, *, from_the_start):
        super().__init__()
        self.held = b"x" * (64 * MIB) if from_the_start else None

    def __getitem__(self, index):
        self.held = self.held or b"x" * (64 * MIB)
        return super().__getitem__(index)


class Threads(Rows):
    """Notes how many threads torch has while a sample is made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __getitem__(self, index):
        self.seen.add(torch.get_num_threads())
        return super().__getitem__(index)


class Counted(Rows):
    """Counts the samples that are read in this very process."""

    reads = 0

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


class Numbers(IterableDataset):
    """Six samples for each worker."""

    def __iter__(self):
        return iter([(torch.zeros(8), 0)] * 6)


class Once(Numbers):
    """Can be gone through only once."""

    def __init__(self):
        self.rows = iter([(torch.zeros(8), 0)] * 6)

    def __iter__(self):
        return self.rows


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def cross_entropy(model, batch):
    return nn.functional.cross_entropy(model(batch[0] / 64), batch[1])


def workload(dataset=None, **parts):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 2))
    parts = {"model": model, "optimizer": sgd, "dataset": dataset or Rows(), "loss": cross_entropy} | parts
    return Workload(**parts)


def loader_probe(dataset, num_workers, *, batch_size=4, seconds=PROBE_S, **parts):
    trial = config(num_workers, batch_size=batch_size)
    loader, _ = build_loader(workload(dataset, **parts), trial)
    return probe_loader(Feed(loader), trial, seconds, began=time.monotonic())


def step_probe(trial=None, *, seconds=0.1, **parts):
    batch = (torch.ones(4, 8), torch.zeros(4, dtype=torch.int64))
    session = Session(workload(**parts), CPU, seed=0)
    return probe_step(session, trial or config(0), batch, seconds, lambda: None, began=time.monotonic())


# --- the loader


@pytest.fixture(scope="module")
def waiting():
    """Probes of a loader whose samples wait, by its number of workers."""
    return {workers: loader_probe(Rows(sleep_s=SAMPLE_S), workers) for workers in (0, 1, 3)}


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_come_as_fast_as_workers_make_them(waiting, workers):
    probe = waiting[workers]
    assert probe.batch_s == pytest.approx(4 * SAMPLE_S / max(1, workers), rel=0.25)
    assert probe.batches >= max(2, 2 * workers)
    assert probe.seconds > PROBE_S


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_first_batch_is_made_while_it_is_awaited(waiting, workers):
    assert 4 * SAMPLE_S < waiting[workers].first_batch_s < waiting[workers].seconds - PROBE_S


def test_waiting_is_told_from_working(waiting):
    for workers in (0, 1):
        working = loader_probe(Busy(), workers)
        assert waiting[workers].work_share < 0.2
        assert working.work_share > 0.4  # other programs may hold it up
        # What it worked, it worked for its samples.
        assert working.work_share * working.batch_s == pytest.approx(4 * SAMPLE_S, rel=0.3)


class MainOnly:
    """Counters of a tree in which the main process alone works, beside what nobody can read."""

    def __init__(self, *, is_readable=True):
        self._is_readable = is_readable

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def read(self, pids):
        assert pids
        return SimpleNamespace(own_cpu_s=time.process_time() if self._is_readable else None)


def test_the_main_processs_work_is_not_the_workers(monkeypatch):
    monkeypatch.setattr("pipetune.trial.probes.TreeCounters", MainOnly)
    probe = loader_probe(Rows(), 1)
    assert probe.receive_s > 0.05 * probe.batch_s
    assert probe.work_share < 0.01


def test_work_that_cannot_be_read_is_not_guessed(monkeypatch):
    monkeypatch.setattr("pipetune.trial.probes.TreeCounters", lambda: MainOnly(is_readable=False))
    assert loader_probe(Rows(), 1, seconds=0.0).work_share is None


def test_receiving_is_the_main_processs_own_work(waiting):
    assert waiting[0].receive_s == 0.0
    for workers in (1, 3):
        assert 0 < waiting[workers].receive_s < SAMPLE_S
    # A worker's work is not the main process's.
    assert loader_probe(Busy(), 1).receive_s < SAMPLE_S


def test_uneven_batches_show_where_one_process_makes_them_all(waiting):
    assert loader_probe(Uneven(), 0, batch_size=1, shuffle=False).spread == pytest.approx(0.5, abs=0.15)
    assert waiting[0].spread < 0.2
    assert waiting[3].spread is None


def test_the_bytes_of_a_batch_are_its_tensors(waiting):
    assert {probe.batch_bytes for probe in waiting.values()} == {4 * (8 * 4 + 8)}


def test_what_a_worker_holds_itself_is_its_memory():
    assert loader_probe(Rows(), 0).worker_memory_bytes is None
    own = loader_probe(Heavy(from_the_start=False), 2).worker_memory_bytes
    shared = loader_probe(Heavy(from_the_start=True), 2).worker_memory_bytes
    assert 64 * MIB < own < 128 * MIB
    assert shared < 64 * MIB


def test_a_loader_that_is_too_slow_is_probed_no_longer_than_needed():
    """Two batches of one worker tell what there is to tell: the bursts of four are not taken for speed."""
    probe = loader_probe(Rows(sleep_s=0.05), 4, seconds=0.01)
    assert 4 <= probe.batches < 8
    assert probe.batch_s == pytest.approx(4 * 0.05 / 4, rel=0.25)
    alone = loader_probe(Rows(sleep_s=0.05), 0, seconds=0.01)
    assert (alone.batches, alone.spread) == (1, None)
    assert alone.batch_s == pytest.approx(4 * 0.05, rel=0.25)


def late(worker_id):
    time.sleep(0.3 * worker_id)


def test_how_late_a_worker_begins_is_not_the_time_of_a_batch():
    probe = loader_probe(Rows(sleep_s=SAMPLE_S), 2, seconds=0.2, worker_init_fn=late)
    assert probe.batch_s == pytest.approx(4 * SAMPLE_S / 2, rel=0.25)


def test_workers_that_begin_one_after_another_are_waited_for():
    probe = loader_probe(Rows(sleep_s=SAMPLE_S), 2, seconds=0.01, worker_init_fn=late)
    assert probe.batches >= 2
    assert SAMPLE_S < probe.batch_s < 0.3


def test_bursts_at_the_ends_of_a_probe_are_no_speed_either():
    probe = loader_probe(Rows(sleep_s=0.02), 3, seconds=0.05)
    assert probe.batches < 9
    assert probe.batch_s == pytest.approx(4 * 0.02 / 3, rel=0.25)


def test_torch_has_one_thread_meanwhile_and_then_those_it_had():
    dataset = Threads()
    torch.set_num_threads(3)
    try:
        loader_probe(dataset, 0, seconds=0.0)
        assert dataset.seen == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("dataset", "workers"),
    [(Numbers(), 0), (Numbers(), 2), (Rows(5), 2), (Rows(4), 3)],
    ids=["stream", "stream in workers", "one batch and a bit", "fewer batches than workers"],
)
def test_short_data_begins_anew(dataset, workers):
    assert loader_probe(dataset, workers, seconds=0.05).batches > 6


def test_data_shorter_than_a_batch_is_a_batch_where_the_user_keeps_it():
    assert loader_probe(Rows(3), 0, seconds=0.05, drop_last=False).batch_bytes == 3 * (8 * 4 + 8)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [(Rows(3), "the loader gave no batch"), (Once(), "ended after 1 batches .* only once")],
    ids=["shorter than a batch", "once"],
)
def test_data_that_ends_is_told(dataset, message):
    with pytest.raises(DataEndedError, match=message):
        loader_probe(dataset, 0)


# --- the step


class Sleeps:
    """A loss that takes the seconds that are given, one call after another, and counts its calls."""

    def __init__(self, *seconds):
        self.calls = 0
        self._seconds = chain(seconds[:-1], repeat(seconds[-1]))

    def __call__(self, model, batch):
        self.calls += 1
        time.sleep(next(self._seconds))
        return cross_entropy(model, batch)


class SleepySgd(torch.optim.SGD):
    """Its steps take 20 ms, and the first one 0.2 s more, as one that allocates a large state."""

    is_first = True

    def step(self, closure=None):
        time.sleep(0.22 if self.is_first else 0.02)
        self.is_first = False
        return super().step(closure)


def test_a_step_costs_what_it_costs_once_it_has_begun():
    assert step_probe(loss=Sleeps(0.2, 0.01)).batch_s == pytest.approx(0.01, rel=0.25)


def test_the_optimizers_step_is_shared_among_its_micro_batches():
    parts = {"loss": Sleeps(0.01), "optimizer": lambda model: SleepySgd(model.parameters(), lr=0.01)}
    probe = step_probe(config(0, accumulation_steps=4), **parts)
    assert probe.batch_s == pytest.approx(0.01 + 0.02 / 4, rel=0.25)


def test_a_slow_step_is_timed_once():
    loss = Sleeps(0.02)
    probe = step_probe(config(0, accumulation_steps=3), loss=loss, seconds=0.0)
    assert loss.calls == 2 * 3
    assert probe.batch_s == pytest.approx(0.02, rel=0.25)


def test_steps_that_fp16_skips_at_first_are_not_the_first_one():
    """Only one that is truly taken allocates what the optimizer needs."""
    calls = []

    def overflowing(model, batch):
        calls.append(None)
        return cross_entropy(model, batch) * (torch.inf if len(calls) <= 3 else 1.0)

    parts = {"loss": overflowing, "optimizer": lambda model: SleepySgd(model.parameters(), lr=0.01)}
    assert step_probe(config(0, amp=Amp.FP16), seconds=0.0, **parts).batch_s < 0.1
    assert len(calls) == 5


def test_a_step_that_never_updates_is_timed_as_it_is():
    """The trial refuses it in words of its own."""
    calls = []
    step_probe(loss=None, train_step=lambda *_: calls.append(None), seconds=0.0)
    assert len(calls) == 2


def test_a_cpu_has_nothing_to_copy_to():
    probe = step_probe()
    assert (probe.copy_s, probe.pinned_copy_s, probe.peak_gpu_memory_bytes) == (None, None, None)
    assert probe.batch_bytes == 4 * (8 * 4 + 8)


class CountedEverywhere(Rows):
    """Counts the samples that are read, in workers too."""

    def __init__(self, length=64):
        super().__init__(length)
        self.reads = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __getitem__(self, index):
        self.reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("length", [64, 3])
def test_a_batch_for_the_step_is_the_only_one_read(workers, length):
    dataset = CountedEverywhere(length)
    loader = one_batch_loader(workload(dataset, drop_last=False), config(workers), None)
    assert loader.num_workers == min(1, workers)
    feed = Feed(loader)
    assert len(only_batch(feed)[0]) == min(4, length)
    assert active_children() == []
    assert dataset.reads.item() == min(4, length)


@pytest.mark.parametrize("workers", [0, 4])
def test_a_stream_gives_a_batch_for_the_step_too(workers):
    assert len(only_batch(Feed(one_batch_loader(workload(Numbers()), config(workers), None)))[0]) == 4


# --- in a host


class InHost:
    """A host without a process of its own."""

    def __init__(self, given, *, serial=True):
        self.given = given
        self._read_end, write_end = os.pipe()
        self.channel = Channel(write_end)
        self.host = Host(self.channel)
        self.host._session = Session(given, CPU, seed=3)
        self.host._is_serial = serial
        os.set_blocking(self._read_end, False)

    def step(self, trial):
        return self.host._answer(StepProbeRequest(config=trial, seconds=0.02))

    def loader(self, trial, **changes):
        return self.host._answer(LoaderProbeRequest(config=trial, seconds=0.02, **{"cold": False} | changes))

    def told(self):
        """How many events have gone to the parent since the last look."""
        try:
            return os.read(self._read_end, 2**20).count(b"kind")
        except BlockingIOError:
            return 0

    def close(self):
        os.close(self._read_end)
        os.close(self.channel._descriptor)


@pytest.fixture
def in_host():
    made = []
    handler = signal.getsignal(signal.SIGCHLD)  # a host that fails puts another in its place

    def make(given=None, **settings):
        made.append(InHost(given or workload(), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
    signal.signal(signal.SIGCHLD, handler)


def random_state():
    kind, words, *rest = np.random.get_state()  # noqa: NPY002 - the global one is meant
    return random.getstate(), (kind, words.tolist(), *rest), torch.get_rng_state().tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_probe_leaves_the_random_state_as_it_was(in_host, workers):
    host = in_host(serial=workers == 0)
    before = random_state()
    for answer in (host.step(config(workers)), host.loader(config(workers))):
        assert isinstance(answer, ProbedEvent), answer
        assert random_state() == before


def test_what_comes_after_a_probe_begins_with_the_first_weights(in_host):
    host = in_host()
    before = {key: value.clone() for key, value in host.given.model.state_dict().items()}
    assert isinstance(host.step(config(0)), ProbedEvent)
    assert any(not torch.equal(before[key], value) for key, value in host.given.model.state_dict().items())
    assert host.host._session.optimizer.state == {}
    host.host._session.begin(trial_config(0))
    assert all(torch.equal(before[key], value) for key, value in host.given.model.state_dict().items())


def test_other_precisions_of_a_size_need_no_other_batch(in_host):
    host = in_host(workload(Counted()))
    dataset = host.given.dataset
    answers = [host.step(config(0, batch_size=size, amp=amp)) for size in (4, 8) for amp in (Amp.FP32, Amp.BF16)]
    assert dataset.reads == 4 + 8
    # THEN the parent knows what was read
    assert [answer.samples for answer in answers] == [4, 0, 8, 0]
    # AND a trial has no such batch beside its own
    limits = MeasureLimits(min_s=0.02, max_s=0.04, window_s=0.01, warm_up_s=0.01)
    host.host._answer(TrialRequest(config=config(0), limits=limits, compute_only=False, cold=False))
    assert host.host._kept is None


def test_the_parent_knows_what_a_loader_probe_may_have_read(in_host):
    dataset = Counted()
    answer = in_host(workload(dataset)).loader(config(0))
    assert answer.samples == dataset.reads
    ahead = in_host(serial=False).loader(config(2, prefetch_factor=3))
    assert ahead.samples == 4 * (1 + ahead.probe.batches + 2 * 3)


def test_a_cold_probe_needs_files_to_drop(in_host):
    answer = in_host().loader(config(0), cold=True)
    assert answer.failure.phase is Phase.PROBE
    assert "cache: cold needs the files behind the dataset" in answer.failure.message


def test_a_batch_that_is_too_large_for_the_gpu_is_told(in_host):
    def too_large(_model, _batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    failure = in_host(workload(loss=too_large)).step(config(0)).failure
    assert (failure.kind, failure.phase) == (FailureKind.GPU_OUT_OF_MEMORY, Phase.PROBE)


@pytest.mark.parametrize("probe", ["step", "loader"])
def test_data_that_gives_no_batch_is_invalid(in_host, probe):
    failure = getattr(in_host(workload(Rows(3))), probe)(config(0)).failure
    assert (failure.kind, failure.phase) == (FailureKind.INVALID_DATA, Phase.PROBE)


def test_signs_of_life_come_no_more_often_than_they_are_needed(in_host):
    host = in_host()
    for _ in range(1000):
        host.channel.sign_of_life()
    assert host.told() == 0
    host.channel._told_s -= 1.0
    host.channel.sign_of_life()
    host.channel.sign_of_life()
    assert host.told() == 1


@pytest.mark.parametrize("probe", ["step", "loader"])
def test_a_probe_that_takes_long_gives_signs_of_life(in_host, monkeypatch, probe):
    monkeypatch.setattr("pipetune.trial.host.SIGN_OF_LIFE_S", 0.0)
    host = in_host()
    getattr(host, probe)(config(0))
    assert host.told() > 5


# --- in real hosts

JOB = """
FAULT = HERE / "fault"

def fault():
    return FAULT.read_text() if FAULT.exists() else ""

class Faulty(Rows):
    def __getitem__(self, index):
        if get_worker_info() is None:
            with (HERE / "touched").open("a") as file:
                print(os.getpid(), file=file)
        if fault() == "sample raises":
            raise ValueError("truncated JPEG")
        if fault() == "sample hangs":
            time.sleep(10**6)
        return super().__getitem__(index)

def train_step(model, batch, optimizer, step):
    with step.autocast():
        value = loss(model, batch)
    if step.optimizer_steps < 3:
        with (HERE / "steps").open("a") as file:
            print(value.item(), file=file)
    step.backward(value)
    step.update()

def build():
    return workload(dataset=Faulty(sleep_s=0.002), train_step=train_step)
"""
PHASES = []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("probed")


@pytest.fixture(scope="module")
def runner(folder):
    timeouts = TrialTimeouts(set_up_s=60, stall_s=1.5, total_s=60)
    with hosts(folder, JOB, timeouts=timeouts, on_phase=PHASES.append) as runner:
        yield runner


def first_losses(runner, folder):
    (folder / "steps").unlink(missing_ok=True)
    assert isinstance(runner.run(config(0), QUICK), Measurement)
    return lines(folder / "steps")[:3]


def test_probes_and_trials_share_their_hosts_and_nothing_else(runner, folder):
    # GIVEN what a trial begins with
    before = first_losses(runner, folder)
    # WHEN both kinds of probes run in both
    PHASES.clear()
    for workers in (0, 2):
        step = runner.probe_step(config(workers, batch_size=8, amp=Amp.BF16), seconds=0.05)
        loader = runner.probe_loader(config(workers), seconds=0.1)
        assert isinstance(step, StepProbe), step
        assert isinstance(loader, LoaderProbe), loader
        assert step.batch_bytes == 2 * loader.batch_bytes == 8 * (8 * 4 + 8)
    assert PHASES == [Phase.PROBE, Phase.BUILD, Phase.PROBE]
    # THEN no worker is left
    pids = host_pids(runner)
    for pid in pids:
        assert left_after(1, lambda pid=pid: psutil.Process(pid).children(recursive=True)) == []
    # AND the host that forks has not touched the data
    touched = {int(pid) for pid in lines(folder / "touched")}
    assert touched == {runner._hosts[True].pid}
    # AND the next trials are what they were
    assert first_losses(runner, folder) == before
    assert isinstance(runner.run(config(2), QUICK), Measurement)
    assert host_pids(runner) == pids


class Fault(NamedTuple):
    name: str
    workers: int
    kind: FailureKind
    words: str


FAULTS = [
    Fault("sample raises", 2, FailureKind.ERROR, "truncated JPEG"),
    Fault("sample hangs", 0, FailureKind.TIMEOUT, "a sample that never returns"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_probe_that_fails_is_a_failure_with_a_name(runner, begin, fault):
    before, trial = host_pids(runner), config(fault.workers)
    begin(fault.name)
    outcome = runner.probe_loader(trial, seconds=0.1)
    assert isinstance(outcome, TrialFailure), outcome
    assert (outcome.config, outcome.kind, outcome.phase) == (trial, fault.kind, Phase.PROBE)
    assert fault.words in outcome.message + outcome.traceback_text
    # The host went with it, and all that it had started.
    assert (fault.workers == 0) not in runner._hosts
    for pid in set(before) - set(host_pids(runner)):
        assert left_after(2, lambda pid=pid: family(pid)) == []
