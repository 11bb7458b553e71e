"""Probes in whole studies: what is asked, what comes of it, and what their absence or failure changes."""

import itertools
import re

import pytest
from builders import GPU, facts, hardware, trial_config
from lab import Lab, study_config
from scripted import SAMPLE_BYTES, ScriptedRunner, fails_with, gpu_holds, loader_bound

from pipetune.core.measurement import FailureKind
from pipetune.core.probes import LoaderProbe, ProbeKind, StepProbe
from pipetune.core.space import Amp, DeclaredSpace
from pipetune.errors import InterruptedStudyError
from pipetune.search import bench, probing
from pipetune.search.budget import Spending

EVERYTHING = tuple(ProbeKind)
GIB = 2**30


def runner_of(*, gpu=True, **changes):
    """A loader-bound workload of which probes tell the truth: each worker loads 100/s, the step makes 900 or 1,300."""
    values = {
        "rate": loader_bound,
        "facts": facts(gpu=gpu),
        "sigma": 0.001,
        "drift": 0.001,
        "step_alone": lambda config: 1300.0 if config.amp is not Amp.FP32 else 900.0,
        "loader_alone": lambda config: 100.0 * max(0.8, config.num_workers),
        "works": 1.0,
    }
    return ScriptedRunner(**values | changes)


def kinds_of(runner):
    """What was probed: the loader by its workers, the step by micro-batch and precision."""
    return [(c.num_workers, c.batch_size, c.amp) for c in runner.probed]


def test_every_kind_is_probed_after_the_baseline_and_before_the_search(lab):
    runner = runner_of()
    lab.machine = hardware(cpus_usable=16)
    lab.run(study_config(trials=4, probes=EVERYTHING), runner)
    asked = kinds_of(runner)
    # a sample without workers; the largest micro-batch in each precision; a quarter of it; many workers and a few
    assert asked[0] == (0, 32, Amp.FP32)
    assert [(batch, amp) for _, batch, amp in asked[1:4]] == [(256, Amp.BF16), (256, Amp.FP16), (256, Amp.FP32)]
    assert [(batch, amp) for _, batch, amp in asked[4:7]] == [(64, Amp.BF16), (64, Amp.FP16), (64, Amp.FP32)]
    assert asked[7:] == [(16, 32, Amp.FP32), (2, 32, Amp.FP32)]
    assert [config.pin_memory for config in runner.probed if config.num_workers > 1] == [True, False]
    purposes = [purpose for purpose, _ in lab.told.began]
    assert purposes[0] == "baseline"
    assert "search" not in purposes[: 1 + len(asked)]


@pytest.mark.parametrize("kinds", [(), (ProbeKind.STEP,), (ProbeKind.LOADER,), (ProbeKind.SAMPLE,)])
def test_each_kind_can_be_left_out(lab, kinds):
    runner = runner_of()
    lab.run(study_config(trials=3, probes=kinds), runner)
    found = lab.store().probes()
    assert any(isinstance(one, StepProbe) for one in found) is (ProbeKind.STEP in kinds)
    assert any(isinstance(one, LoaderProbe) and one.config.num_workers for one in found) is (ProbeKind.LOADER in kinds)
    assert any(one.config.num_workers == 0 for one in found) is (ProbeKind.SAMPLE in kinds)


def test_each_probe_says_what_it_found_and_the_study_what_they_cost(lab):
    result = lab.run(study_config(trials=3, probes=EVERYTHING), runner_of())
    assert "step alone, micro-batch 256 bf16: 1300 samples/s" in lab.told.probes
    assert "loader alone, 4 workers: 400 samples/s" in lab.told.probes
    assert result.summary.probes_s > 0


def test_with_probes_the_first_proposal_is_among_the_best(lab):
    # GIVEN 16 CPUs, of which 13 keep up with the fastest step, and nothing tried but the baseline
    runner = runner_of()
    lab.machine = hardware(cpus_usable=16)
    lab.run(study_config(trials=2, probes=EVERYTHING), runner)
    fastest = max(loader_bound(config) for config in runner.searched)
    assert len(runner.searched) == 2
    assert fastest >= 0.9 * 0.98 * 1300


def test_a_resumed_study_is_not_probed_again(lab):
    lab.machine = hardware(cpus_usable=16)
    lab.run(study_config(trials=3, probes=EVERYTHING), runner_of())
    again = runner_of()
    lab.run(study_config(trials=5, probes=EVERYTHING), again)
    assert again.probed == []
    assert len(again.searched) > 0


