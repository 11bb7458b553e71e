import os

import pytest
from trial_kit import QUICK, config, host_pids, hosts

from pipetune.core.measurement import FailureKind, Measurement, Phase
from pipetune.core.study import CachePolicy, Isolation
from pipetune.errors import InputError
from pipetune.trial import cache


@pytest.fixture
def advised(monkeypatch):
    """Sizes of the files whose pages the kernel was asked to drop, after they had reached the disk."""
    synced, asked = set(), []

    def advise(descriptor, offset, length, advice):
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        assert descriptor in synced
        asked.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fdatasync", synced.add)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    return asked


def test_every_file_that_is_named_or_lies_below_is_dropped(tmp_path, advised):
    for size, name in enumerate(["a.bin", "photos/b.jpg", "photos/more/c.jpg"], start=1):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(size))
    assert cache.evict([str(tmp_path / "a.bin"), tmp_path / "photos"]) == 3
    assert sorted(advised) == [1, 2, 3]


@pytest.mark.parametrize(
    ("names", "message"),
    [([], "give the Workload its data_paths"), (["gone.bin"], "there is no"), (["empty"], "data_paths")],
)
def test_a_cold_trial_without_files_is_refused(tmp_path, advised, names, message):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=message):
        cache.evict([tmp_path / name for name in names])
    assert advised == []


def test_cold_trials_say_what_they_need(tmp_path):
    code = "def build(paths=()):\n    return workload(data_paths=[HERE / path for path in paths])"
    with hosts(tmp_path, code, cache=CachePolicy.COLD) as runner:
        outcome = runner.run(config(0), QUICK)
    assert (outcome.kind, outcome.phase) == (FailureKind.ERROR, Phase.PREPARE)
    assert "cache: cold needs the files behind the dataset" in outcome.message
    options = {"paths": ["job.py"]}
    with hosts(tmp_path, code, cache=CachePolicy.COLD, isolation=Isolation.PROCESS, options=options) as runner:
        assert isinstance(runner.run(config(0), QUICK), Measurement)
        assert host_pids(runner) == []
