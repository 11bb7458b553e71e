"""Real trials in real hosts: a workload file, a runner over it, and what is left of its processes."""

import contextlib
import os
import textwrap
import time

import psutil
from builders import trial_config

from pipetune.core.study import WorkloadSpec
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.runner import HostRunner, TrialTimeouts

LIMITS = MeasureLimits(min_s=0.3, max_s=0.6, window_s=0.05, warm_up_s=0.05)
QUICK = MeasureLimits(min_s=0.1, max_s=0.2, window_s=0.03, warm_up_s=0.02)
TIMEOUTS = TrialTimeouts(set_up_s=60.0, stall_s=20.0, total_s=60.0)

PRELUDE = """
import os, queue, signal, subprocess, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
import pipetune

HERE = Path(__file__).parent
torch.set_num_threads(1)  # models this small gain nothing from more, and a busy machine makes them wait for each other

class Rows(Dataset):
    def __init__(self, length=256, sleep_s=0.0):
        self.length, self.sleep_s = length, sleep_s
    def __len__(self):
        return self.length
    def __getitem__(self, index):
        time.sleep(self.sleep_s)
        return torch.full((8,), float(index)), index % 2

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2))

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0] / 256), batch[1])

def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

def workload(**parts):
    if not {"loader", "make_loader"} & set(parts):
        parts.setdefault("dataset", Rows())
    if "train_step" not in parts:
        parts.setdefault("loss", loss)
    return pipetune.Workload(**{"model": net(), "optimizer": sgd} | parts)
"""


@contextlib.contextmanager
def hosts(folder, code, *, function="build", options=None, device="cpu", **settings):
    """A runner over `job.py` with the prelude and this code; everything is ended on the way out."""
    (folder / "job.py").write_text(PRELUDE + textwrap.dedent(code))
    spec = WorkloadSpec(target=f"job.py:{function}", options=options or {}, folder=str(folder))
    settings = {"timeouts": TIMEOUTS} | settings
    runner = HostRunner(spec, device=device, seed=0, log_folder=folder / "logs", **settings)
    try:
        yield runner
    finally:
        runner.close()


def config(num_workers=0, *, batch_size=4, accumulation_steps=1, **changes):
    return trial_config(
        num_workers,
        batch_size=batch_size,
        accumulation_steps=accumulation_steps,
        **{"persistent_workers": False} | changes,
    )


def lines(file):
    """What a workload wrote into a file, a line each."""
    return file.read_text().splitlines() if file.exists() else []


def host_pids(runner):
    return [host.pid for host in runner._hosts.values()]


def family(session_id):
    """Living processes of a host's session, its workers included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def left_after(seconds, look):
    """What `look` still finds after so many seconds at most."""
    deadline = time.monotonic() + seconds
    while (found := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found
