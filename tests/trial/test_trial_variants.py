"""Every way to hand over what is trained, measured for real in a host that starts workers, or in one that does not."""

import pytest
from trial_kit import QUICK, config, hosts, lines

from pipetune.core.measurement import FailureKind, Measurement, TrialFailure

VARIANTS = {
    "loader": """
class Loud(DataLoader):
    pass

def build():
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 256, 64)
    loader = Loud(Rows(), batch_size=64, sampler=sampler, num_workers=4, persistent_workers=True, timeout=30)
    return workload(loader=loader)
""",
    "make_loader": """
class Own(DataLoader):
    def __init__(self, folder, config):
        super().__init__(
            Rows(), batch_size=config.batch_size, num_workers=config.num_workers, pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor, persistent_workers=config.persistent_workers,
        )

def build():
    return workload(make_loader=lambda config: Own("photos", config))
""",
    "stream": """
class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        rows = Rows(64)
        for index in range(info.id if info else 0, 64, info.num_workers if info else 1):
            yield rows[index]

def build():
    return workload(dataset=Stream())
""",
    "stream with a wrong length": """
class Stream(IterableDataset):
    def __len__(self):
        return 1000
    def __iter__(self):
        return iter(Rows(10))

def build():
    return workload(dataset=Stream(), drop_last=False)
""",
    "spawn": """
def build():
    return workload(multiprocessing_context="spawn", collate_fn=collate)

def collate(items):
    return torch.utils.data.default_collate(items)
""",
    "forkserver": """
def build():
    return workload(multiprocessing_context="forkserver")
""",
    "counts that are tensors": """
def build():
    return workload(count_samples=lambda batch: (batch[1] >= 0).sum())
""",
    "weights": """
def weigh(batch):
    with (HERE / "weights").open("a") as file:
        print(batch[1].sum().item(), file=file)
    return batch[1].sum()

def build():
    return workload(loss_weight=weigh)
""",
}


def measured(folder, name, num_workers, *, compute_only=False, **changes):
    with hosts(folder, VARIANTS[name]) as runner:
        outcome = runner.run(config(num_workers, **changes), QUICK, compute_only=compute_only)
    assert isinstance(outcome, Measurement), outcome
    return outcome


@pytest.mark.parametrize("name", ["loader", "stream", "spawn", "forkserver"])
def test_a_workload_is_measured_with_workers(tmp_path, name):
    outcome = measured(tmp_path, name, 2, persistent_workers=True)
    assert outcome.steady().value > 0
    assert all(window.samples % 4 == 0 for window in outcome.windows)
    assert outcome.epoch_start.refill_s is not None


@pytest.mark.parametrize("name", ["make_loader", "stream with a wrong length", "counts that are tensors"])
def test_a_workload_is_measured_without_workers(tmp_path, name):
    outcome = measured(tmp_path, name, 0)
    assert outcome.steady().value > 0
    assert all(window.samples % 4 == 0 for window in outcome.windows)


def test_each_micro_batch_is_weighed_as_the_loader_gave_it(tmp_path):
    outcome = measured(tmp_path, "weights", 0, accumulation_steps=2, compute_only=True)
    weights = lines(tmp_path / "weights")
    assert len(weights) >= sum(window.samples for window in outcome.windows) / 4
    assert len(set(weights)) > 1
    assert outcome.compute_only_samples_per_sec > 0


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ("collate_fn=lambda items: torch.utils.data.default_collate(items)", "lambda"),
        ("dataset=local()", "Local"),
    ],
    ids=["lambda", "local_class"],
)
def test_what_cannot_be_pickled_is_named(tmp_path, parts, named):
    code = f"""
def local():
    class Local(Rows):
        pass
    return Local()

def build():
    return workload(multiprocessing_context="spawn", {parts})
"""
    with hosts(tmp_path, code) as runner:
        outcome = runner.run(config(1), QUICK)
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind is FailureKind.ERROR
    assert "pickle" in outcome.message.lower()
    assert named in outcome.message
