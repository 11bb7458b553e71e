"""A best.yaml in training code: loader, precision and step as in the trials, and what another machine is told."""

import dataclasses
import platform
import warnings
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from builders import measured, trial_config
from commands import python
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, TensorDataset

import pipetune
from pipetune.config import tuned_file
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.tuned import Status, TunedConfig
from pipetune.errors import InputError
from pipetune.hardware.host import usable_cpus

ROWS = TensorDataset(torch.arange(64.0).reshape(64, 1))
GPU = {"gpu": "NVIDIA H200"}

# Measured here, as far as the import can tell.
HARDWARE = {"fingerprint": "0123abcd", "gpu": None, "cpu": "A CPU", "cpus_usable": usable_cpus().count}
PROVENANCE = {
    "study": "photos",
    "torch": str(torch.__version__),
    "python": platform.python_version(),
    "start_method": torch.multiprocessing.get_start_method(),
}


def file_of(folder: Path, config: TrialConfig, *, hardware=None, provenance=None) -> Path:
    path = folder / "best.yaml"
    tuned_file.write(
        path,
        TunedConfig(
            status=Status.CERTIFIED,
            config=config,
            changes_training=(),
            measured=measured(2000.0),
            baseline_config=trial_config(0),
            baseline_measured=measured(1000.0),
            ceiling=None,
            hardware=HARDWARE | (hardware or {}),
            provenance=PROVENANCE | (provenance or {}),
        ),
    )
    return path


def loaded(folder: Path, config: TrialConfig | None = None, **changes) -> pipetune.Tuned:
    return pipetune.load(file_of(folder, config or trial_config(), **changes))


def warnings_of(path: Path, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipetune.load(path, **options)
    return [str(one.message) for one in caught]


# --- the loader ------------------------------------------------------------------------------------------------


def test_arguments_are_torchs_own(tmp_path):
    config = trial_config(4, batch_size=16, prefetch_factor=8, pin_memory=True, persistent_workers=False)
    assert loaded(tmp_path, config).dataloader_kwargs() == {
        "batch_size": 16,
        "num_workers": 4,
        "pin_memory": True,
        "prefetch_factor": 8,
        "persistent_workers": False,
    }


def test_without_workers_what_torch_refuses_is_left_out(tmp_path):
    kwargs = loaded(tmp_path, trial_config(0, batch_size=16)).dataloader_kwargs()
    assert kwargs == {"batch_size": 16, "num_workers": 0, "pin_memory": False}


def test_a_loader_has_the_tuned_settings_and_what_else_was_asked_for(tmp_path):
    # GIVEN a result with workers
    tuned = loaded(tmp_path, trial_config(2, batch_size=16, prefetch_factor=4))

    # WHEN a loader is made
    loader = tuned.dataloader(ROWS, shuffle=True, drop_last=True)

    # THEN it has both
    assert (loader.batch_size, loader.num_workers, loader.prefetch_factor) == (16, 2, 4)
    assert loader.persistent_workers
    assert loader.drop_last
    assert isinstance(loader.sampler, RandomSampler)


def test_a_serial_loader_gives_batches(tmp_path):
    loader = loaded(tmp_path, trial_config(0, batch_size=16)).dataloader(ROWS)
    assert [len(batch) for [batch] in loader] == [16, 16, 16, 16]


def test_an_argument_that_would_override_a_tuned_one_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"batch_size, num_workers come\(s\) from the file.*dataloader_kwargs"):
        loaded(tmp_path).dataloader(ROWS, num_workers=2, batch_size=8)


def test_a_batch_sampler_of_ones_own_decides_the_batch(tmp_path):
    sampler = BatchSampler(SequentialSampler(ROWS), batch_size=8, drop_last=False)
    loader = loaded(tmp_path, trial_config(0, batch_size=16)).dataloader(ROWS, batch_sampler=sampler)
    assert [len(batch) for [batch] in loader] == [8] * 8


def test_no_batch_sampler_is_no_batch_sampler(tmp_path):
    # None is DataLoader's own default: code that passes its arguments on must not lose the batch size.
    loader = loaded(tmp_path, trial_config(0, batch_size=16)).dataloader(ROWS, batch_sampler=None)
    assert loader.batch_size == 16


