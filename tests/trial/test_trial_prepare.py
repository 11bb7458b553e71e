import os
from pathlib import Path

import pytest
from trial_kit import QUICK, config, hosts

from pipetune.core.cache import ReadAheadEnd
from pipetune.core.measurement import CacheState, Measurement
from pipetune.core.samples import SampleAgreement
from pipetune.core.study import CachePolicy

ROW_BYTES = 2**16

FILES = f"""
class Stored(Dataset):
    def __init__(self, length):
        self.length = length
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        with open(HERE / "rows.bin", "rb", buffering=0) as file:
            file.seek(index * {ROW_BYTES})
            row = file.read({ROW_BYTES})
        with open(HERE / "read.txt", "a") as log:
            log.write(f"{{index}}\\n")
        time.sleep(0.001)
        return torch.full((8,), float(row[0])), index % 2

def build(length=64):
    return workload(dataset=Stored(length), data_paths=[HERE / "rows.bin"], shuffle=True)
"""

SHARED_HANDLE = """
class Handle(Dataset):
    def __init__(self):
        (HERE / "rows.bin").write_bytes(b"".join(bytes([i]) * 4096 for i in range(64)))
        self.file = open(HERE / "rows.bin", "rb", buffering=0)
    def __len__(self):
        return 64
    def __getitem__(self, index):
        self.file.seek(index * 4096)
        time.sleep(0.002)
        data = self.file.read(4096) or bytes(1)
        return torch.full((8,), float(data[0])), index % 2

def build():
    return workload(dataset=Handle())
"""


def write_rows(folder, length):
    """A file of which nothing is in the page cache; skips where the kernel does not tell what came from storage."""
    file = folder / "rows.bin"
    file.write_bytes(b"".join(bytes([i % 251]) * ROW_BYTES for i in range(length)))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = _read_bytes()
    with file.open("rb", buffering=0) as opened:
        opened.seek((length - 1) * ROW_BYTES)
        opened.read(ROW_BYTES)
    if _read_bytes() == before:
        pytest.skip("this file system, or this kernel, does not count what is read from storage")


def _read_bytes():
    with Path("/proc/self/io").open(encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("read_bytes"))


def read_indices(folder):
    return [int(line) for line in (folder / "read.txt").read_text().split()]


def prepared(runner, *, read_ahead_s, dataset_samples=64, workers=2):
    facts = runner.describe()
    assert facts.dataset_samples == dataset_samples
    return runner.prepare(config(workers), dataset_samples=dataset_samples, compare_s=0.5, read_ahead_s=read_ahead_s)


def test_samples_that_workers_read_otherwise_are_found(tmp_path):
    with hosts(tmp_path, SHARED_HANDLE) as runner:
        found = prepared(runner, read_ahead_s=0).comparison
    assert found.agreement is SampleAgreement.DIFFERENT
    assert found.different > 0


def test_equal_samples_are_equal(tmp_path):
    with hosts(tmp_path, "def build(): return workload(dataset=Rows(64))") as runner:
        found = prepared(runner, read_ahead_s=0).comparison
    assert (found.agreement, found.compared) == (SampleAgreement.EQUAL, 64)


def test_what_is_in_memory_needs_no_reading_ahead(tmp_path):
    with hosts(tmp_path, "def build(): return workload(dataset=Rows(10**6, sleep_s=0.002))") as runner:
        ahead = prepared(runner, read_ahead_s=30, dataset_samples=10**6).read_ahead
        assert ahead.end is ReadAheadEnd.IN_MEMORY
        outcome = runner.run(config(1), QUICK)
    assert outcome.cache is CacheState.WARM
    assert ahead.seconds < 10


def test_a_small_dataset_is_read_whole_and_trials_are_warm(tmp_path):
    write_rows(tmp_path, 64)
    with hosts(tmp_path, FILES) as runner:
        ahead = prepared(runner, read_ahead_s=30).read_ahead
        assert (ahead.end, ahead.samples) == (ReadAheadEnd.WHOLE_EPOCH, 64)
        outcome = runner.run(config(1), QUICK)
    assert isinstance(outcome, Measurement), outcome
    assert outcome.cache is CacheState.WARM


def test_trials_keep_to_what_was_read_ahead_in_time(tmp_path):
    # GIVEN a dataset that takes far longer to read than there is time for
    write_rows(tmp_path, 4096)
    with hosts(tmp_path, FILES, options={"length": 4096}) as runner:
        ahead = prepared(runner, read_ahead_s=0.6, dataset_samples=4096).read_ahead
        assert ahead.end is ReadAheadEnd.TIME
        known = set(read_indices(tmp_path))
        for trial in (config(0), config(1, batch_size=8), config(2)):
            assert isinstance(runner.run(trial, QUICK), Measurement)
    # THEN no trial has read anything else
    assert set(read_indices(tmp_path)) == known


def test_a_dataset_larger_than_memory_is_read_on_and_on(tmp_path, monkeypatch):
    write_rows(tmp_path, 4096)
    monkeypatch.setattr("pipetune.trial.runner.available_memory_bytes", lambda: 2 * 2**22)
    with hosts(tmp_path, FILES, options={"length": 4096}) as runner:
        ahead = prepared(runner, read_ahead_s=30, dataset_samples=4096).read_ahead
        assert ahead.end is ReadAheadEnd.MEMORY
        before = len(read_indices(tmp_path))
        first = runner.run(config(0), QUICK)
        between = len(read_indices(tmp_path))
        second = runner.run(config(0), QUICK)
    read = read_indices(tmp_path)
    # THEN each trial reads what none has read before, and says that it was cold
    assert set(read[before:between]).isdisjoint(read[between:])
    assert (first.cache, second.cache) == (CacheState.COLD, CacheState.COLD)


def test_a_cold_study_reads_nothing_ahead(tmp_path):
    write_rows(tmp_path, 64)
    with hosts(tmp_path, FILES, cache=CachePolicy.COLD) as runner:
        assert prepared(runner, read_ahead_s=30).read_ahead is None


def test_workers_that_fail_while_reading_ahead_are_told(tmp_path):
    code = """
    class Broken(Rows):
        def __getitem__(self, index):
            if get_worker_info() is not None:
                raise ValueError(f"no sample {index} here")
            return super().__getitem__(index)

    def build():
        return workload(dataset=Broken(64))
    """
    with hosts(tmp_path, code) as runner:
        found = prepared(runner, read_ahead_s=1)
        assert "no sample" in found.failure.message
        # AND trials without workers go on
        assert isinstance(runner.run(config(0), QUICK), Measurement)
