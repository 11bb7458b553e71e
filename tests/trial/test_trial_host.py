"""Trials that go well: what they measure, and that each begins and ends like the first."""

import os
import signal
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import psutil
import pytest
from trial_kit import LIMITS, QUICK, config, family, host_pids, hosts, left_after, lines

from pipetune.core.measurement import Measurement, Phase
from pipetune.core.space import Amp
from pipetune.core.throughput import TrainingPlan
from pipetune.trial.protocol import MeasureLimits

JOB = """
class Heavy(Rows):
    held = None

    def __getitem__(self, index):
        if self.held is None and get_worker_info() is not None:
            self.held = b"x" * (100 * 2**20)
        return super().__getitem__(index)

def build(as_function=True):
    model = net()
    model[1].eval()  # a frozen layer
    print("the user prints from build")
    count = [0]

    def train_step(model, batch, optimizer, step):
        with step.autocast():
            value = loss(model, batch)
        if step.optimizer_steps < 3 and step.accumulation_steps == 1:
            with (HERE / "steps").open("a") as file:
                print(step.optimizer_steps, value.item(), model[1].training, file=file)
        step.backward(value)
        step.update()

    return workload(
        dataset=Heavy(sleep_s=0.01),
        model=model,
        optimizer=sgd if as_function else sgd(model),
        train_step=train_step,
    )
"""
SAMPLE_S = 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("healthy")


@pytest.fixture(scope="module")
def phases():
    """What the runner tells while the tests go on."""
    return []


@pytest.fixture(scope="module")
def runner(folder, phases):
    with hosts(folder, JOB, on_phase=phases.append) as runner:
        yield runner


@pytest.fixture(scope="module")
def facts(runner):
    return runner.describe()


@pytest.fixture(scope="module")
def serial(runner, facts):
    assert facts.device == "cpu"
    return runner.run(config(0), LIMITS, compute_only=True)


@pytest.fixture(scope="module")
def forked(runner):
    return runner.run(config(2), LIMITS)


@pytest.fixture(scope="module")
def persistent(runner):
    return runner.run(config(2, persistent_workers=True, accumulation_steps=2), LIMITS)


def test_the_facts_are_the_workloads(facts):
    assert (facts.dataset_samples, facts.is_iterable, facts.fixed_batch) == (256, False, None)
    assert (facts.device, facts.device_uuid, facts.device_pci_bus_id, facts.cuda_version) == ("cpu", None, None, None)
    assert not facts.has_accelerator
    assert Amp.FP32 in facts.amps
    assert facts.traits.has_batch_norm
    assert not facts.traits.dataset_has_set_epoch
    assert not facts.traits.weighs_micro_batches
    assert facts.start_method in {"fork", "forkserver"}


def test_a_known_cost_a_sample_gives_a_known_rate(serial):
    assert serial.steady().value == pytest.approx(1 / SAMPLE_S, rel=0.1)
    assert serial.data_wait_percent() > 80


def test_two_workers_give_about_twice_the_rate(serial, forked):
    assert 1.7 < forked.steady().value / serial.steady().value < 2.2


def test_windows_are_real_stretches_of_time(serial):
    assert len(serial.windows) >= 2
    assert all(window.samples % 4 == 0 for window in serial.windows)
    assert all(0 <= window.data_wait_s <= window.seconds for window in serial.windows)
    assert all(before.began_s + before.seconds <= after.began_s for before, after in pairwise(serial.windows))
    measured_s = sum(window.seconds for window in serial.windows)
    assert LIMITS.min_s <= measured_s < serial.seconds
    assert serial.settled or measured_s >= LIMITS.max_s


def test_windows_hold_whole_optimizer_steps(persistent):
    assert all(window.samples % 8 == 0 for window in persistent.windows)


def test_only_workers_that_are_kept_can_be_refilled(serial, forked, persistent):
    assert serial.epoch_start.refill_s is None
    assert forked.epoch_start.refill_s is None
    assert persistent.epoch_start.refill_s is not None
    assert 0 <= persistent.epoch_start.refill_s < persistent.epoch_start.fresh_s


def test_an_epoch_start_costs_time(forked, persistent):
    assert forked.epoch_start.fresh_s > SAMPLE_S
    assert persistent.epoch_start.fresh_s > 4 * SAMPLE_S


def test_epoch_starts_lower_the_rate_of_short_epochs(forked):
    plan = TrainingPlan(effective_batch_size=4, epochs=3, epoch_samples=256)
    assert forked.effective(plan).value < forked.steady().value


def test_without_a_gpu_there_is_no_utilisation_but_a_reason(serial, forked):
    for outcome in (serial, forked):
        assert outcome.gpu is None
        assert outcome.gpu_reason == "no GPU: trials ran on the CPU"
        assert outcome.peak_gpu_memory_bytes is None


def test_host_memory_counts_the_workers(serial, forked):
    assert serial.host_memory_bytes > 50 * 2**20
    assert forked.host_memory_bytes > 2 * 100 * 2**20 + serial.host_memory_bytes / 2


def test_the_step_alone_is_timed_where_it_was_asked_for(serial, forked):
    assert serial.compute_only_samples_per_sec > 2 * serial.steady().value
    assert forked.compute_only_samples_per_sec is None


def test_the_time_of_all_phases_is_the_trials(serial):
    assert sum(serial.phase_seconds.values()) == pytest.approx(serial.seconds, rel=0.1, abs=0.05)
    assert serial.phase_seconds["measure"] >= sum(window.seconds for window in serial.windows)