def test_workers_beyond_the_cpus_are_kept(tmp_path):
    # A loader that waits for storage gains far beyond the CPU count.
    workers = 8 * usable_cpus().count
    tuned = loaded(tmp_path, trial_config(workers))
    assert tuned.dataloader_kwargs()["num_workers"] == workers
    with pytest.warns(UserWarning, match="worker processes"):  # torch's own
        assert tuned.dataloader(ROWS).num_workers == workers


# --- batches to the device -------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["inputs", "labels"])  # noqa: PYI024 - the untyped kind is what users have


@dataclasses.dataclass
class Sample:
    inputs: torch.Tensor
    name: str


def test_every_tensor_of_a_nested_batch_is_moved(tmp_path):
    # GIVEN a batch of every kind
    one = torch.ones(2)
    batch = {"list": [one, (one, "text")], "pair": Pair(one, 3), "sample": Sample(one, "a"), "none": None}

    # WHEN it is moved
    moved = loaded(tmp_path).to_device(batch, "meta")

    # THEN tensors are there, the rest is as it was, and each kind is kept
    assert moved["list"][0].device.type == "meta"
    assert moved["list"][1][0].device.type == "meta"
    assert moved["list"][1][1] == "text"
    assert isinstance(moved["pair"], Pair)
    assert (moved["pair"].inputs.device.type, moved["pair"].labels) == ("meta", 3)
    assert (moved["sample"].inputs.device.type, moved["sample"].name) == ("meta", "a")
    assert moved["none"] is None
    assert one.device.type == "cpu"


@pytest.mark.parametrize("pin_memory", [True, False])
def test_copies_wait_exactly_where_memory_is_not_pinned(tmp_path, pin_memory):
    class Noting:
        def to(self, device, *, non_blocking):
            return (device.type, non_blocking)

    tuned = loaded(tmp_path, trial_config(pin_memory=pin_memory))
    assert tuned.to_device([Noting()]) == [("cpu", pin_memory)]


# --- precision and the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("amp", "dtype", "scales"),
    [("fp32", torch.float32, False), ("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)],
)
def test_precision_is_the_files(tmp_path, monkeypatch, amp, dtype, scales):
    # GIVEN a CPU that has every precision
    monkeypatch.setattr("pipetune.integrations.torch.cpu_amps", lambda: tuple(Amp))
    tuned = loaded(tmp_path, trial_config(amp=Amp(amp)))

    # WHEN a product is computed under autocast
    with tuned.autocast():
        product = torch.ones(2, 2) @ torch.ones(2, 2)

    # THEN it has that type, and only fp16 scales its gradients
    assert tuned.amp == amp
    assert product.dtype is dtype
    assert tuned.grad_scaler().is_enabled() is scales


def test_sizes_are_the_files(tmp_path):
    tuned = loaded(tmp_path, trial_config(batch_size=8, accumulation_steps=3))
    assert (tuned.batch_size, tuned.accumulation_steps, tuned.device.type) == (8, 3, "cpu")


def test_a_step_of_micro_batches_equals_the_step_of_the_whole_batch(tmp_path):
    def weight_after(accumulation_steps: int) -> tuple[float, list[bool]]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        config = trial_config(0, batch_size=4 // accumulation_steps, accumulation_steps=accumulation_steps)
        step = loaded(tmp_path, config).step(torch.optim.SGD(model.parameters(), lr=0.1))
        stepped = []
        for batch in torch.arange(1.0, 5.0).reshape(4, 1).split(config.batch_size):
            with step.autocast():
                loss = model(batch).square().mean()
            step.backward(loss)
            stepped.append(step.update())
        assert step.optimizer_steps == 1
        return model.weight.item(), stepped

    whole, _ = weight_after(1)
    split, stepped = weight_after(2)
    assert split == pytest.approx(whole)
    assert stepped == [False, True]


# --- another machine -------------------------------------------------------------------------------------------


def test_the_same_machine_is_silent(tmp_path):
    assert warnings_of(file_of(tmp_path, trial_config())) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hardware": {"cpus_usable": 999}}, f"usable CPUs 999, and here it is {usable_cpus().count}"),
        ({"provenance": {"torch": "1.0.0"}}, f"torch 1.0.0, and here it is {torch.__version__}"),
        ({"provenance": {"python": "2.7.18"}}, "Python 2.7, and here it is 3."),
        ({"provenance": {"start_method": "spoon"}}, "start method spoon, and here it is "),
    ],
)
def test_one_difference_is_one_warning_with_both_values_and_the_remedy(tmp_path, changes, told):
    [text] = warnings_of(file_of(tmp_path, trial_config(), **changes))
    assert told in text
    assert "`pipetune tune`" in text


