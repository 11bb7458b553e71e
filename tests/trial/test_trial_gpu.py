"""What only a real GPU shows. Run by hand: `pytest -m gpu tests/trial/test_trial_gpu.py`."""

import pytest
from trial_kit import config, hosts, lines

from pipetune.core.measurement import FailureKind, Measurement, Phase, TrialFailure
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.space import Amp
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import TrialTimeouts

pytestmark = pytest.mark.gpu

# NVML gives a figure every 200 ms, so a window must hold a few of them.
LONG = MeasureLimits(min_s=2.5, max_s=4.0, window_s=1.2, warm_up_s=0.2)
SHORT = MeasureLimits(min_s=0.2, max_s=0.3, window_s=0.05, warm_up_s=0.05)
TIMEOUTS = TrialTimeouts(set_up_s=120.0, stall_s=30.0, total_s=90.0)
MIB = 2**20

JOB = """
class Wide(Rows):
    def __getitem__(self, index):
        return torch.full((2048,), float(index % 7)), index % 2

class OnGpu(Rows):
    def __getitem__(self, index):
        rows, label = super().__getitem__(index)
        return rows.to("cuda"), label

def collate(items):
    rows, labels = torch.utils.data.default_collate(items)
    return rows, labels

def faulty_loss(model, batch):
    rows, labels = batch
    if len(rows) == 256:
        torch.empty(2**50, dtype=torch.uint8, device=rows.device)
    if len(rows) == 64:
        nn.functional.embedding(labels + 10**6, model[0].weight)
    return nn.functional.cross_entropy(model(rows), labels)

def build(dataset="wide"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 2))
    return workload(
        dataset=Wide(4096) if dataset == "wide" else OnGpu(),
        model=model if dataset == "wide" else net(),
        loss=faulty_loss if dataset == "wide" else loss,
        collate_fn=collate,
        multiprocessing_context="fork",
    )

def build_napping():
    \"\"\"Each step is one kernel of a known length, about 50 ms, on a GPU that computes nothing else.\"\"\"
    torch.cuda._sleep(1000)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles = 50_000_000
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    (HERE / "kernel_s").write_text(str(begin.elapsed_time(end) / 1000))

    def nap(model, batch):
        torch.cuda._sleep(cycles)
        return loss(model, batch)

    return workload(dataset=Rows(4096), loss=nap)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def used_bytes(visible_gpu_uuid):
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{visible_gpu_uuid}")
    yield lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used
    pynvml.nvmlShutdown()


@pytest.fixture(scope="module")
def runner(folder, used_bytes):
    """The runner of all tests; when it is closed, the GPU's memory must be as before."""
    before = used_bytes()
    with hosts(folder, JOB, device="cuda", timeouts=TIMEOUTS) as runner:
        assert runner.describe().has_accelerator
        yield runner
    assert abs(used_bytes() - before) < 100 * MIB


def sound(outcome):
    assert isinstance(outcome, Measurement), outcome
    return outcome


def test_a_trial_on_the_gpu_tells_how_busy_it_was_and_what_memory_it_took(runner):
    outcome = sound(runner.run(config(2, batch_size=1024, pin_memory=True, amp=Amp.BF16), LONG, compute_only=True))
    assert outcome.gpu.samples >= 3
    assert 0 < outcome.gpu.mean_percent <= 100
    assert outcome.gpu_reason is None
    parameters = 4 * (2048 * 4096 + 4096 * 4096)
    assert 3 * parameters < outcome.peak_gpu_memory_bytes < 4 * 2**30  # weights, gradients, momentum
    assert outcome.compute_only_samples_per_sec > 0


def test_windows_too_short_for_nvml_give_a_reason_and_never_a_zero(runner):
    outcome = sound(runner.run(config(0), SHORT))
    assert outcome.gpu is None
    assert "too short" in outcome.gpu_reason


def test_each_trial_has_a_peak_of_its_own(runner):
    large = sound(runner.run(config(0, batch_size=2048), SHORT)).peak_gpu_memory_bytes
    small = sound(runner.run(config(0, batch_size=8), SHORT)).peak_gpu_memory_bytes
    assert small < large


