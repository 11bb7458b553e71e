"""The parent's side of a trial: hosts, limits, and the GPU's side of the measurement."""

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipetune.core.facts import WorkloadFacts
from pipetune.core.measurement import FailureKind, GpuUsage, Measurement, Phase, TrialFailure, TrialOutcome
from pipetune.core.space import TrialConfig
from pipetune.core.study import CachePolicy, Isolation, WorkloadSpec
from pipetune.errors import WorkloadError
from pipetune.hardware.nvml import GpuSampler
from pipetune.trial.guards import classify_exit, describe_exit
from pipetune.trial.process import HostDiedError, HostProcess
from pipetune.trial.protocol import (
    FailedEvent,
    MeasuredEvent,
    MeasureLimits,
    PhaseEvent,
    ReadyEvent,
    RefusedEvent,
    SetUpRequest,
    TrialRequest,
)

TICK_S = 0.5
GPU_COLLECT_S = 3.0
"""NVML's buffer holds about 14 s of samples; it is read well before they are overwritten."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrialTimeouts:
    """Limits that are kept from outside: for the set-up, for silence, and for a whole trial."""

    set_up_s: float = 900.0
    stall_s: float = 90.0
    total_s: float = 300.0


class TrialRunner(Protocol):
    """Whatever can measure configurations: real hosts, or a scripted surface in tests."""

    def describe(self) -> WorkloadFacts:
        """Build the workload and read its first sample. Raises WorkloadError with the user's traceback."""
        ...

    def run(
        self, config: TrialConfig, limits: MeasureLimits, *, fresh: bool = False, compute_only: bool = False
    ) -> TrialOutcome:
        """Measure one configuration, in a process that nothing else used where `fresh`."""
        ...

    def close_hosts(self) -> None:
        """End every host; the next trial starts a new one."""
        ...


