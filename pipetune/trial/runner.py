"""The parent's side of a trial: hosts, limits, and the GPU's side of the measurement."""

import dataclasses
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipetune.core.cache import ReadAhead
from pipetune.core.facts import Preparation, WorkloadFacts
from pipetune.core.measurement import FailureKind, Phase, TrialFailure, TrialOutcome
from pipetune.core.probes import LoaderProbe, Probe, StepProbe
from pipetune.core.samples import SampleAgreement, SampleComparison, SampleDigests, compare
from pipetune.core.space import TrialConfig
from pipetune.core.study import CachePolicy, Isolation, WorkloadSpec
from pipetune.errors import WorkloadError
from pipetune.hardware.host import available_memory_bytes
from pipetune.trial.gpu_watch import GpuWatch
from pipetune.trial.guards import classify_exit, describe_exit
from pipetune.trial.process import HostDiedError, HostProcess
from pipetune.trial.protocol import (
    Answer,
    FailedEvent,
    LoaderProbeRequest,
    MeasuredEvent,
    MeasureLimits,
    PhaseEvent,
    ProbedEvent,
    ProbeRequest,
    ReadAheadEvent,
    ReadAheadRequest,
    ReadPart,
    ReadSamplesRequest,
    ReadyEvent,
    RefusedEvent,
    SamplesEvent,
    SetUpRequest,
    StepProbeRequest,
    Task,
    TrialRequest,
)

TICK_S = 0.5


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

    def prepare(
        self, config: TrialConfig, *, dataset_samples: int | None, compare_s: float, read_ahead_s: float
    ) -> Preparation:
        """Compare samples with and without workers, and read ahead, each for so many seconds at most.

        `config` says how many workers do it, and in which batches.
        """
        ...

    def probe_step(self, config: TrialConfig, *, seconds: float) -> StepProbe | TrialFailure:
        """Time the step alone for about `seconds`, on one batch; whole optimizer steps of this accumulation."""
        ...

    def probe_loader(self, config: TrialConfig, *, seconds: float) -> LoaderProbe | TrialFailure:
        """Time the loader alone, without training, for at least `seconds` once it gives batches."""
        ...

    def run(
        self, config: TrialConfig, limits: MeasureLimits, *, fresh: bool = False, compute_only: bool = False
    ) -> TrialOutcome:
        """Measure one configuration, in a process that nothing else used where `fresh`."""
        ...

    def close_hosts(self) -> None:
        """End every host; the next trial starts a new one."""
        ...


