"""What holds for every built-in workload."""

import importlib
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from pipetune.workloads import BUILTIN

SMALL = {
    "images": {"images": 12, "image_size": [64, 48], "crop": 32, "depth": 10, "width": 4},
    "tokens": {"tokens": 2000, "block_size": 16, "preset": "nano", "vocabulary": 100},
    "memory_images": {"images": 12, "depth": 10, "width": 4},
    "tabular": {"rows": 50, "features": 6, "width": 8, "layers": 2},
    "synthetic": {"length": 20, "cpu_ms": 0.1, "width": 8, "payload_bytes": 64},
}


def build(name, **options):
    module, _, function = BUILTIN[name].partition(":")
    return getattr(importlib.import_module(module), function)(**{**SMALL[name], **options})


def as_tensors(sample):
    return [torch.as_tensor(part) for part in (sample if isinstance(sample, tuple) else (sample,))]


def test_the_registry_imports_no_torch():
    code = "import sys, pipetune.workloads; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_name_is_covered_here():
    assert set(SMALL) == set(BUILTIN)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("images", [((3, 32, 32), torch.float32), ((), torch.int64)]),
        ("tokens", [((17,), torch.int64)]),
        ("memory_images", [((3, 32, 32), torch.float32), ((), torch.int64)]),
        ("tabular", [((6,), torch.float32), ((), torch.float32)]),
        ("synthetic", [((16,), torch.float32)]),
    ],
)
def test_first_sample_has_its_shape_and_type(name, expected):
    parts = as_tensors(build(name).dataset[0])
    assert [(tuple(part.shape), part.dtype) for part in parts] == expected


@pytest.mark.parametrize("name", BUILTIN)
def test_one_training_step_gives_finite_loss_and_gradients(name):
    workload = build(name)
    batch = next(iter(DataLoader(workload.dataset, batch_size=4, shuffle=True)))
    optimizer = workload.optimizer(workload.model)
    before = [p.detach().clone() for p in workload.model.parameters()]
    loss = workload.loss(workload.model, batch)
    loss.backward()
    optimizer.step()
    assert math.isfinite(loss.item())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in workload.model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True))


@pytest.mark.parametrize("name", BUILTIN)
def test_the_optimizer_has_every_parameter_once(name):
    workload = build(name)
    groups = workload.optimizer(workload.model).param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in workload.model.parameters())


@pytest.mark.parametrize("name", BUILTIN)
def test_a_loss_under_bf16_is_finite(name):
    workload = build(name)
    batch = next(iter(DataLoader(workload.dataset, batch_size=4)))
    with torch.autocast("cpu", torch.bfloat16):
        loss = workload.loss(workload.model, batch)
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("name", BUILTIN)
def test_a_pickled_dataset_gives_the_same_samples(name):
    dataset = build(name).dataset
    torch.manual_seed(1)
    original = as_tensors(dataset[3])  # read before pickling: an open file must not travel along
    restored = pickle.loads(pickle.dumps(dataset))
    assert len(restored) == len(dataset)
    torch.manual_seed(1)
    assert all(map(torch.equal, original, as_tensors(restored[3])))


@pytest.mark.parametrize("name", BUILTIN)
def test_iterating_over_a_dataset_comes_to_an_end(name):
    dataset = build(name).dataset
    assert sum(1 for _ in dataset) == len(dataset)


@pytest.mark.parametrize("name", BUILTIN)
def test_the_same_options_give_the_same_data(name):
    samples = []
    for _ in range(2):
        dataset = build(name, seed=5).dataset
        torch.manual_seed(0)
        samples.append(as_tensors(dataset[2]))
    assert all(map(torch.equal, *samples))


@pytest.mark.parametrize("name", ["images", "memory_images"])
def test_random_augmentation_differs_between_epochs_and_workers(name):
    dataset = build(name).dataset
    loader = DataLoader([0] * 16, batch_size=None, collate_fn=dataset.__getitem__, num_workers=2)
    seen = [image for _ in range(2) for image, _ in loader]
    assert len({tuple(image.flatten().tolist()) for image in seen}) > 16


@pytest.mark.parametrize("name", ["images", "tokens", "tabular"])
def test_data_paths_are_the_files_that_are_there(name):
    workload = build(name)
    assert workload.data_paths
    assert all(Path(path).stat().st_size > 0 for path in workload.data_paths)


@pytest.mark.parametrize("name", ["images", "tokens"])
def test_a_virtual_length_starts_over(name):
    real = len(build(name).dataset)
    dataset = build(name, virtual_length=3 * real).dataset
    assert len(dataset) == 3 * real
    torch.manual_seed(0)
    first = as_tensors(dataset[1])
    torch.manual_seed(0)
    assert all(map(torch.equal, first, as_tensors(dataset[real + 1])))
    with pytest.raises(IndexError):
        dataset[3 * real]


def test_spawned_workers_read_a_mapped_file():
    dataset = build("tokens").dataset
    expected = dataset[0]
    loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="spawn")
    assert torch.equal(next(iter(loader))[0], expected)
