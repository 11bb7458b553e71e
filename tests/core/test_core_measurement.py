import pytest
from builders import PLAN, failure, measurement, trial_config, usage, windows
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.measurement import FailureKind, Phase
from pipetune.core.record import TrialRecord, TrialState
from pipetune.core.study import Budget
from pipetune.core.throughput import EpochStart, TrainingPlan
from pipetune.core.tuned import Measured

WORKER_TRACEBACK = """Caught ValueError in DataLoader worker process 0.
Original Traceback (most recent call last):
  File "/site-packages/torch/utils/data/_utils/worker.py", line 349, in _worker_loop
    data = fetcher.fetch(index)
  File "/home/me/job.py", line 12, in __getitem__
    raise ValueError("sample 17 is broken")
ValueError: sample 17 is broken
"""


# --- a measurement ---------------------------------------------------------------------------------------------


def test_rates_derive_from_the_windows():
    one = measurement(rates=[100.0] * 5 + [300.0] * 5)
    assert one.steady().value == pytest.approx(200.0)


def test_the_effective_rate_pays_for_every_epoch_start():
    # GIVEN 10 s of samples an epoch, 10 epochs, 1 s for new workers and 0.25 s for kept ones
    plan = TrainingPlan(effective_batch_size=256, epochs=10, epoch_samples=10_000)
    start = EpochStart(fresh_s=1.0, refill_s=0.25)
    kept = measurement(trial_config(persistent_workers=True), rate=1000.0, epoch_start=start)
    renewed = measurement(trial_config(persistent_workers=False), rate=1000.0, epoch_start=start)
    # THEN only the trial that keeps its workers starts 9 epochs cheaply
    assert kept.effective(plan).value == pytest.approx(100_000 / (100 + 1.0 + 9 * 0.25))
    assert renewed.effective(plan).value == pytest.approx(100_000 / (100 + 10 * 1.0))


def test_data_wait_derives_from_the_windows():
    assert measurement(wait_share=0.25).data_wait_percent() == pytest.approx(25.0)


def test_figures_of_a_trial():
    one = measurement(rate=500.0, gpu=usage(80.0), gpu_reason=None, peak_gpu_memory_bytes=7, host_memory_bytes=8)
    figures = Measured.of(one, PLAN)
    assert figures.steady_samples_per_sec == one.steady()
    assert figures.effective_samples_per_sec == one.effective(PLAN)
    assert figures.gpu_utilization_percent == one.gpu.estimate()
    assert figures.gpu_utilization_reason is None
    assert figures.epoch_start_s == one.epoch_start.fresh_s
    assert (figures.peak_gpu_memory_bytes, figures.host_memory_bytes) == (7, 8)


def test_figures_without_a_gpu_say_why():
    figures = Measured.of(measurement(gpu=None, gpu_reason="no driver"), PLAN)
    assert (figures.gpu_utilization_percent, figures.gpu_utilization_reason) == (None, "no driver")


# --- utilisation -----------------------------------------------------------------------------------------------


def test_utilisation_narrows_with_its_samples():
    found = usage(50.0, spread_percent=10.0, samples=100).estimate()
    assert (found.value, found.low, found.high) == (50.0, pytest.approx(48.04), pytest.approx(51.96))


@given(st.floats(0, 100), st.floats(0, 60), st.integers(0, 1000))
def test_utilisation_is_a_percentage(mean, spread, samples):
    found = usage(mean, spread_percent=spread, samples=samples).estimate()
    assert 0 <= found.low <= found.value <= found.high <= 100


# --- a failure -------------------------------------------------------------------------------------------------


def test_the_headline_of_a_plain_error_is_its_first_line():
    one = failure(kind=FailureKind.GPU_OUT_OF_MEMORY, phase=Phase.WARM_UP, message="CUDA out of memory.\nTried 2 GiB")
    assert one.headline() == "gpu_out_of_memory in warm_up: CUDA out of memory."


def test_the_headline_of_a_workers_error_is_the_error_itself():
    one = failure(kind=FailureKind.ERROR, phase=Phase.WORKER_START, message=WORKER_TRACEBACK)
    assert one.headline() == "error in worker_start: ValueError: sample 17 is broken"


@pytest.mark.parametrize("message", ["", "  \n "])
def test_a_failure_without_a_message_has_a_headline(message):
    assert failure(message=message).headline() == "crash in measure: no message"


@given(st.text())
def test_a_headline_is_one_line(message):
    assert len(failure(message=message).headline().splitlines()) == 1


def test_only_memory_kinds_are_too_large_rather_than_broken():
    memory = {FailureKind.GPU_OUT_OF_MEMORY, FailureKind.HOST_OUT_OF_MEMORY, FailureKind.SHARED_MEMORY}
    assert {kind for kind in FailureKind if kind.is_memory} == memory


# --- what became of a trial ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (measurement(), TrialState.MEASURED),
        (failure(kind=FailureKind.SHARED_MEMORY), TrialState.INFEASIBLE),
        (failure(kind=FailureKind.TIMEOUT), TrialState.FAILED),
    ],
)
def test_the_state_of_a_trial(outcome, state):
    assert TrialRecord(number=0, config=trial_config(), outcome=outcome, seconds=1.0).state is state


def test_a_record_gives_either_a_measurement_or_a_failure():
    good = TrialRecord(number=0, config=trial_config(), outcome=measurement(), seconds=1.0)
    bad = TrialRecord(number=1, config=trial_config(), outcome=failure(), seconds=1.0)
    assert (good.measurement, good.failure) == (good.outcome, None)
    assert (bad.measurement, bad.failure) == (None, bad.outcome)


# --- budgets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "exceeds"),
    [
        ((60.0, None), (60.0, None), False),
        ((61.0, None), (60.0, None), True),
        ((59.0, None), (60.0, None), False),
        ((None, 10), (None, 9), True),
        ((None, 8), (None, 9), False),
        ((60.0, 9), (60.0, 10), False),
        ((60.0, None), (60.0, 10), True),
        ((60.0, 10), (60.0, None), False),
        ((30.0, 20), (60.0, 10), True),
    ],
)
def test_whether_a_budget_allows_more(ours, theirs, exceeds):
    budgets = [Budget(seconds=seconds, trials=trials) for seconds, trials in (ours, theirs)]
    assert budgets[0].exceeds(budgets[1]) is exceeds


def test_windows_are_built_as_asked():
    # GIVEN what the other tests stand on
    made = windows([100.0, 50.0], seconds=0.5)
    assert [(w.samples, w.seconds) for w in made] == [(50, 0.5), (25, 0.5)]