class _FailedTaskError(Exception):
    """A host could not do what it was asked to do before the trials."""

    def __init__(self, failure: TrialFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


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
        gpu_memory_headroom: float = 0.0,
        timeouts: TrialTimeouts | None = None,
        on_phase: Callable[[Phase], None] | None = None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._seed = seed
        self._log_folder = log_folder
        self._isolation = isolation
        self._is_cold = cache is CachePolicy.COLD
        self._headroom = gpu_memory_headroom
        self._timeouts = timeouts or TrialTimeouts()
        self._on_phase = on_phase or (lambda _: None)
        self._hosts: dict[bool, HostProcess] = {}
        self._started = 0
        self._gpu = GpuWatch()
        self._phase = Phase.START
        self._ahead: ReadAhead | None = None
        self._may_repeat = True
        self._samples_read = 0

    def describe(self) -> WorkloadFacts:
        """Start the serial host, which stays for the trials without workers."""
        return self._host(serial=True)[1]

    def prepare(
        self, config: TrialConfig, *, dataset_samples: int | None, compare_s: float, read_ahead_s: float
    ) -> Preparation:
        """Do it in the hosts that stay for the trials; one that fails does not keep the other from being done."""
        comparison, failure = None, None
        try:
            comparison = self._compared(config, compare_s) if config.num_workers else None
        except _FailedTaskError as failed:
            failure = failed.failure
        try:
            self._ahead = None if self._is_cold else self._read_ahead(config, dataset_samples, read_ahead_s)
        except _FailedTaskError as failed:
            failure = failure or failed.failure
        return Preparation(comparison=comparison, read_ahead=self._ahead, failure=failure)

    def _compared(self, config: TrialConfig, limit_s: float) -> SampleComparison:
        """What workers read against what is read without; a difference must not come of building anew."""
        serial = self._digests(ReadSamplesRequest(config=config, indices=None, limit_s=limit_s), serial=True)
        if not serial.indices or serial.is_random:
            return compare(serial, serial)
        request = ReadSamplesRequest(config=config, indices=serial.indices, limit_s=limit_s)
        workers = self._digests(request, serial=False)
        comparison = compare(serial, workers)
        if comparison.agreement is not SampleAgreement.DIFFERENT:
            return comparison
        self._close_host(serial=True)
        rebuilt = self._digests(dataclasses.replace(request, one_thread=True), serial=True)
        self._close_host(serial=True)
        return compare(serial, workers, rebuilt=rebuilt)

    def _digests(self, request: ReadSamplesRequest, *, serial: bool) -> SampleDigests:
        answer = self._ask(request, serial=serial)
        if isinstance(answer, TrialFailure):
            raise _FailedTaskError(answer)
        assert isinstance(answer, SamplesEvent)
        return answer.digests

    def _read_ahead(self, config: TrialConfig, dataset_samples: int | None, seconds: float) -> ReadAhead:
        request = ReadAheadRequest(
            config=config,
            dataset_samples=dataset_samples,
            seed=self._seed,
            seconds=seconds,
            memory_bytes=available_memory_bytes() // 2,
        )
        answer = self._ask(request, serial=config.num_workers == 0)
        if isinstance(answer, TrialFailure):
            raise _FailedTaskError(answer)
        assert isinstance(answer, ReadAheadEvent)
        return answer.read_ahead

    def probe_step(self, config: TrialConfig, *, seconds: float) -> StepProbe | TrialFailure:
        """Do it in the host that stays for the trials; running out of memory is confirmed once without others."""
        request = StepProbeRequest(config=config, seconds=seconds, part=self._part())
        probe = self._probed(request)
        if isinstance(probe, TrialFailure) and probe.kind.is_memory:
            self.close_hosts()
            probe = self._probed(request)
        assert isinstance(probe, StepProbe | TrialFailure)
        return probe

    def probe_loader(self, config: TrialConfig, *, seconds: float) -> LoaderProbe | TrialFailure:
        """Do it in the host that stays for the trials."""
        request = LoaderProbeRequest(config=config, seconds=seconds, cold=self._is_cold, part=self._part())
        probe = self._probed(request)
        assert isinstance(probe, LoaderProbe | TrialFailure)
        return probe

    def _probed(self, request: ProbeRequest) -> Probe | TrialFailure:
        answer = self._ask(request, serial=request.config.num_workers == 0)
        if isinstance(answer, TrialFailure):
            return answer
        assert isinstance(answer, ProbedEvent)
        self._samples_read += answer.samples
        return answer.probe

    def run(
        self, config: TrialConfig, limits: MeasureLimits, *, fresh: bool = False, compute_only: bool = False
    ) -> TrialOutcome:
        """Measure; running out of memory is confirmed once in a fresh host: it bars all that is larger."""
        fresh = fresh or self._isolation is Isolation.PROCESS
        stays_cold = self._is_cold or (self._ahead is not None and self._ahead.stays_cold)
        request = TrialRequest(
            config=config,
            limits=dataclasses.replace(limits, until_warm=not stays_cold),
            compute_only=compute_only,
            cold=self._is_cold,
        )
        outcome, is_disturbed = self._outcome(request, fresh=fresh)
        if is_disturbed and self._may_repeat:
            outcome, is_disturbed = self._outcome(request, fresh=fresh)
            # What is there each time is the machine as it is, and is told.
            self._may_repeat = not is_disturbed
        return outcome

    def _outcome(self, request: TrialRequest, *, fresh: bool) -> tuple[TrialOutcome, bool]:
        """What came of it, and whether others on its GPU, or heat, disturbed it."""
        if not fresh:
            outcome, is_disturbed = self._run_warm(request)
            if not isinstance(outcome, TrialFailure) or not outcome.kind.is_memory:
                return outcome, is_disturbed
        return self._run_fresh(request)

    def close_hosts(self) -> None:
        """End the hosts; the next trial starts new ones."""
        for serial in list(self._hosts):
            self._close_host(serial=serial)

    def _close_host(self, *, serial: bool) -> None:
        # Forgotten only once it is closed: a signal in between must not leave it behind.
        self._hosts[serial].close()
        del self._hosts[serial]

    def close(self) -> None:
        """End the hosts and leave NVML."""
        self.close_hosts()
        self._gpu.close()

    def _part(self) -> ReadPart | None:
        """The samples of the next trial: those in memory, or ones that nobody has read yet."""
        ahead = self._ahead
        if ahead is not None and ahead.bounds_samples:
            return ReadPart(first=0, count=ahead.samples, seed=self._seed)
        if ahead is not None and ahead.stays_cold:
            return ReadPart(first=ahead.samples + self._samples_read, count=None, seed=self._seed)
        return None

    def _run_warm(self, request: TrialRequest) -> tuple[TrialOutcome, bool]:
        request = dataclasses.replace(request, part=self._part())
        answer = self._ask(request, serial=request.config.num_workers == 0)
        if isinstance(answer, TrialFailure):
            return answer, False
        assert isinstance(answer, MeasuredEvent)
        self._samples_read += answer.samples
        return self._gpu.completed(answer.measurement, [host.pid for host in self._hosts.values()])

    def _ask(self, request: Task, *, serial: bool) -> Answer | TrialFailure:
        """The answer of a host, which is thrown away where it failed."""
        began = time.monotonic()
        try:
            host = self._waiting_host(serial=serial) or self._host(serial=serial)[0]
        except WorkloadError as error:
            return self._set_up_failure(request.config, error, began)
        answer = self._answer(host, request)
        if isinstance(answer, TrialFailure):
            self._hosts.pop(serial).kill()
        return answer

    def _run_fresh(self, request: TrialRequest) -> tuple[TrialOutcome, bool]:
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
        if not self._hosts:
            self._gpu.before_any_host()
        self._started += 1
        # A signal between the start of the process and our knowing of it would leave it behind.
        held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
        try:
            host = HostProcess(self._log_folder / f"host-{self._started}.log")
            self._hosts[serial] = host
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)
        try:
            host.send(
                SetUpRequest(
                    spec=self._spec,
                    device=self._device,
                    seed=self._seed,
                    serial=serial,
                    gpu_memory_headroom=self._headroom,
                )
            )
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
        self._gpu.found(facts)
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

    def _answer(self, host: HostProcess, request: Task) -> Answer | TrialFailure:
        began = time.monotonic()
        try:
            host.send(request)
            answer = self._wait_for_answer(host, request.config, began)
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
        if isinstance(answer, TrialFailure):
            return dataclasses.replace(answer, log_tail=host.log_tail())
        return answer

    def _wait_for_answer(self, host: HostProcess, config: TrialConfig, began: float) -> Answer | TrialFailure:
        heard = began
        while True:
            event = host.receive(TICK_S)
            now = time.monotonic()
            self._gpu.collect(now)
            if isinstance(event, Answer):
                return event
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
        if phase is Phase.MEASURE:
            self._gpu.window_ended()
        if phase is not self._phase:
            self._phase = phase
            self._on_phase(phase)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else "nothing"
