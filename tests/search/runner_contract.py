"""What every TrialRunner does, real or scripted.

A test module subclasses RunnerContract under a name that begins with Test, and has these fixtures of scope class or
wider: `runner`, closed afterwards; `limits`; `working`, two configurations that run (at 0 workers, and with kept
workers); `failing`, one that does not.
"""

import pytest

from pipetune.core.measurement import Measurement, TrialFailure
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp


class RunnerContract:
    """The checks; one runner serves all of them."""

    @pytest.fixture(scope="class")
    @classmethod
    def measured(cls, runner, limits, working):
        """Both working configurations, measured once."""
        return [runner.run(config, limits) for config in working]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def facts(cls, runner):
        """What the runner says of the workload, before any trial."""
        return runner.describe()

    def test_it_describes_the_workload(self, facts):
        assert Amp.FP32 in facts.amps
        assert facts.has_accelerator == (facts.device_uuid is not None)
        assert facts.dataset_samples is None or facts.dataset_samples > 0

    def test_it_prepares_before_any_trial(self, runner, facts, working):
        found = runner.prepare(working[1], dataset_samples=facts.dataset_samples, compare_s=0.2, read_ahead_s=0.4)
        assert found.failure is None

    def test_the_step_is_probed(self, runner, facts, working):
        for config in working:
            probe = runner.probe_step(config, seconds=0.1)
            assert isinstance(probe, StepProbe)
            assert probe.config == config
            assert probe.batch_s > 0
            assert probe.batch_bytes > 0
            on_gpu = (probe.copy_s, probe.pinned_copy_s, probe.peak_gpu_memory_bytes)
            assert all((figure is not None) == facts.has_accelerator for figure in on_gpu)

    def test_the_loader_is_probed(self, runner, working):
        for config in working:
            probe = runner.probe_loader(config, seconds=0.1)
            assert isinstance(probe, LoaderProbe)
            assert probe.config == config
            assert probe.batch_s > 0
            assert probe.first_batch_s >= 0
            assert probe.work_share is None or 0 <= probe.work_share <= 1
            assert (probe.spread is None) == (config.num_workers > 0)
            assert probe.worker_memory_bytes is None or config.num_workers > 0

    def test_what_works_is_measured(self, measured, working):
        assert all(isinstance(outcome, Measurement) for outcome in measured)
        assert [outcome.config for outcome in measured] == list(working)

    def test_windows_are_whole_optimizer_steps(self, measured):
        for outcome in measured:
            assert outcome.windows
            assert all(window.samples % outcome.config.effective_batch_size == 0 for window in outcome.windows)
            assert all(window.samples > 0 for window in outcome.windows)

    def test_windows_follow_each_other(self, measured):
        for outcome in measured:
            for earlier, later in zip(outcome.windows, outcome.windows[1:], strict=False):
                assert earlier.began_s + earlier.seconds <= later.began_s + 1e-6

    def test_waiting_is_a_part_of_the_time(self, measured):
        for outcome in measured:
            assert all(0 <= window.data_wait_s <= window.seconds for window in outcome.windows)

    def test_it_measures_as_long_as_it_was_told(self, measured, limits):
        for outcome in measured:
            total_s = sum(window.seconds for window in outcome.windows)
            last_s = outcome.windows[-1].seconds
            assert total_s >= limits.min_s or len(outcome.windows) >= 2
            assert total_s - last_s < limits.max_s or len(outcome.windows) == 2

    def test_an_epoch_start_costs_time(self, measured):
        for outcome in measured:
            assert outcome.epoch_start.fresh_s >= 0
            assert (outcome.epoch_start.refill_s is not None) == outcome.config.persistent_workers

    def test_unknown_utilisation_has_a_reason(self, measured):
        for outcome in measured:
            assert (outcome.gpu is None) == (outcome.gpu_reason is not None)

    def test_compute_only_is_measured_where_it_is_asked_for(self, runner, limits, working, measured):
        assert all(outcome.compute_only_samples_per_sec is None for outcome in measured)
        outcome = runner.run(working[0], limits, compute_only=True)
        assert outcome.compute_only_samples_per_sec > 0

    def test_a_trial_can_have_a_fresh_process(self, runner, limits, working):
        assert isinstance(runner.run(working[1], limits, fresh=True), Measurement)

    def test_a_failure_is_a_value_and_the_next_trial_runs(self, runner, limits, working, failing):
        outcome = runner.run(failing, limits)
        assert isinstance(outcome, TrialFailure)
        assert outcome.config == failing
        assert outcome.message.strip()
        assert isinstance(runner.run(working[0], limits), Measurement)

    def test_outcomes_say_what_they_cost(self, measured):
        for outcome in measured:
            assert outcome.seconds >= sum(window.seconds for window in outcome.windows)

    def test_after_its_hosts_were_closed_it_goes_on(self, runner, limits, working):
        runner.close_hosts()
        runner.close_hosts()
        assert isinstance(runner.run(working[1], limits), Measurement)
