"""Workloads that cannot be set up: each is refused by name, with the user's own traceback."""

import os
import sys
import textwrap

import pytest
import torch
from trial_kit import PRELUDE, QUICK, config, host_pids, hosts

from pipetune.core.measurement import FailureKind, Phase, TrialFailure
from pipetune.core.study import WorkloadSpec
from pipetune.errors import WorkloadError
from pipetune.trial.host import Channel, Host
from pipetune.trial.protocol import ReadyEvent, RefusedEvent, SetUpRequest


def user_frames(text):
    return [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]


# --- in real hosts

RAISING = """
def helper():
    raise FileNotFoundError("no such folder: photos")

def build():
    print("the user prints", flush=True)
    helper()
"""


def test_what_build_raises_is_told_from_the_users_first_line_on(tmp_path):
    with hosts(tmp_path, RAISING) as runner, pytest.raises(WorkloadError) as error:
        runner.describe()
    message = str(error.value)
    assert message.startswith(
        "workload.target: job.py:build failed while building the workload: FileNotFoundError: no such folder: photos\n"
    )
    frames = user_frames(error.value.traceback_text)
    assert [frame.rpartition(", in ")[2] for frame in frames] == ["build", "helper"]
    assert all(str(tmp_path / "job.py") in frame for frame in frames)
    assert message.endswith("FileNotFoundError: no such folder: photos")
    assert host_pids(runner) == []


def test_leaving_python_in_build_is_no_crash_of_ours(tmp_path):
    refusal = pytest.raises(WorkloadError, match="failed while building the workload: SystemExit: no licence")
    with hosts(tmp_path, "def build():\n    sys.exit('no licence')") as runner, refusal:
        runner.describe()


def test_a_process_that_ends_in_build_is_told_with_its_last_words(tmp_path):
    code = "def build():\n    print('my last words', flush=True)\n    os._exit(7)"
    with hosts(tmp_path, code) as runner, pytest.raises(WorkloadError) as error:
        runner.describe()
    assert "exited with code 7 before it answered while it was being set up (build)" in str(error.value)
    assert "my last words" in str(error.value)


FIRST_SAMPLE = """
class Broken(Rows):
    def __getitem__(self, index):
        raise OSError(f"cannot decode photo {index}")

def build():
    return workload(dataset=Broken(), shuffle=False)
"""


def test_a_first_sample_that_raises_is_the_datasets(tmp_path):
    with hosts(tmp_path, FIRST_SAMPLE) as runner, pytest.raises(WorkloadError) as error:
        runner.describe()
    assert "failed while reading its first sample: OSError: cannot decode photo 0" in str(error.value)
    frames = user_frames(error.value.traceback_text)
    assert "job.py" in frames[-1]
    assert frames[-1].endswith("in __getitem__")
    assert not any("pipetune/trial" in frame for frame in frames)


def test_a_trial_whose_host_cannot_be_set_up_is_a_failure(tmp_path):
    code = "def build():\n    if (HERE / 'broken').exists():\n        raise ValueError('gone')\n    return workload()"
    with hosts(tmp_path, code) as runner:
        runner.describe()
        (tmp_path / "broken").touch()
        outcome = runner.run(config(1), QUICK)
    assert isinstance(outcome, TrialFailure)
    assert (outcome.kind, outcome.phase) == (FailureKind.ERROR, Phase.BUILD)
    assert "ValueError: gone" in outcome.message
    assert "job.py" in outcome.traceback_text


# --- the same code without a process around it


@pytest.fixture
def set_up(tmp_path, monkeypatch):
    """Answer to a set-up request for `job.py` with this code; imports and threads are as before afterwards."""
    threads, modules = torch.get_num_threads(), set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    read_end, write_end = os.pipe()

    def answer(code, *, target="job.py:build", serial=True, options=None):
        if code is not None:
            (tmp_path / "job.py").write_text(PRELUDE + textwrap.dedent(code))
        spec = WorkloadSpec(target=target, options=options or {}, folder=str(tmp_path))
        return Host(Channel(write_end))._set_up(SetUpRequest(spec=spec, device="cpu", seed=0, serial=serial))

    yield answer
    os.close(read_end)
    os.close(write_end)
    torch.set_num_threads(threads)
    for name in {"job", "random", "job_that_is_not_there"} & (set(sys.modules) - modules):
        del sys.modules[name]


