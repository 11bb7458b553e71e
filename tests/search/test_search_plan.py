import pytest
from builders import space, spaces, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.space import Amp
from pipetune.search.plan import default_baseline, seeds


def test_the_default_baseline_is_torchs_own_defaults_largest_batch_first():
    found = default_baseline((64, 256, 128), 256)
    assert found == tuple(
        trial_config(0, batch_size=batch, accumulation_steps=256 // batch) for batch in (256, 128, 64)
    )


@given(spaces(), st.integers(1, 128))
def test_seeds_lie_inside_the_space(points, cpus_usable):
    assert all(config in points for config in seeds(points, cpus_usable=cpus_usable))


@given(spaces(), st.integers(1, 128))
def test_there_is_a_seed_and_none_comes_twice(points, cpus_usable):
    found = seeds(points, cpus_usable=cpus_usable)
    assert found
    assert len(set(found)) == len(found)


def test_the_rule_comes_first():
    found = seeds(space(num_workers=tuple(range(9))), cpus_usable=8)
    assert found[0] == trial_config(
        7, pin_memory=True, persistent_workers=True, batch_size=256, accumulation_steps=1, amp=Amp.BF16
    )


def test_around_the_rule_each_way():
    found = seeds(space(num_workers=tuple(range(11))), cpus_usable=8)
    assert [(config.num_workers, config.amp) for config in found] == [
        (7, Amp.BF16),
        (7, Amp.FP32),
        (0, Amp.BF16),
        (4, Amp.BF16),
        (10, Amp.BF16),
    ]


def test_every_precision_is_tried_with_the_rules_workers():
    # GIVEN that which precision is fastest depends on the model
    found = seeds(space(amp=tuple(Amp)), cpus_usable=4)
    assert [(config.num_workers, config.amp) for config in found[:3]] == [
        (2, Amp.BF16),
        (2, Amp.FP16),
        (2, Amp.FP32),
    ]


@pytest.mark.parametrize(("amps", "fast"), [((Amp.FP32, Amp.FP16), Amp.FP16), (tuple(Amp), Amp.BF16)])
def test_bf16_comes_before_fp16(amps, fast):
    assert seeds(space(amp=amps), cpus_usable=4)[0].amp is fast


def test_where_the_rules_count_is_not_listed_the_nearest_is_taken():
    assert seeds(space(num_workers=(0, 6, 20)), cpus_usable=8)[0].num_workers == 6
