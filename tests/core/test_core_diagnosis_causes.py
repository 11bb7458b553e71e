"""Each cause of an idle GPU is named first where it is alone; a healthy run has none; two causes are both named."""

from dataclasses import replace

import pytest
from builders import PLAN, facts, measurement, probe_of_loader, probe_of_step, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.diagnosis import Account, Evidence, diagnose, verdict
from pipetune.core.findings import Severity
from pipetune.core.space import Amp
from pipetune.core.throughput import EpochStart, Stages

GIB = 2**30
BATCH = 64


def stages(**percent):
    """Of each window's half second; what is left over is the forward pass."""
    seconds = {f"{name}_s": 0.5 * share / 100 for name, share in percent.items()}
    return Stages(**{"copy_s": 0.0, "forward_s": 0.0, "backward_s": 0.0, "optimizer_s": 0.0} | seconds)


def trained(config=None, *, rate=1000.0, wait_percent=1.0, other_percent=1.0, copy_percent=0.0, **changes):
    """A measurement whose main thread waits, copies and does other things so long; the rest is the step."""
    config = config or trial_config(4, batch_size=BATCH)
    left = 100.0 - wait_percent - other_percent - copy_percent
    made = measurement(config, rate=rate, wait_share=wait_percent / 100, **changes)
    spent = stages(copy=copy_percent, forward=0.4 * left, backward=0.5 * left, optimizer=0.1 * left)
    return replace(made, windows=tuple(replace(window, stages=spent) for window in made.windows))


def step(rate, *, amp=Amp.FP32, batch_size=BATCH, **changes):
    return probe_of_step(batch_size=batch_size, amp=amp, batch_s=batch_size / rate, **changes)


def loader(rate, workers=4, *, batch_size=BATCH, **changes):
    return probe_of_loader(workers, batch_s=batch_size / rate, batch_size=batch_size, **changes)


def evidence(made=None, **changes):
    """A GPU that is busy: the step alone makes 1,020/s, the loader alone 3,000/s, both together 1,000/s."""
    values = {
        "measurement": made or trained(compute_only_samples_per_sec=1020.0),
        "plan": PLAN,
        "facts": facts(device="cuda:0", flags={"torch_num_threads": "4"}, dataset_samples=10_000_000),
        "cpus_usable": 4,
        "memory_bytes": 8 * GIB,
        "sample": loader(700.0, 0, work_share=0.98),
        "loader": loader(3000.0),
        "full_loader": None,
        "steps": {Amp.FP32: step(1020.0), Amp.BF16: step(1050.0, amp=Amp.BF16)},
        "larger_step": step(1060.0, batch_size=256),
    }
    return Evidence(**values | changes)


def starved(workers=1, *, rate=200.0, **changes):
    config = trial_config(workers, batch_size=BATCH)
    return trained(config, rate=rate, wait_percent=80.0, compute_only_samples_per_sec=1000.0, **changes)


NO_START = EpochStart(fresh_s=0.0, refill_s=0.0)
CAUSES = {
    "few workers": (
        "few_workers",
        evidence(
            starved(), loader=loader(210.0, 1), full_loader=loader(800.0), sample=loader(210.0, 0, work_share=1.0)
        ),
        "num_workers 4", 4.0,
    ),
    "no workers": (
        "few_workers",
        evidence(
            starved(0, epoch_start=EpochStart(fresh_s=0.0, refill_s=None)),
            loader=None, full_loader=loader(800.0), sample=loader(250.0, 0, work_share=1.0),
        ),
        "num_workers 4", 4.0,
    ),
    "slow decode on all CPUs": (
        "slow_samples",
        evidence(starved(4), loader=loader(210.0), sample=loader(53.0, 0, work_share=1.0)),
        "cheaper decoding", 5.0,
    ),
    "sleeping storage": (
        "slow_storage",
        evidence(starved(4), loader=loader(210.0), sample=loader(53.0, 0, work_share=0.1)),
        "num_workers 8 and more", 8 * 53 / 200,
    ),
    "a step beside workers": (
        "crowded_step",
        evidence(
            trained(rate=1000.0, wait_percent=5.0, compute_only_samples_per_sec=20_000.0),
            facts=facts(flags={"torch_num_threads": "4"}, dataset_samples=10_000_000),
            sample=loader(700.0, 0, work_share=1.0), steps={Amp.FP32: step(20_000.0)}, larger_step=None,
        ),
        "torch.set_num_threads(1)", 9.09,
    ),
    "workers that hurt": (
        "workers_hurt",
        evidence(
            trained(rate=1000.0, wait_percent=70.0, compute_only_samples_per_sec=5000.0),
            sample=loader(50_000.0, 0, work_share=1.0), loader=loader(1010.0), full_loader=None,
            steps={Amp.FP32: step(5000.0)}, larger_step=None,
        ),
        "num_workers 0", 4.55,
    ),
    "epoch starts": (
        "epoch_starts",
        evidence(
            trained(
                trial_config(4, batch_size=BATCH, persistent_workers=False),
                epoch_start=EpochStart(fresh_s=20.0, refill_s=None), compute_only_samples_per_sec=1020.0,
            )
        ),
        "persistent_workers true", 1.4,
    ),
    "no AMP": (
        "no_amp", evidence(steps={Amp.FP32: step(1020.0), Amp.BF16: step(2500.0, amp=Amp.BF16)}), "amp bf16", 2.45,
    ),
    "AMP that does not pay": (
        "amp_does_not_pay",
        evidence(
            trained(trial_config(4, batch_size=BATCH, amp=Amp.BF16), compute_only_samples_per_sec=1020.0),
            steps={Amp.FP32: step(1400.0), Amp.BF16: step(1020.0, amp=Amp.BF16)},
            larger_step=step(1030.0, amp=Amp.BF16, batch_size=256),
        ),
        "amp fp32", 1.37,
    ),
    "a small batch": ("small_batch", evidence(larger_step=step(3000.0, batch_size=256)), "batch_size 256", 2.94),
    "blocking copies": (
        "blocking_copies",
        evidence(
            trained(copy_percent=25.0, compute_only_samples_per_sec=1020.0),
            steps={Amp.FP32: step(1020.0, copy_s=0.016, pinned_copy_s=0.003)},
        ),
        "pin_memory true", 1.33,
    ),
    "work in each step": (
        "other_work", evidence(trained(other_percent=40.0, compute_only_samples_per_sec=1020.0)),
        "every 50 steps", 1.67,
    ),
    "a full GPU": (
        "allocation_retries",
        evidence(trained(compute_only_samples_per_sec=1020.0, allocation_retries=7)), "smaller micro-batch", None,
    ),
    "more threads than CPUs": (
        "oversubscribed",
        evidence(facts=facts(device="cuda:0", flags={"torch_num_threads": "64"}, dataset_samples=10_000_000)),
        "OMP_NUM_THREADS=4", None,
    ),
}  # fmt: skip