def test_three_differences_are_three_warnings(tmp_path):
    path = file_of(
        tmp_path,
        trial_config(),
        hardware={"cpus_usable": 999},
        provenance={"torch": "1.0.0", "python": "2.7.18"},
    )
    assert len(warnings_of(path)) == 3


def test_a_patch_release_of_python_is_no_difference(tmp_path):
    python_next = ".".join([*platform.python_version_tuple()[:2], "999"])
    assert warnings_of(file_of(tmp_path, trial_config(), provenance={"python": python_next})) == []


def test_a_warning_points_at_the_line_that_loads(tmp_path):
    path = file_of(tmp_path, trial_config(), hardware={"cpus_usable": 999})
    with pytest.warns(UserWarning, match="usable CPUs") as caught:
        pipetune.load(path)
    assert caught[0].filename == __file__


def test_unchecked_is_silent(tmp_path):
    path = file_of(tmp_path, trial_config(), hardware={"cpus_usable": 999} | GPU, provenance={"torch": "1.0.0"})
    assert warnings_of(path, check=False) == []


def test_a_file_tuned_on_a_gpu_is_refused_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"tuned on NVIDIA H200, and torch sees no GPU here; tune on this machine"):
        loaded(tmp_path, hardware=GPU)


def test_the_remedy_for_a_missing_gpu_works(tmp_path, monkeypatch):
    # GIVEN a file tuned on a GPU, and a machine without one
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = file_of(tmp_path, trial_config(0), hardware=GPU)

    # WHEN the remedy of the refusal is taken
    tuned = pipetune.load(path, check=False)

    # THEN batches go to a device that is there
    assert tuned.to_device(torch.ones(1)).device.type == "cpu"


def test_another_gpu_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: not including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    [text] = warnings_of(file_of(tmp_path, trial_config(amp=Amp.BF16), hardware=GPU))
    assert "GPU NVIDIA H200, and here it is Tesla T4" in text


def test_a_gpu_that_emulates_bf16_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(InputError, match=r"use bf16, which Tesla T4 would only emulate; tune on this machine"):
        loaded(tmp_path, trial_config(amp=Amp.BF16), hardware=GPU)


@pytest.mark.parametrize("amp", [Amp.BF16, Amp.FP16])
def test_a_cpu_that_emulates_is_refused(tmp_path, monkeypatch, amp):
    monkeypatch.setattr("pipetune.integrations.torch.cpu_amps", lambda: (Amp.FP32,))
    with pytest.raises(InputError, match=f"use {amp}, which this CPU would only emulate; tune on this machine"):
        loaded(tmp_path, trial_config(amp=amp))


def test_loading_leaves_the_start_method_open(tmp_path):
    # GIVEN a fresh interpreter that has loaded a result
    code = (
        "import sys, pipetune, torch\n"
        "pipetune.load(sys.argv[1])\n"
        "torch.multiprocessing.set_start_method('spawn')\n"
        "print(torch.multiprocessing.get_start_method())\n"
    )

    # WHEN the training code then chooses how workers are started
    run = python(code, file_of(tmp_path, trial_config()), cwd=tmp_path)

    # THEN it may
    assert run.stdout.strip() == "spawn", run.stderr


def test_replacing_the_result_of_a_tuned_is_refused(tmp_path):
    tuned = loaded(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        tuned.result = replace(tuned.result, status=Status.NO_GAIN)
