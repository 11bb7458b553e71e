import pytest
from builders import PLAN, measurement, trial_config, usage, windows

from pipetune.core.pooling import pooled_measurement, reported
from pipetune.core.repeats import Noise
from pipetune.core.throughput import EpochStart, TrainingPlan

CONFIG = trial_config(0)
NO_COST = EpochStart(fresh_s=0.0, refill_s=0.0)
SILENT = Noise(sd=0.0, freedom=10.0)


def at(*rates, **changes):
    return [measurement(CONFIG, rate=rate, epoch_start=NO_COST, **changes) for rate in rates]


# --- pooled ----------------------------------------------------------------------------------------------------


def test_one_is_itself():
    (one,) = at(1000.0)
    assert pooled_measurement([one]) == one


def test_all_windows_count():
    found = pooled_measurement(at(900.0, 1100.0))
    assert len(found.windows) == 20
    # As many seconds at each rate.
    assert found.steady().value == pytest.approx(1000.0)


def test_whole_epochs_take_the_mean_of_what_they_took():
    # GIVEN two trials of the same epochs: a long one at 1,000/s, a short one at 1,200/s, that lost a second each
    plan = TrainingPlan(effective_batch_size=256, epochs=5, epoch_samples=3000)
    start = EpochStart(fresh_s=1.0, refill_s=None, whole_samples=3000)
    rounds = [
        measurement(CONFIG, rates=[1000.0] * 40, epoch_start=start),
        measurement(CONFIG, rates=[1200.0] * 8, epoch_start=start),
    ]
    epochs_s = [3000 / one.effective(plan).value for one in rounds]
    found = pooled_measurement(rounds)
    assert found.epoch_start.whole_samples == 3000
    assert 3000 / found.effective(plan).value == pytest.approx(sum(epochs_s) / 2)


def test_whole_epochs_beside_turns_are_turns():
    whole = EpochStart(fresh_s=1.0, refill_s=0.5, whole_samples=3000)
    turn = EpochStart(fresh_s=2.0, refill_s=1.5)
    found = pooled_measurement([measurement(CONFIG, epoch_start=start) for start in (whole, turn)]).epoch_start
    assert (found.fresh_s, found.refill_s, found.whole_samples) == (1.5, 1.0, None)


def test_what_was_seen_of_any_is_kept_once():
    first = measurement(CONFIG, interference=("a foreign process",), drained_samples=3.0)
    later = measurement(
        CONFIG, interference=("a foreign process", "throttled"), drained_samples=4.0, settled=False,
        set_aside=windows([1.0]), allocation_retries=2,
    )  # fmt: skip
    found = pooled_measurement([first, later])
    assert found.interference == ("a foreign process", "throttled")
    assert (found.drained_samples, found.allocation_retries, found.settled) == (7.0, 2, False)
    assert len(found.set_aside) == 1


def test_the_largest_memory_is_the_memory():
    one, other = measurement(CONFIG, peak_gpu_memory_bytes=5), measurement(CONFIG, peak_gpu_memory_bytes=7)
    assert pooled_measurement([one, other]).peak_gpu_memory_bytes == 7
    assert pooled_measurement(at(1.0, 2.0)).peak_gpu_memory_bytes is None


def test_utilisation_is_pooled():
    found = pooled_measurement(
        [measurement(CONFIG, gpu=usage(mean, spread_percent=0.0), gpu_reason=None) for mean in (80.0, 90.0)]
    )
    assert found.gpu.mean_percent == pytest.approx(85.0)
    assert found.gpu.spread_percent == pytest.approx(5.0)
    assert found.gpu.samples == 60


def test_where_one_round_lacks_utilisation_there_is_either_a_figure_or_a_reason():
    # GIVEN a round in which NVML gave nothing, and one in which it did
    blind = measurement(CONFIG, gpu=None, gpu_reason="NVML gave no samples")
    seen = measurement(CONFIG, gpu=usage(80.0), gpu_reason=None)
    for rounds in ((seen, blind), (blind, seen), (blind, blind)):
        found = reported(rounds, PLAN, SILENT)
        # THEN the reason is set exactly where utilisation is None
        assert (found.gpu_utilization_percent is None) == (found.gpu_utilization_reason is not None)


# --- reported --------------------------------------------------------------------------------------------------


def test_the_interval_spans_what_fresh_processes_differed_by():
    # GIVEN two processes that are sure of themselves, and differ by 10 %
    found = reported(at(950.0, 1050.0), PLAN, SILENT)
    for figure in (found.steady_samples_per_sec, found.effective_samples_per_sec):
        assert figure.low <= 950.1 < figure.value < 1049.9 <= figure.high


def test_the_interval_spans_what_epoch_starts_differed_by():
    # GIVEN equal rates, and epoch starts of 1 and 3 s in epochs of 50 s
    rounds = [
        measurement(CONFIG, rate=1000.0, epoch_start=EpochStart(fresh_s=fresh_s, refill_s=None)) for fresh_s in (1, 3)
    ]
    found = reported(rounds, PLAN, SILENT).effective_samples_per_sec
    assert found.low == pytest.approx(50_000 / 53)
    assert found.high == pytest.approx(50_000 / 51)
    assert found.value == pytest.approx(50_000 / 52, rel=1e-3)


def test_two_rounds_that_agree_by_luck_are_no_surer_than_the_machine_is():
    # GIVEN a machine that is known to be noisy, and two rounds that agree
    known = Noise(sd=0.08, freedom=10.0)
    found = reported(at(1000.0, 1000.0), PLAN, known).steady_samples_per_sec
    # THEN the interval is Student's: 2.228 * 8 % / sqrt(2)
    assert found.high == pytest.approx(1000.0 * 2.718281828 ** (2.228 * 0.08 / 2**0.5), rel=1e-3)
    assert found.low * found.high == pytest.approx(1e6, rel=1e-6)


def test_a_rate_is_the_geometric_mean_of_its_rounds_however_long_they_took():
    # GIVEN a short round and one that took five times as long to settle
    rounds = [measurement(CONFIG, rates=[1000.0] * 8), measurement(CONFIG, rates=[800.0] * 40)]
    found = reported(rounds, PLAN, SILENT).steady_samples_per_sec
    assert found.value == pytest.approx((1000.0 * 800.0) ** 0.5, rel=1e-3)