@pytest.mark.parametrize(
    ("code", "target", "message"),
    [
        (None, "nothing.py:build", "there is no file"),
        ("", "job.py:build", "has no function 'build'"),
        ("build = 3", "job.py:build", "has no function 'build'"),
        (
            "def build():\n    return {}",
            "job.py:build",
            "job.py:build returned a dict; it must return a pipetune.Workload",
        ),
        (None, "package_that_is_not_there.jobs:build", "there is no module 'package_that_is_not_there.jobs'"),
        (None, "builtin:nothing", "there is no builtin:nothing; there are images"),
        ("build = lambda: workload(dataset=Rows(0), shuffle=False)", "job.py:build", "it is empty"),
        (
            "build = lambda: workload(dataset=Rows(1))",
            "job.py:build",
            "the dataset gives no batch: it is empty, or shorter than one batch",
        ),
        (
            "build = lambda: workload(count_samples=lambda batch: 16)",
            "job.py:build",
            "a batch of 2 samples counts as 16; give the Workload a count_samples",
        ),
        (
            "build = lambda: workload(collate_fn=lambda items: ['a', 'b'])",
            "job.py:build",
            "holds no tensor with a batch dimension; give the Workload a count_samples(batch) -> int",
        ),
        (
            "build = lambda: workload(make_loader=lambda c: DataLoader(Rows(), batch_size=64))",
            "job.py:build",
            "batch_size=64; the trial asked for 2: pass config.batch_size",
        ),
        (
            "build = lambda: pipetune.Workload(model=net(), optimizer=sgd, dataset=Rows())",
            "job.py:build",
            "exactly one of loss and train_step",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_workload_that_cannot_be_used_is_refused_in_words(set_up, code, target, message):
    event = set_up(code, target=target)
    assert isinstance(event, RefusedEvent)
    assert message in event.message
    assert event.traceback_text == ""


@pytest.mark.parametrize(
    ("code", "place", "error"),
    [
        ("build = lambda: workload(model=3)", "building the workload", "it must be an nn.Module"),
        ("import package_that_is_not_there", "building the workload", "No module named 'package_that_is_not_there'"),
        ("def build(:", "building the workload", "SyntaxError"),
        ("def build(width):\n    return workload()", "building the workload", "missing 1 required positional argument"),
        ("def build():\n    return workload(lr=1)", "building the workload", "unexpected keyword argument 'lr'"),
        (
            "build = lambda: workload(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=-1))",
            "building the workload",
            "Invalid learning rate: -1",
        ),
        ("build = lambda: workload(optimizer=lambda model: None)", "building the workload", "optimizer"),
        ("build = lambda: workload(collate_fn=lambda items: 1 / 0)", "reading its first sample", "ZeroDivisionError"),
        (
            "def count(batch):\n    raise KeyError('ids')\nbuild = lambda: workload(count_samples=count)",
            "reading its first sample",
            "'ids'",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_the_users_code_raises_is_told_with_its_place(set_up, code, place, error):
    event = set_up(code)
    assert isinstance(event, RefusedEvent)
    assert event.message.startswith(f"workload.target: job.py:build failed while {place}: ")
    assert error in event.message
    assert error.rpartition(": ")[2] in event.traceback_text


def test_a_file_that_is_called_like_a_known_module_is_refused(set_up, tmp_path):
    (tmp_path / "random.py").write_text("build = None")
    event = set_up(None, target="random.py:build")
    assert isinstance(event, RefusedEvent)
    assert "a module named 'random' is there already" in event.message
    assert "rename random.py" in event.message


def test_options_are_the_functions_arguments(set_up):
    event = set_up(
        "def build(length, *, twice=False):\n    return workload(dataset=Rows(length * (1 + twice)))",
        options={"length": 30, "twice": True},
    )
    assert isinstance(event, ReadyEvent)
    assert event.facts.dataset_samples == 60


@pytest.mark.parametrize(
    ("parts", "samples", "is_iterable", "fixed_batch"),
    [
        ("dataset=Rows(60)", 60, False, None),
        ("loader=DataLoader(Rows(60), batch_size=8, shuffle=True)", 60, False, None),
        ("dataset=Rows(60), sampler=list(range(40))", 40, False, None),
        ("dataset=Rows(60), batch_sampler=[[0, 1, 2], [3, 4, 5]]", 60, False, 3),
        ("make_loader=lambda c: DataLoader(Rows(60), batch_size=c.batch_size)", 60, False, None),
        ("make_loader=lambda c: DataLoader(Rows(60), batch_sampler=[[0, 1, 2, 3]])", 60, False, 4),
        ("make_loader=lambda c: DataLoader(Rows(60), batch_sampler=batches(c.batch_size))", 60, False, None),
        ("dataset=Stream()", None, True, None),
        ("dataset=Sized()", 1000, True, None),
        ("loader=DataLoader(Batches(), batch_size=None)", None, True, 5),
    ],
)
def test_facts_come_from_whatever_loader_there_is(set_up, parts, samples, is_iterable, fixed_batch):
    event = set_up(f"""
def batches(size):
    return torch.utils.data.BatchSampler(range(60), size, drop_last=True)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(Rows(32))

class Sized(Stream):
    def __len__(self):
        return 1000  # and gives 32

class Batches(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(5, 8), torch.ones(5).long())] * 4)

def build():
    return workload({parts})
""")
    assert isinstance(event, ReadyEvent), event
    facts = event.facts
    assert (facts.dataset_samples, facts.is_iterable, facts.fixed_batch) == (samples, is_iterable, fixed_batch)


def test_a_forking_host_does_not_look_at_the_data(set_up):
    event = set_up(FIRST_SAMPLE, serial=False)
    assert isinstance(event, ReadyEvent)
    assert event.facts.dataset_samples is None


def test_traits_are_told(set_up):
    event = set_up("""
class Epochs(Rows):
    def set_epoch(self, epoch):
        self.epoch = epoch

def build():
    return workload(dataset=Epochs(), model=nn.Linear(8, 2), loss_weight=lambda batch: 1.0)
""")
    traits = event.facts.traits
    assert (traits.has_batch_norm, traits.dataset_has_set_epoch, traits.weighs_micro_batches) == (False, True, True)