def test_a_healthy_run_gets_no_finding():
    assert diagnose(evidence()) == ()
    assert verdict(evidence()).startswith("Compute-bound")


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_cause_that_is_alone_is_named_alone(cause):
    code, case, remedy, gain = cause
    found = diagnose(case)
    assert [finding.code for finding in found] == [code]
    assert remedy in found[0].remedy
    assert found[0].gain == (None if gain is None else pytest.approx(gain, rel=0.01))
    assert found[0].severity is Severity.WARNING


def test_two_causes_are_both_named_the_greater_first():
    case = evidence(
        steps={Amp.FP32: step(1020.0), Amp.BF16: step(1500.0, amp=Amp.BF16)}, larger_step=step(3000.0, batch_size=256)
    )
    assert [finding.code for finding in diagnose(case)] == ["small_batch", "no_amp"]


def test_a_dataset_that_would_fit_in_memory_is_told_where_making_samples_limits():
    small = facts(device="cuda:0", flags={"torch_num_threads": "4"}, dataset_samples=50_000)
    case = evidence(starved(4), facts=small, loader=loader(210.0), sample=loader(53.0, 0, work_share=1.0))
    assert [finding.code for finding in diagnose(case)] == ["slow_samples", "fits_in_memory"]


def test_what_the_step_could_gain_is_not_told_while_data_is_waited_for():
    _, case, *_ = CAUSES["few workers"]
    case = replace(case, steps={Amp.FP32: step(1000.0), Amp.BF16: step(3000.0, amp=Amp.BF16)})
    assert [finding.code for finding in diagnose(case)] == ["few_workers"]
    assert "waits for data 80 % of the time" in verdict(case)


def test_on_a_cpu_loader_and_step_share_what_there_is():
    _, case, *_ = CAUSES["few workers"]
    on_cpu = replace(case, facts=facts(dataset_samples=10_000_000))
    assert diagnose(on_cpu)[0].gain == pytest.approx(1 / (1 / 800 + 1 / 1000) / 200, rel=0.01)


def test_without_probes_what_is_left_is_told():
    case = evidence(starved(), sample=None, loader=None, full_loader=None, steps={}, larger_step=None)
    assert [finding.code for finding in diagnose(case)] == ["slow_samples"]
    assert "unknown rate" in diagnose(case)[0].figure


@given(st.lists(st.floats(0, 20), min_size=4, max_size=4), st.floats(0, 20))
def test_the_account_sums_to_a_hundred(shares, wait):
    names = ("copy", "forward", "backward", "optimizer")
    made = measurement(wait_share=wait / 100)
    spent = stages(**dict(zip(names, shares, strict=True)))
    made = replace(made, windows=tuple(replace(window, stages=spent) for window in made.windows))
    account = Account.of(made)
    parts = (account.data_wait, account.copy, account.forward, account.backward, account.optimizer, account.other)
    assert sum(parts) == pytest.approx(100.0)
    assert account.data_wait == pytest.approx(wait)
    assert account.backward == pytest.approx(shares[2])


def test_where_stages_were_not_timed_there_is_no_account():
    assert Account.of(measurement()) is None