def probed(outcome):
    assert isinstance(outcome, StepProbe | LoaderProbe), outcome
    return outcome


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_probe_tells_memory_and_copies_by_size(runner, workers):
    small, large = (probed(runner.probe_step(config(workers, batch_size=size), seconds=0.3)) for size in (32, 2048))
    assert large.batch_bytes == 64 * small.batch_bytes == 2048 * (2048 * 4 + 8)
    # The batch and two layers of 4096 units are there for each sample.
    assert large.peak_gpu_memory_bytes - small.peak_gpu_memory_bytes > large.batch_bytes
    assert large.batch_s > small.batch_s > 0
    # 16 MiB at no more than 100 GB/s, whatever the bus; pinned memory needs no second copy.
    assert large.copy_s > large.pinned_copy_s > large.batch_bytes / 100e9
    assert small.copy_s > 0
    assert small.pinned_copy_s > 0


def test_a_step_probe_has_a_peak_of_its_own(runner):
    large, small = (probed(runner.probe_step(config(0, batch_size=size), seconds=0.1)) for size in (2048, 32))
    assert small.peak_gpu_memory_bytes < large.peak_gpu_memory_bytes


def test_pinning_is_work_of_the_main_process(runner):
    plain, pinned = (
        probed(runner.probe_loader(config(2, batch_size=512, pin_memory=pin), seconds=1.0)) for pin in (False, True)
    )
    assert pinned.receive_s > plain.receive_s > 0


def test_a_step_that_does_not_fit_is_a_failed_probe_and_the_next_one_is_sound(runner):
    outcome = runner.probe_step(config(2, batch_size=256), seconds=0.1)
    assert isinstance(outcome, TrialFailure)
    assert (outcome.kind, outcome.phase) == (FailureKind.GPU_OUT_OF_MEMORY, Phase.PROBE)
    probed(runner.probe_step(config(2, batch_size=128), seconds=0.1))


@pytest.mark.parametrize("amp", [Amp.FP16, Amp.BF16])
def test_reduced_precision_is_a_sound_trial(runner, amp):
    sound(runner.run(config(0, batch_size=32, amp=amp), SHORT))


def test_out_of_memory_is_confirmed_once_in_a_fresh_host(runner, folder):
    sound(runner.run(config(2, batch_size=32), SHORT))
    hosts_before = len(list((folder / "logs").iterdir()))
    outcome = runner.run(config(2, batch_size=256), SHORT)
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind is FailureKind.GPU_OUT_OF_MEMORY
    assert outcome.phase is Phase.WARM_UP
    assert "out of memory" in outcome.message
    assert len(list((folder / "logs").iterdir())) == hosts_before + 1
    sound(runner.run(config(2, batch_size=128), SHORT))


def test_a_broken_context_harms_its_own_trial_only(runner):
    outcomes = [runner.run(config(0, batch_size=size), SHORT) for size in (32, 64, 128)]
    sound(outcomes[0])
    sound(outcomes[2])
    assert isinstance(outcomes[1], TrialFailure)
    assert outcomes[1].kind is FailureKind.ERROR
    assert "device-side assert" in outcomes[1].message + outcomes[1].log_tail


def test_cuda_in_forked_workers_is_told_in_torchs_words(tmp_path):
    with hosts(tmp_path, JOB, device="cuda", timeouts=TIMEOUTS, options={"dataset": "on_gpu"}) as runner:
        outcome = runner.run(config(1), SHORT)
    assert isinstance(outcome, TrialFailure)
    assert outcome.kind is FailureKind.ERROR
    assert "Cannot re-initialize CUDA in forked subprocess" in outcome.headline()


def test_the_clock_waits_for_the_gpu(tmp_path):
    with hosts(tmp_path, JOB, function="build_napping", device="cuda", timeouts=TIMEOUTS) as runner:
        outcome = sound(runner.run(config(0, batch_size=8), MeasureLimits(min_s=1.0, max_s=2.0, window_s=0.3)))
    (kernel_s,) = map(float, lines(tmp_path / "kernel_s"))
    assert outcome.steady().value == pytest.approx(8 / kernel_s, rel=0.05)
    # A runner that was not asked to describe the workload finds the GPU all the same.
    assert outcome.gpu is not None