def test_what_another_version_probed_is_probed_anew(lab):
    lab.run(study_config(trials=2, probes=EVERYTHING), runner_of())
    lab.store().study.set_user_attr("probes", [{"config": "of another kind"}])
    again = runner_of()
    lab.run(study_config(trials=3, probes=EVERYTHING), again)
    assert again.probed


def test_probes_keep_to_their_share_of_the_budget(lab, monkeypatch):
    # GIVEN a clock on which each probe takes 5 s, and a budget of 100 s
    now = [0.0]
    monkeypatch.setattr(probing.time, "monotonic", lambda: now[0])
    runner = runner_of()
    for name in ("probe_step", "probe_loader"):
        inner = getattr(runner, name)

        def slow(config, *, seconds, inner=inner):
            now[0] += 5.0
            return inner(config, seconds=seconds)

        monkeypatch.setattr(runner, name, slow)
    lab.run(study_config(trials=2, seconds=100.0, probes=EVERYTHING), runner)
    assert len(runner.probed) == 2


def test_a_batch_that_does_not_fit_is_halved_and_its_size_not_tried(lab):
    lab.machine = hardware(cpus_usable=4, gpus=(GPU,))
    runner = runner_of(fails=gpu_holds(64))
    lab.run(study_config(trials=8, probes=(ProbeKind.STEP,)), runner)
    sizes = [config.batch_size for config in runner.probed if config.amp is Amp.BF16]
    assert sizes[:3] == [256, 128, 64]
    # THEN neither does fp16 meet it again, nor fp32 what the baseline met, nor any trial but that
    others = [config.batch_size for config in runner.probed if config.amp is not Amp.BF16]
    assert max(others) == 64
    assert [c for c in runner.searched if c.batch_size > 64 and (c.amp is not Amp.FP32 or c.num_workers)] == []


def test_what_needs_more_gpu_memory_than_there_is_is_never_launched(lab):
    # GIVEN peaks of 1 GiB a sample at 16 and 64, and a GPU of 100 GiB of which a tenth stays free
    lab.machine = hardware(cpus_usable=4, gpus=(GPU.__class__(name="A GPU", uuid="GPU-1", memory_bytes=100 * GIB),))
    runner = runner_of(peak_bytes=lambda config: config.batch_size * GIB)
    result = lab.run(study_config(trials=12, probes=(ProbeKind.STEP,)), runner)
    # only the baseline, which comes before the probes, is larger
    assert {config.batch_size for config in runner.searched[1:]} <= {16, 32, 64}
    assert any("need more GPU memory than there is" in note for note in result.summary.notes)


def test_what_needs_more_shared_memory_than_there_is_is_never_launched(lab):
    # GIVEN shared memory for 256 samples
    lab.machine = hardware(cpus_usable=4, shared_memory_bytes=256 * SAMPLE_BYTES)
    runner = runner_of(gpu=False)
    result = lab.run(study_config(trials=12, probes=EVERYTHING), runner)
    # what workers have under way, and the batch in use
    held = [(c.num_workers * (c.prefetch_factor or 0) + 1) * c.batch_size for c in runner.searched if c.num_workers]
    assert held
    assert max(held) <= 1.05 * 256
    assert any("need more shared memory than there is" in note for note in result.summary.notes)


@pytest.mark.parametrize("kind", [FailureKind.CRASH, FailureKind.TIMEOUT, FailureKind.ERROR])
def test_probes_that_fail_leave_the_study_as_it_is_without_them(lab, kind):
    runner = runner_of()
    runner.fails = fails_with(kind, lambda config: config in runner.probed)
    result = lab.run(study_config(trials=4, probes=EVERYTHING), runner)
    assert lab.store().probes() == ()
    assert sum(record.measurement is not None for record in result.records) > 0
    assert any(kind.value in told for told in lab.told.probes)


def test_a_step_that_fails_in_a_precision_is_probed_no_further_in_it(lab):
    runner = runner_of(fails=fails_with(FailureKind.NON_FINITE, lambda config: config.amp is Amp.FP16))
    lab.run(study_config(trials=2, probes=(ProbeKind.STEP,)), runner)
    # with a worker, and without, since it might have been that
    assert [c.num_workers for c in runner.probed if c.amp is Amp.FP16] == [1, 0]


