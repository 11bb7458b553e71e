"""Real causes on a CPU, each named first by an examination of a workload that has it; a healthy one gets none."""

import pytest

from pipetune import api
from pipetune.core.diagnosis import Account, diagnose
from pipetune.errors import NothingWorksError, WorkloadError
from pipetune.search import examine
from pipetune.trial.protocol import MeasureLimits

JOB = """
import time
import torch
from torch import nn
import pipetune


def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples(torch.utils.data.Dataset):
    def __init__(self, length, work_s, wait_s):
        self.length, self.work_s, self.wait_s = length, work_s, wait_s

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        burn(self.work_s)
        if self.wait_s:
            time.sleep(self.wait_s)
        return torch.full((8,), float(index % 7))


def build(length=4096, work_s=0.0, wait_s=0.0, sample_step_s=0.0, other_s=0.0, threads=0, fails=False):
    if threads:
        torch.set_num_threads(threads)

    def train_step(model, batch, optimizer, step):
        if fails:
            raise ValueError("no such layer")
        with step.autocast():
            if sample_step_s:
                time.sleep(sample_step_s * len(batch))
            loss = model(batch).mean()
        step.backward(loss)
        step.update()
        if other_s:
            time.sleep(other_s)  # writing a log, say

    return pipetune.Workload(
        dataset=Samples(length, work_s, wait_s),
        model=nn.Linear(8, 1),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        train_step=train_step,
    )
"""


@pytest.fixture
def examined(tmp_path, monkeypatch):
    """Called with options of the job and the baseline's workers, it gives the evidence."""
    monkeypatch.setattr(examine, "LIMITS", MeasureLimits(min_s=0.6, max_s=1.2, window_s=0.1, warm_up_s=0.1))
    monkeypatch.setattr(examine, "PROBE_S", 0.2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)

    def examined(*, workers=0, persistent=True, epochs=1, baseline=True, **options):
        present = {"num_workers": workers, "batch_size": 16, "amp": "fp32"}
        if workers:
            present |= {"prefetch_factor": 2, "persistent_workers": persistent}
        config = {
            "study": "examined",
            "workload": {"target": "job.py:build", "options": options},
            "training": {"effective_batch_size": 16, "epochs": epochs},
            "search": {"amp": "fp32"},
            "device": "cpu",
        }
        return api.diagnose(config | ({"baseline": present} if baseline else {}))

    return examined


CAUSES = {
    "slow decode without workers": ("few_workers", {"work_s": 0.002, "sample_step_s": 1e-4}),
    "sleeping storage": ("slow_storage", {"workers": 2, "wait_s": 0.01, "sample_step_s": 1e-4}),
    "workers that hurt": ("workers_hurt", {"workers": 2}),
    "a log in each step": ("other_work", {"other_s": 0.02, "sample_step_s": 1e-3}),
    "restarted workers": (
        "epoch_starts",
        {"workers": 2, "persistent": False, "epochs": 5, "length": 64, "sample_step_s": 1e-3, "work_s": 1e-4},
    ),
    "more threads than CPUs": ("oversubscribed", {"threads": 64, "sample_step_s": 1e-3}),
}


@pytest.mark.parametrize("cause", CAUSES.values(), ids=CAUSES)
def test_a_cause_is_named_first(examined, cause):
    code, options = cause
    found = diagnose(examined(**options))
    assert [finding.code for finding in found][:1] == [code]


def test_two_causes_at_once_are_both_named(examined):
    found = diagnose(examined(other_s=0.02, sample_step_s=1e-3, threads=64))
    assert {"other_work", "oversubscribed"} <= {finding.code for finding in found}


def test_a_healthy_run_gets_no_finding(examined):
    evidence = examined(sample_step_s=2e-3)
    assert diagnose(evidence) == ()
    account = Account.of(evidence.measurement)
    assert account.forward > 90
    assert evidence.together == pytest.approx(500, rel=0.1)


def test_present_settings_that_fail_are_told_with_their_traceback(examined):
    with pytest.raises(WorkloadError, match=r"present settings.*no such layer"):
        examined(fails=True)


def test_where_nothing_trains_that_is_told(examined):
    with pytest.raises(NothingWorksError, match="no such layer"):
        examined(fails=True, baseline=False)
