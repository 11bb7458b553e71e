"""Real causes on a CPU, each named first by an examination of a workload that has it; a healthy one gets none."""

import pytest
from builders import facts, hardware, trial_config
from lab import study_config
from scripted import ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune import api
from pipetune.core.diagnosis import Account, diagnose
from pipetune.core.measurement import FailureKind
from pipetune.core.space import Amp
from pipetune.errors import NothingWorksError, WorkloadError
from pipetune.search import examine
from pipetune.search.examine import Examination
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


def build(length=4096, work_s=0.0, wait_s=0.0, sample_step_s=0.0, other_s=0.0, threads=0):
    if threads:
        torch.set_num_threads(threads)

    def train_step(model, batch, optimizer, step):
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

    def examined(*, workers=0, persistent=True, epochs=1, **options):
        present = {"num_workers": workers, "batch_size": 16, "amp": "fp32"}
        if workers:
            present |= {"prefetch_factor": 2, "persistent_workers": persistent}
        config = {
            "study": "examined",
            "workload": {"target": "job.py:build", "options": options},
            "training": {"effective_batch_size": 16, "epochs": epochs},
            "search": {"amp": "fp32"},
            "device": "cpu",
            "baseline": present,
        }
        return api.diagnose(config)

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


# --- what is asked -------------------------------------------------------------------------------------------------


def scripted(runner, **changes):
    told = []
    examination = Examination(study_config(**changes), runner, hardware(cpus_usable=4), tell=told.append)
    return examination.evidence(), told


def test_while_data_is_waited_for_more_workers_are_probed_too():
    evidence, told = scripted(ScriptedRunner(rate=loader_bound, waits=lambda _: 80.0))
    assert evidence.measurement.config.num_workers == 0
    assert evidence.full_loader.config.num_workers == 4
    assert evidence.loader is None
    assert told[0] == "building the workload"


def test_while_the_step_limits_they_are_not():
    baseline = trial_config(2)
    evidence, _ = scripted(ScriptedRunner(facts=facts(gpu=True)), baseline=baseline)
    assert evidence.full_loader is None
    assert evidence.loader.config == baseline
    assert set(evidence.steps) == set(Amp)
    assert evidence.larger_step.config.batch_size == 256


def test_a_probe_that_fails_leaves_a_gap():
    runner = ScriptedRunner(fails=lambda call: FailureKind.ERROR if call.index else None)
    evidence, _ = scripted(runner)
    assert (evidence.sample, evidence.full_loader, evidence.steps, evidence.larger_step) == (None, None, {}, None)


def test_present_settings_that_fail_are_told():
    runner = ScriptedRunner(fails=fails_with(FailureKind.ERROR))
    with pytest.raises(WorkloadError, match="your present settings"):
        scripted(runner, baseline=trial_config(2))


def test_torchs_defaults_that_do_not_fit_are_tried_smaller():
    evidence, _ = scripted(ScriptedRunner(fails=gpu_holds(64), facts=facts(gpu=True)))
    assert evidence.measurement.config.batch_size == 64


@pytest.mark.parametrize("kind", [FailureKind.ERROR, FailureKind.HOST_OUT_OF_MEMORY])
def test_where_nothing_trains_that_is_told(kind):
    with pytest.raises(NothingWorksError, match="do not train"):
        scripted(ScriptedRunner(fails=fails_with(kind)))