def test_the_configuration_comes_back(forked):
    assert forked.config == config(2)


def test_no_worker_is_left_after_a_trial(runner, forked, persistent):
    assert {forked.settled, persistent.settled} <= {True, False}
    pids = host_pids(runner)
    assert len(pids) == 2
    for pid in pids:
        assert psutil.Process(pid).children(recursive=True) == []
        assert [process.pid for process in family(pid)] == [pid]


def test_every_trial_starts_from_the_same_model_and_optimizer(runner, serial, folder):
    for _ in range(2):
        assert isinstance(runner.run(serial.config, QUICK), Measurement)
    steps = [line.split() for line in lines(folder / "steps")]
    starts = [[value for _, value, _ in steps[at : at + 3]] for at in range(0, len(steps), 3)]
    assert starts[-1] == starts[-2] == starts[0]
    assert len(set(starts[0])) == 3


def test_a_layer_in_eval_mode_stays_so(serial, folder):
    assert serial.windows
    assert {mode for _, _, mode in map(str.split, lines(folder / "steps"))} == {"False"}


def test_the_log_holds_what_the_user_printed(runner, serial, folder):
    assert serial.windows
    logs = [file.read_text() for file in sorted((folder / "logs").iterdir())]
    assert len(logs) == len(host_pids(runner))
    assert all("the user prints from build" in log for log in logs)


def test_the_parents_file_descriptors_do_not_grow(runner, serial, forked):
    opened = len(list(Path("/proc/self/fd").iterdir()))
    for outcome in (serial, forked) * 3:
        assert isinstance(runner.run(outcome.config, QUICK), Measurement)
    assert len(list(Path("/proc/self/fd").iterdir())) == opened


def test_a_fresh_trial_has_a_process_of_its_own(runner, serial):
    before = host_pids(runner)
    assert isinstance(runner.run(serial.config, QUICK, fresh=True), Measurement)
    assert host_pids(runner) == []
    assert all(left_after(1, lambda pid=pid: family(pid)) == [] for pid in before)


def test_a_host_that_died_between_trials_is_replaced(runner, serial):
    """The next configuration is not to blame for it."""
    assert isinstance(runner.run(serial.config, QUICK), Measurement)
    pid = runner._hosts[True].pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert isinstance(runner.run(serial.config, QUICK), Measurement)


def test_describing_again_replaces_the_host(runner, serial, facts, phases):
    assert isinstance(runner.run(serial.config, QUICK), Measurement)
    first = runner._hosts[True]
    phases.clear()
    try:
        assert runner.describe() == facts
        assert phases == [Phase.BUILD, Phase.FIRST_SAMPLE]
        assert left_after(2, lambda: family(first.pid)) == []
    finally:
        first.kill()


def test_phases_are_told_as_they_come(runner, serial, phases):
    assert isinstance(runner.run(serial.config, QUICK), Measurement)
    phases.clear()
    assert isinstance(runner.run(serial.config, QUICK, compute_only=True), Measurement)
    assert phases == [
        Phase.PREPARE,
        Phase.WORKER_START,
        Phase.WARM_UP,
        Phase.MEASURE,
        Phase.EPOCH_END,
        Phase.CLOSE,
        Phase.COMPUTE_ONLY,
        Phase.CLOSE,
    ]


def test_an_optimizer_may_be_given_as_an_object(tmp_path):
    with hosts(tmp_path, JOB, options={"as_function": False}) as runner:
        for _ in range(2):
            assert isinstance(runner.run(config(0), QUICK), Measurement)
    steps = [line.split()[:2] for line in lines(tmp_path / "steps")]
    assert steps[:3] == steps[3:]


IMPORTS = """
loaded = set()

def watch(model, batch, optimizer, step):
    if step.optimizer_steps == 5:
        loaded.update(sys.modules)
    elif step.optimizer_steps > 5:
        with (HERE / "imported").open("a") as file:
            print(*sorted(set(sys.modules) - loaded), sep="\\n", end="", file=file)
    with step.autocast():
        value = loss(model, batch)
    step.backward(value)
    step.update()

def build():
    return workload(train_step=watch, dataset=Rows(sleep_s=0.001))
"""


def test_nothing_is_imported_inside_the_measuring_loop(tmp_path):
    """Loading scipy there takes a quarter of a second, in which the workers fill the queue for the next window."""
    with hosts(tmp_path, IMPORTS) as runner:
        outcome = runner.run(config(0), MeasureLimits(min_s=0.3, max_s=0.5, window_s=0.02, warm_up_s=0.05))
    assert len(outcome.windows) > 8
    assert lines(tmp_path / "imported") == []


DRAIN = """
class Tensors(Rows):
    def __init__(self):
        super().__init__(length=10_000, sleep_s=0.01)

naps = []

def nap_once(model, batch):
    if not naps:
        naps.append(time.sleep(1.5))  # the queue fills meanwhile
    return loss(model, batch)

def build():
    return workload(dataset=Tensors(), loss=nap_once)
"""


def test_a_full_queue_is_used_up_before_anything_is_timed(tmp_path):
    """One worker gives 100 samples a second at most, whatever lay ready."""
    with hosts(tmp_path, DRAIN) as runner:
        outcome = runner.run(
            config(1, batch_size=8, prefetch_factor=16), MeasureLimits(min_s=0.5, max_s=1, window_s=0.1, warm_up_s=0)
        )
    assert 80 < outcome.steady().value < 110
    assert fmean(window.data_wait_s / window.seconds for window in outcome.windows) > 0.5