def test_workers_that_crash_do_not_keep_the_step_from_being_probed(lab):
    runner = runner_of(fails=fails_with(FailureKind.CRASH, lambda config: config.num_workers > 0))
    lab.run(study_config(trials=2, probes=EVERYTHING), runner)
    found = lab.store().probes()
    assert {one.config.amp for one in found if isinstance(one, StepProbe)} == set(Amp)
    assert all(one.config.num_workers == 0 for one in found)


@pytest.mark.parametrize(("kind", "name"), [
    (FailureKind.GPU_OUT_OF_MEMORY, "GPU memory"), (FailureKind.HOST_OUT_OF_MEMORY, "memory"),
])  # fmt: skip
def test_what_a_probe_ran_out_of_is_named(lab, kind, name):
    # GIVEN steps that do not fit above 64, which probes meet and the baseline does not
    fails = fails_with(kind, lambda config: config.batch_size > 64 and config.num_workers > 0)
    result = lab.run(study_config(trials=2, probes=(ProbeKind.STEP,)), runner_of(fails=fails))
    assert any(re.search(rf"configurations need more {name} than there is", note) for note in result.summary.notes)


def test_something_is_tried_however_slow_the_baseline_was(lab, monkeypatch):
    # GIVEN a baseline after which all but 5 s of a budget are gone
    clock = [0.0]
    monkeypatch.setattr(Spending.__init__, "__kwdefaults__", {"clock": lambda: clock[0]})

    def scale(_):
        clock[0] += 55.0
        return 1.0

    runner = runner_of(scale=scale)
    lab.run(study_config(trials=None, seconds=60.0, probes=()), runner)
    assert len(runner.searched) == 2


# --- the end of a search ---------------------------------------------------------------------------------------


def test_it_stops_at_the_ceiling_of_the_step(lab):
    # GIVEN a step that makes 1,000/s at every size and precision, which two workers reach
    def rate(config):
        return 300.0 if config.num_workers == 0 else 990.0

    runner = runner_of(rate=rate, step_alone=lambda _: 1000.0, loader_alone=lambda c: 500.0 * max(1, c.num_workers))
    result = lab.run(study_config(trials=100, probes=EVERYTHING), runner)
    assert len(runner.searched) <= 12
    assert any("of the 1000 samples/s that the step alone reaches" in note for note in result.summary.notes)


def test_a_ceiling_of_a_step_that_was_disturbed_stops_nothing(lab):
    # GIVEN a probe of the step that found half of what training reaches
    runner = runner_of(step_alone=lambda _: 500.0)
    lab.machine = hardware(cpus_usable=16)
    result = lab.run(study_config(trials=8, probes=EVERYTHING), runner)
    assert not any("that the step alone reaches" in note for note in result.summary.notes)
    assert len(runner.searched) == 8


def test_it_stops_at_what_the_cpus_can_load(lab):
    # GIVEN 4 CPUs and 10 ms of work a sample: 400/s, however fast the step is
    def rate(config):
        return 396.0 if config.num_workers >= 4 else 99.0 * max(1, config.num_workers)

    runner = runner_of(
        rate=rate,
        waits=lambda _: 90.0,
        step_alone=lambda _: 10_000.0,
        loader_alone=lambda config: 100.0 * max(1, config.num_workers),
    )
    config = study_config(trials=100, probes=EVERYTHING, search=DeclaredSpace(batch_size=(256,)))
    result = lab.run(config, runner)
    assert any("that 4 CPUs can load" in note for note in result.summary.notes)
    # THEN it says what it would take
    assert result.summary.demand.cpus == pytest.approx(100, rel=0.1)


def test_a_short_run_is_not_worth_many_trials(lab, monkeypatch):
    # GIVEN a planned run of about 25 s, and a clock by which a trial takes 5 s
    ticks = itertools.count(step=5.0)
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(ticks))
    runner = runner_of(drift=0.03)
    config = study_config(trials=60, epochs=1, epoch_samples=25_000, search=DeclaredSpace(num_workers=tuple(range(17))))
    result = lab.run(config, runner)
    assert 6 <= len(runner.searched) < 20
    assert any("is expected to save" in note for note in result.summary.notes)


def test_an_older_result_from_a_smaller_machine_gets_the_workers_of_this_one(lab):
    lab.machine = hardware(cpus_usable=16)
    older = trial_config(2, batch_size=256, accumulation_steps=1, amp=Amp.BF16, pin_memory=True)
    runner = runner_of()
    lab.run(study_config(trials=2, probes=EVERYTHING), runner, start_from=older)
    seed = runner.searched[1]
    assert seed.num_workers >= 10
    assert (seed.pin_memory, seed.prefetch_factor) == (older.pin_memory, older.prefetch_factor)


