import time

import numpy as np
import torch

from pipetune.workloads import synthetic


def seconds(dataset, index):
    begin = time.perf_counter()
    dataset[index]
    return time.perf_counter() - begin


def test_a_sample_costs_what_was_set():
    dataset = synthetic.build(length=4, cpu_ms=20, wait_ms=30).dataset
    busy = time.thread_time()
    wall = seconds(dataset, 0)
    busy = time.thread_time() - busy
    assert wall >= 0.05
    assert 0.02 <= busy < 0.035


def test_waits_are_spread_between_the_two():
    dataset = synthetic.build(length=1000, cpu_ms=0, wait_ms=5, wait_ms_max=20).dataset
    assert 0.005 <= dataset._wait_s.min() < 0.006
    assert 0.019 < dataset._wait_s.max() <= 0.02


def test_the_heavy_share_is_heavy():
    dataset = synthetic.build(length=10_000, cpu_ms=1, heavy_share=0.02, heavy_ms=100).dataset
    values, counts = np.unique(dataset._busy_s, return_counts=True)
    assert values.tolist() == [0.001, 0.1]
    assert 150 < counts[1] < 250


def test_large_samples_need_no_large_model():
    workload = synthetic.build(length=2, cpu_ms=0, payload_bytes=3_000_000, width=16, layers=1)
    sample = workload.dataset[0]
    assert sample.nbytes == 3_000_000
    assert workload.loss(workload.model, sample[None]).isfinite()
    assert sum(p.numel() for p in workload.model.parameters()) == 16 * 16 + 16 + 16 + 1


def test_samples_are_copies():
    dataset = synthetic.build(length=2, cpu_ms=0).dataset
    dataset[0].zero_()
    assert not torch.equal(dataset[1], torch.zeros_like(dataset[1]))
