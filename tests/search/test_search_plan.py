import pytest
from builders import space, spaces, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.space import Amp
from pipetune.search.plan import default_baseline, usual_rule


def test_the_default_baseline_is_torchs_own_defaults_largest_batch_first():
    found = default_baseline((64, 256, 128), 256)
    assert found == tuple(
        trial_config(0, batch_size=batch, accumulation_steps=256 // batch) for batch in (256, 128, 64)
    )


@given(spaces(), st.integers(1, 128))
def test_the_rule_lies_inside_the_space(points, cpus_usable):
    assert usual_rule(points, cpus_usable=cpus_usable) in points


def test_the_rule_is_what_people_would_try():
    assert usual_rule(space(num_workers=tuple(range(9))), cpus_usable=8) == trial_config(
        7, pin_memory=True, persistent_workers=True, batch_size=256, accumulation_steps=1, amp=Amp.BF16
    )


@pytest.mark.parametrize(("amps", "fast"), [((Amp.FP32, Amp.FP16), Amp.FP16), (tuple(Amp), Amp.BF16)])
def test_bf16_comes_before_fp16(amps, fast):
    assert usual_rule(space(amp=amps), cpus_usable=4).amp is fast


def test_where_the_rules_count_is_not_listed_the_nearest_is_taken():
    assert usual_rule(space(num_workers=(0, 6, 20)), cpus_usable=8).num_workers == 6