class HostRunner:
    """Runs trials in warm hosts: a serial one for 0 workers and a forking one for the rest.

    A host that failed is thrown away. `on_phase` is called in the parent as a trial goes on.
    """

    def __init__(
        self,
        spec: WorkloadSpec,
        *,
        device: str,
        seed: int,
        log_folder: Path,
        isolation: Isolation = Isolation.WARM,
        cache: CachePolicy = CachePolicy.WARM,
        timeouts: TrialTimeouts | None = None,
        on_phase: Callable[[Phase], None] | None = None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._seed = seed
        self._log_folder = log_folder
        self._isolation = isolation
        self._is_cold = cache is CachePolicy.COLD
        self._timeouts = timeouts or TrialTimeouts()
        self._on_phase = on_phase or (lambda _: None)
        self._hosts: dict[bool, HostProcess] = {}
        self._started = 0
        self._gpu: GpuSampler | None = None
        self._gpu_reason = "no GPU: trials ran on the CPU"
        self._collected_s = 0.0
        self._phase = Phase.START

    def describe(self) -> WorkloadFacts:
        """Start the serial host, which stays for the trials without workers."""
        return self._host(serial=True)[1]

    def run(
        self, config: TrialConfig, limits: MeasureLimits, *, fresh: bool = False, compute_only: bool = False
    ) -> TrialOutcome:
        """Measure; a first out-of-memory on the GPU is confirmed once in a fresh host."""
        fresh = fresh or self._isolation is Isolation.PROCESS
        request = TrialRequest(config=config, limits=limits, compute_only=compute_only, cold=self._is_cold)
        if not fresh:
            outcome = self._run_warm(request)
            is_memory = isinstance(outcome, TrialFailure) and outcome.kind is FailureKind.GPU_OUT_OF_MEMORY
            if not is_memory:
                return outcome
        return self._run_fresh(request)

    def close_hosts(self) -> None:
        """End the hosts; the next trial starts new ones."""
        for serial in list(self._hosts):
            # Forgotten only once it is closed: a signal in between must not leave it behind.
            self._hosts[serial].close()
            del self._hosts[serial]

    def close(self) -> None:
        """End the hosts and leave NVML."""
        self.close_hosts()
        if self._gpu is not None:
            self._gpu.close()

    def _run_warm(self, request: TrialRequest) -> TrialOutcome:
        is_serial = request.config.num_workers == 0
        began = time.monotonic()
        try:
            host = self._waiting_host(serial=is_serial) or self._host(serial=is_serial)[0]
        except WorkloadError as error:
            return self._set_up_failure(request.config, error, began)
        outcome = self._trial(host, request)
        if isinstance(outcome, TrialFailure):
            self._hosts.pop(is_serial).kill()
        return outcome

    def _run_fresh(self, request: TrialRequest) -> TrialOutcome:
        # What a resting host holds of the device must not count against this trial.
        self.close_hosts()
        try:
            return self._run_warm(request)
        finally:
            self.close_hosts()

    def _set_up_failure(self, config: TrialConfig, error: WorkloadError, began: float) -> TrialFailure:
        return TrialFailure(
            config=config,
            kind=FailureKind.ERROR,
            phase=self._phase,
            message=str(error).partition("\n\n")[0],
            traceback_text=error.traceback_text,
            seconds=time.monotonic() - began,
        )

    def _waiting_host(self, *, serial: bool) -> HostProcess | None:
        """The host that earlier trials left; one that died since then is nothing this trial did."""
        host = self._hosts.get(serial)
        if host is not None and host.has_ended():
            self._hosts.pop(serial).kill()
            return None
        return host

    def _host(self, *, serial: bool) -> tuple[HostProcess, WorkloadFacts]:
        if serial in self._hosts:
            self._hosts.pop(serial).close()
        self._started += 1
        # A signal between the start of the process and our knowing of it would leave it behind.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            host = HostProcess(self._log_folder / f"host-{self._started}.log")
            self._hosts[serial] = host
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        try:
            host.send(SetUpRequest(spec=self._spec, device=self._device, seed=self._seed, serial=serial))
            facts = self._wait_until_ready(host)
        except HostDiedError as died:
            self._hosts.pop(serial).kill()
            raise WorkloadError(
                f"workload.target: {self._spec.target}: {describe_exit(died.return_code)} "
                f"while it was being set up ({self._phase})",
                host.log_tail(),
            ) from None
        except WorkloadError:
            self._hosts.pop(serial).kill()
            raise
        if facts.has_accelerator and self._gpu is None:
            self._gpu = GpuSampler.open(facts.device_uuid, facts.device_pci_bus_id)
        return host, facts

    def _wait_until_ready(self, host: HostProcess) -> WorkloadFacts:
        deadline = time.monotonic() + self._timeouts.set_up_s
        while time.monotonic() < deadline:
            event = host.receive(TICK_S)
            if isinstance(event, PhaseEvent):
                self._enter(event.phase)
            elif isinstance(event, ReadyEvent):
                return event.facts
            elif isinstance(event, RefusedEvent):
                raise WorkloadError(event.message, event.traceback_text)
        raise WorkloadError(
            f"workload.target: {self._spec.target} was not built within {self._timeouts.set_up_s:.0f} s "
            f"(still in {self._phase})",
            host.log_tail(),
        )

    def _trial(self, host: HostProcess, request: TrialRequest) -> TrialOutcome:
        began = time.monotonic()
        try:
            host.send(request)
            outcome = self._wait_for_outcome(host, request.config, began)
        except HostDiedError as died:
            tail = host.log_tail()
            return TrialFailure(
                config=request.config,
                kind=classify_exit(died.return_code, tail),
                phase=self._phase,
                message=f"{describe_exit(died.return_code)}; it printed last: {_last_line(tail)}",
                log_tail=tail,
                seconds=time.monotonic() - began,
            )
        if isinstance(outcome, TrialFailure):
            return dataclasses.replace(outcome, log_tail=host.log_tail())
        return self._with_gpu(outcome)

    def _wait_for_outcome(self, host: HostProcess, config: TrialConfig, began: float) -> TrialOutcome:
        heard = began
        while True:
            event = host.receive(TICK_S)
            now = time.monotonic()
            self._collect_gpu(now)
            if isinstance(event, MeasuredEvent):
                return event.measurement
            if isinstance(event, FailedEvent):
                return event.failure
            if isinstance(event, PhaseEvent):
                heard = now
                self._enter(event.phase)
            if now - heard > self._timeouts.stall_s or now - began > self._timeouts.total_s:
                return self._timeout(config, silent_s=now - heard, seconds=now - began)

    def _timeout(self, config: TrialConfig, *, silent_s: float, seconds: float) -> TrialFailure:
        cause = (
            "a worker that blocks on a lock held when it was forked (try multiprocessing_context='spawn'), "
            "or a sample that never returns"
            if config.num_workers > 0
            else "a sample that never returns, or a step that is too slow here"
        )
        return TrialFailure(
            config=config,
            kind=FailureKind.TIMEOUT,
            phase=self._phase,
            message=f"ended after {seconds:.0f} s, the last {silent_s:.0f} of them without a sign of life; "
            f"likely: {cause}",
            seconds=seconds,
        )

    def _enter(self, phase: Phase) -> None:
        if phase is not self._phase:
            self._phase = phase
            self._on_phase(phase)

    def _collect_gpu(self, now: float) -> None:
        if self._gpu is not None and now - self._collected_s >= GPU_COLLECT_S:
            self._gpu.collect()
            self._collected_s = now

    def _with_gpu(self, measurement: Measurement) -> Measurement:
        usage: GpuUsage | str = self._gpu_reason
        if self._gpu is not None:
            self._gpu.collect()
            usage = self._gpu.usage([(w.began_s, w.began_s + w.seconds) for w in measurement.windows])
        if isinstance(usage, str):
            return dataclasses.replace(measurement, gpu=None, gpu_reason=usage)
        return dataclasses.replace(measurement, gpu=usage, gpu_reason=None)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "nothing"
