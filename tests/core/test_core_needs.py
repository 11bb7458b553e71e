"""What does not fit is known before it is launched, and what may fit is left to a trial."""

import pytest
from builders import probe_of_loader, probe_of_step, trial_config

from pipetune.core.needs import Memory, Needs, Room
from pipetune.core.space import Amp

GIB = 2**30


def needs(*, peaks=((64, 10), (256, 34)), sample_bytes=2**20, worker_bytes=GIB):
    steps = [
        probe_of_step(batch_size=b, peak_gpu_memory_bytes=gib * GIB, batch_bytes=b * sample_bytes) for b, gib in peaks
    ]
    return Needs.of([*steps, probe_of_loader(2, worker_memory_bytes=worker_bytes, batch_bytes=32 * sample_bytes)])


def room(**changes):
    return Room(**{"gpu_bytes": 100 * GIB, "shared_bytes": 100 * GIB, "host_bytes": 100 * GIB} | changes)


def test_the_gpu_peak_is_a_line_over_the_micro_batch():
    # 10 GiB at 64 and 34 at 256: 2 GiB and 1/8 GiB a sample
    assert needs().gpu_bytes(trial_config(batch_size=128)) == 18 * GIB
    assert needs().gpu_bytes(trial_config(batch_size=512)) == 66 * GIB


def test_one_peak_alone_says_nothing_of_other_sizes():
    assert needs(peaks=((64, 10),)).gpu_bytes(trial_config(batch_size=512)) is None
    assert needs().gpu_bytes(trial_config(batch_size=512, amp=Amp.BF16)) is None


@pytest.mark.parametrize(("there", "kind"), [
    ({"gpu_bytes": 17 * GIB}, Memory.GPU), ({"gpu_bytes": 18 * GIB}, None), ({"gpu_bytes": None}, None),
    ({"shared_bytes": GIB}, Memory.SHARED), ({"shared_bytes": GIB + 2**27}, None), ({"shared_bytes": None}, None),
    ({"host_bytes": 4 * GIB}, Memory.HOST), ({"host_bytes": 5 * GIB}, None), ({"host_bytes": None}, None),
])  # fmt: skip
def test_the_first_kind_that_is_short_is_named(there, kind):
    # 4 workers with 2 batches of 128 MiB each and the one in use make 1.125 GiB, beside 4 GiB of workers
    assert needs().missing(trial_config(4, batch_size=128), room(**there)) is kind


def test_without_workers_nothing_is_shared():
    assert needs().shared_bytes(trial_config(0)) == 0
    assert needs().missing(trial_config(0), room(shared_bytes=1, host_bytes=1)) is None


def test_pinned_batches_leave_shared_memory_as_they_come():
    pinned, pageable = (trial_config(4, prefetch_factor=8, pin_memory=pin) for pin in (True, False))
    batch_bytes = 64 * 2**20
    assert (needs().shared_bytes(pageable), needs().shared_bytes(pinned)) == (33 * batch_bytes, 4 * batch_bytes)
    assert needs().host_bytes(pageable) == needs().host_bytes(pinned)


def test_more_workers_and_more_prefetching_need_more():
    small, large = trial_config(2, prefetch_factor=2), trial_config(4, prefetch_factor=8)
    batch_bytes = 64 * 2**20
    assert (needs().shared_bytes(large), needs().shared_bytes(small)) == (33 * batch_bytes, 5 * batch_bytes)


def test_where_no_probe_told_everything_may_fit():
    nothing = Room(gpu_bytes=1, shared_bytes=1, host_bytes=1)
    assert Needs.of([]).missing(trial_config(64, batch_size=4096), nothing) is None
