import pytest
from builders import measured, traits, trial_config

from pipetune.core.space import Amp
from pipetune.core.tuned import Ceiling, Status, TunedConfig, training_changes

BASELINE = trial_config(0, batch_size=64, accumulation_steps=4)


def test_speedup_is_the_ratio_of_effective_rates():
    tuned = TunedConfig(
        status=Status.CERTIFIED,
        config=trial_config(),
        changes_training=(),
        measured=measured(3000.0),
        baseline_config=BASELINE,
        baseline_measured=measured(1200.0),
        ceiling=Ceiling(samples_per_sec=3100.0, limit="compute"),
        hardware={},
        provenance={},
    )
    assert tuned.speedup == pytest.approx(2.5)


# --- what the settings change beside speed ---------------------------------------------------------------------


def test_loader_knobs_change_nothing():
    chosen = trial_config(8, batch_size=64, accumulation_steps=4, pin_memory=True)
    assert training_changes(BASELINE, chosen, traits(has_batch_norm=True)) == ()


def test_precision_is_told():
    chosen = trial_config(0, amp=Amp.BF16)
    assert training_changes(BASELINE, chosen, traits()) == (
        "the forward pass runs in bf16 instead of fp32: losses differ in the last digits",
    )


def test_batch_norm_sees_another_micro_batch():
    chosen = trial_config(0, batch_size=256, accumulation_steps=1)
    assert training_changes(BASELINE, chosen, traits(has_batch_norm=True, weighs_micro_batches=True)) == (
        "BatchNorm statistics come from micro-batches of 256 samples instead of 64",
    )


@pytest.mark.parametrize(("batch", "steps", "words"), [(256, 1, "1 micro-batch"), (32, 8, "8 micro-batches")])
def test_an_unweighted_loss_is_averaged_over_other_micro_batches(batch, steps, words):
    chosen = trial_config(0, batch_size=batch, accumulation_steps=steps)
    (told,) = training_changes(BASELINE, chosen, traits())
    assert told.startswith(f"the loss is averaged over {words} a step instead of 4")


def test_a_weighted_loss_is_the_same_over_any_micro_batches():
    chosen = trial_config(0, batch_size=256, accumulation_steps=1)
    assert training_changes(BASELINE, chosen, traits(weighs_micro_batches=True)) == ()


def test_kept_workers_do_not_hear_set_epoch():
    (told,) = training_changes(BASELINE, trial_config(persistent_workers=True), traits(dataset_has_set_epoch=True))
    assert "set_epoch() in the main process does not reach them" in told


def test_workers_that_were_kept_before_change_nothing():
    before = trial_config(2, persistent_workers=True)
    assert training_changes(before, trial_config(8), traits(dataset_has_set_epoch=True)) == ()


def test_all_that_changes_is_told():
    chosen = trial_config(4, batch_size=128, accumulation_steps=2, amp=Amp.FP16)
    everything = traits(has_batch_norm=True, dataset_has_set_epoch=True)
    assert len(training_changes(BASELINE, chosen, everything)) == 4