def test_an_older_result_that_is_believed_to_be_good_stays_as_it_was(lab):
    lab.machine = hardware(cpus_usable=16)
    older = trial_config(16, batch_size=256, accumulation_steps=1, amp=Amp.BF16, pin_memory=True)
    runner = runner_of()
    lab.run(study_config(trials=2, probes=EVERYTHING), runner, start_from=older)
    assert runner.searched[1] == older


def test_only_the_kinds_that_are_asked_for_are_used(lab):
    # GIVEN a study that was probed, and goes on without
    lab.machine = hardware(cpus_usable=4, shared_memory_bytes=2**10)
    lab.run(study_config(trials=2, probes=EVERYTHING), runner_of(gpu=False))
    again = runner_of(gpu=False)
    lab.run(study_config(trials=12, probes=()), again)
    # THEN what probes said of shared memory holds nothing back
    assert any(config.num_workers for config in again.searched)


def test_a_kind_that_lacks_is_probed_when_the_study_goes_on(lab):
    lab.machine = hardware(cpus_usable=16)
    lab.run(study_config(trials=2, probes=(ProbeKind.STEP,)), runner_of())
    again = runner_of()
    lab.run(study_config(trials=4, probes=EVERYTHING), again)
    assert {config.num_workers for config in again.probed} == {0, 2, 16}
    assert all(config.amp is Amp.FP32 for config in again.probed)


def test_a_step_that_would_take_too_long_is_not_probed(lab):
    # GIVEN 20 samples a second: an optimizer step of 256 takes 13 s, and probes have 10 s
    runner = runner_of(rate=lambda _: 20.0, step_alone=lambda _: 20.0)
    lab.run(study_config(trials=1, seconds=100.0, probes=EVERYTHING), runner)
    assert all(isinstance(one, LoaderProbe) for one in lab.store().probes())
    assert lab.store().probes()


def test_what_was_probed_before_an_interruption_is_kept(lab, monkeypatch):
    lab.machine = hardware(cpus_usable=16)
    runner = runner_of()

    def interrupted(config, *, seconds):  # noqa: ARG001
        raise InterruptedStudyError("interrupted by SIGINT", 2)

    monkeypatch.setattr(runner, "probe_step", interrupted)
    with pytest.raises(InterruptedStudyError):
        lab.run(study_config(trials=4, probes=EVERYTHING), runner)
    assert [one.kind for one in lab.store().probes()] == [ProbeKind.SAMPLE]
    assert lab.store().summary().probes_s >= 0


def test_what_an_interruption_left_out_is_probed_by_the_next_run(lab, monkeypatch):
    # GIVEN a run that is interrupted after its first step was probed
    lab.machine = hardware(cpus_usable=16)
    runner, probe_step = runner_of(), ScriptedRunner.probe_step

    def once(config, *, seconds):
        monkeypatch.setattr(runner, "probe_step", interrupted)
        return probe_step(runner, config, seconds=seconds)

    def interrupted(config, *, seconds):  # noqa: ARG001
        raise InterruptedStudyError("interrupted by SIGINT", 2)

    monkeypatch.setattr(runner, "probe_step", once)
    with pytest.raises(InterruptedStudyError):
        lab.run(study_config(trials=3, probes=EVERYTHING), runner)
    # WHEN it goes on
    again = runner_of()
    lab.run(study_config(trials=3, probes=EVERYTHING), again)
    # THEN exactly the rest is probed
    in_one_go = runner_of()
    other = Lab(lab.folder / "other", machine=lab.machine)
    other.folder.mkdir()
    other.run(study_config(trials=3, probes=EVERYTHING), in_one_go)
    assert sorted(kinds_of(runner) + kinds_of(again)) == sorted(kinds_of(in_one_go))


def test_the_ceiling_of_a_few_sizes_does_not_end_the_search_below_a_faster_one(lab):
    # GIVEN a step that thrashes at 256 and is slow at 64, the two sizes that are probed; 128 makes twice as much
    def step(config):
        return {256: 500.0, 128: 1000.0}.get(config.batch_size, 400.0)

    runner = runner_of(rate=step, step_alone=step, loader_alone=lambda c: 1e5 * max(1, c.num_workers))
    lab.run(study_config(trials=30, probes=EVERYTHING), runner)
    assert any(config.batch_size == 128 for config in runner.searched)
