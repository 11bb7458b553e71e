"""Training as people write it, timed in a process of its own: what trials and winners are held against.

Run: python tests/benchmarks/plain.py    (the other benchmarks do; a JSON line in is a job, a JSON line out its answer)

It shares no code with pipetune but a workload's own dataset, model, loss and optimizer. It times

- steady: in mid-epoch, after all batches that were prefetched at the start, in whole optimizer steps; kernels are
  chosen before the loader is made, or the first steps would let it fill a queue that flatters what follows;
- effective: 3 epochs, from before the first iter() to the end of the last.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a plain process must not load what it is compared with
    from collections.abc import Sequence

    from pipetune.core.space import TrialConfig

EPOCHS = 3
WARM_UP_S = 1.0
WARM_UP_STEPS = 2
LEAST_STEPS = 3
"""Optimizer steps of the steady stretch, at least."""
LEAST_BURSTS = 4
"""Workers finish together, so batches come in bursts of num_workers: a stretch holds several of them."""
ENDLESS = 2**40
TIMEOUT_S = 240
CLOSE_S = 5
KNOBS = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "batch_size", "accumulation_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRates:
    """Samples per second of one configuration: in mid-epoch, and over whole epochs."""

    steady: float
    effective: float


class PlainLoop:
    """A loader, a model and an optimizer."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch

        torch.manual_seed(job["seed"])
        self.torch = torch
        self.workload = importlib.import_module(f"pipetune.workloads.{job['workload']}").build(**job["options"])
        self.device = torch.device(job["device"])
        self.model = self.workload.model.to(self.device).train()
        self.optimizer = self.workload.optimizer(self.model)

    def configure(self, config: dict[str, Any]) -> None:
        self.config = config
        self.accumulation = config["accumulation_steps"]
        self.effective = config["batch_size"] * self.accumulation
        self.dtype = {"fp32": None, "bf16": self.torch.bfloat16, "fp16": self.torch.float16}[config["amp"]]
        self.scaler = self.torch.amp.GradScaler(self.device.type, enabled=config["amp"] == "fp16")

    def loader(self, samples: int) -> Any:
        data = self.torch.utils.data
        with_workers = {}
        if self.config["num_workers"] > 0:
            with_workers = {name: self.config[name] for name in ("prefetch_factor", "persistent_workers")}
        return data.DataLoader(
            self.workload.dataset,
            batch_size=self.config["batch_size"],
            # A shortened epoch of the same dataset: it draws its order over all of it, as the full one does.
            sampler=data.RandomSampler(self.workload.dataset, num_samples=samples),
            num_workers=self.config["num_workers"],
            pin_memory=self.config["pin_memory"],
            collate_fn=self.workload.collate_fn,
            drop_last=True,
            **with_workers,
        )

    def train_on(self, batch: Any, *, is_last: bool) -> None:
        """One micro-batch; the optimizer steps after the last of a group."""
        pinned = self.config["pin_memory"]
        if isinstance(batch, list | tuple):
            batch = [part.to(self.device, non_blocking=pinned) for part in batch]
        else:
            batch = batch.to(self.device, non_blocking=pinned)
        with self.torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            loss = self.workload.loss(self.model, batch) / self.accumulation
        self.scaler.scale(loss).backward()
        if is_last:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            self.torch.cuda.synchronize()

    def warm_up(self) -> None:
        """Choose kernels and allocate the optimizer's state, without a loader."""
        for _ in range(WARM_UP_STEPS):
            self.train_on(self.batch(self.config["batch_size"]), is_last=True)
        self.synchronize()

    def batch(self, size: int) -> Any:
        collate = self.workload.collate_fn or self.torch.utils.data.default_collate
        return collate([self.workload.dataset[index] for index in range(size)])

    def steady_rate(self, seconds: float) -> float:
        """Samples per second in the middle of an epoch that does not end."""
        workers = self.config["num_workers"]
        least_warm = max(WARM_UP_STEPS, -(-workers * (self.config["prefetch_factor"] or 0) // self.accumulation))
        least = max(LEAST_STEPS, -(-LEAST_BURSTS * workers // self.accumulation))
        is_warm = False
        began, steps = time.perf_counter(), 0
        for number, batch in enumerate(self.loader(ENDLESS), start=1):
            self.train_on(batch, is_last=number % self.accumulation == 0)
            if number % self.accumulation:
                continue
            steps += 1
            passed_s = time.perf_counter() - began
            if not is_warm and steps >= least_warm and passed_s >= WARM_UP_S:
                self.synchronize()
                is_warm, began, steps = True, time.perf_counter(), 0
            elif is_warm and steps >= least and passed_s >= seconds:
                break
        self.synchronize()
        rate = steps * self.effective / (time.perf_counter() - began)
        del batch
        gc.collect()  # its workers are gone before the next loader starts its own
        return rate

    def effective_rate(self, epoch_samples: int) -> float:
        """Samples per second over whole epochs, their starts included."""
        loader = self.loader(epoch_samples)
        self.synchronize()
        began = time.perf_counter()
        for _ in range(EPOCHS):
            for number, batch in enumerate(loader, start=1):
                self.train_on(batch, is_last=number % self.accumulation == 0)
        self.synchronize()
        return EPOCHS * epoch_samples / (time.perf_counter() - began)

    def sample_seconds(self) -> float:
        """What reading one sample costs in this process."""
        length = len(self.workload.dataset)
        began, read = time.perf_counter(), 0
        while read < 8 or time.perf_counter() - began < 0.2:
            self.workload.dataset[read * 7919 % length]
            read += 1
        return (time.perf_counter() - began) / read

    def step_seconds(self, batch_size: int) -> float:
        """What training on one micro-batch costs, the second time."""
        batch = self.batch(batch_size)
        for _ in range(2):
            self.synchronize()
            began = time.perf_counter()
            self.train_on(batch, is_last=True)
            self.synchronize()
        return time.perf_counter() - began


def serve() -> None:
    """Be a plain process: build what the first line names, then answer one job a line."""
    loop = PlainLoop(json.loads(sys.stdin.readline()))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(probed(loop, job) if job["task"] == "probe" else timed(loop, job)), flush=True)


def timed(loop: PlainLoop, job: dict[str, Any]) -> dict[str, Any]:
    """The steady rate of a point, then its rate over whole epochs."""
    loop.configure(job["config"])
    loop.warm_up()
    steady = loop.steady_rate(job["seconds"])
    effective = loop.effective_rate(job["epoch_samples"])
    if loop.device.type == "cuda":
        # The trial's process wants the memory now.
        loop.optimizer.zero_grad(set_to_none=True)
        loop.torch.cuda.empty_cache()
    return {"steady": steady, "effective": effective}


def probed(loop: PlainLoop, job: dict[str, Any]) -> dict[str, Any]:
    """Costs to foretell from: a sample, and a micro-batch of the smallest and the largest size in each precision."""
    began = time.perf_counter()
    costs = {"sample_s": loop.sample_seconds(), "steps_s": {}}
    for amp in job["amps"]:
        loop.configure({"batch_size": 1, "accumulation_steps": 1, "amp": amp, "pin_memory": False})
        costs["steps_s"][amp] = [(size, loop.step_seconds(size)) for size in job["batch_sizes"]]
    return costs | {"probe_s": time.perf_counter() - began}


class PlainProcess:
    """This file as a process that answers one job after the other; `build` says of what, and on which device."""

    def __init__(self, build: dict[str, Any]) -> None:
        self._log = TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._send(build)

    def wait_until_ready(self) -> None:
        """Raises RuntimeError like `ask`."""
        self._answer()

    def ask(self, **job: Any) -> dict[str, Any]:
        """Raises RuntimeError with what it printed last where it ends, or takes too long and is ended."""
        self._send(job)
        answer: dict[str, Any] = self._answer()
        return answer

    def measure(self, config: TrialConfig, *, seconds: float, epoch_samples: int) -> PlainRates:
        """Time one configuration: `seconds` in mid-epoch, then EPOCHS epochs of so many samples. Raises like `ask`."""
        knobs = {name: getattr(config, name) for name in KNOBS} | {"amp": config.amp.value}
        answer = self.ask(task="measure", config=knobs, seconds=seconds, epoch_samples=epoch_samples)
        return PlainRates(steady=answer["steady"], effective=answer["effective"])

    def _answer(self) -> Any:
        watch = threading.Timer(TIMEOUT_S, self._process.kill)
        watch.daemon = True  # a signal may come before it is cancelled, and nobody is to wait for it then
        watch.start()
        try:
            assert self._process.stdout is not None
            answer = self._process.stdout.readline()
        finally:
            watch.cancel()
        if not answer:
            self._log.seek(0)
            raise RuntimeError(f"the plain process ended: {self._log.read().strip()[-800:]}")
        return json.loads(answer)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(timeout=CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _send(self, job: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()


def spread_percent(rates: Sequence[float]) -> float:
    """Half the range over the median."""
    return 50 * (max(rates) - min(rates)) / median(rates)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    serve()


if __name__ == "__main__":
    main()
