"""The trial host: a process that builds the user's workload once and measures the trials it is asked for.

Started through trial.entry; requests come on standard input, events go to a file descriptor. A forking host
never touches the dataset itself; a serial one never starts a worker.
"""

import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import scipy.stats  # noqa: F401 - the loop needs it, and must not wait for its import

from pipetune.core.measurement import FailureKind, Measurement, Phase, TrialFailure
from pipetune.core.samples import SampleDigests
from pipetune.core.space import TrialConfig
from pipetune.errors import PipetuneError
from pipetune.hardware.host import tree_memory_bytes, usable_cpus
from pipetune.training.workload import Workload
from pipetune.trial import device as devices
from pipetune.trial.cache import evict, read_ahead
from pipetune.trial.facts import facts_of, first_batch
from pipetune.trial.feed import DataEndedError, Feed
from pipetune.trial.guards import classify_error, classify_exit
from pipetune.trial.loader import build_loader
from pipetune.trial.loop import Loop, compute_only_rate
from pipetune.trial.probes import one_batch_loader, only_batch, probe_loader, probe_step
from pipetune.trial.protocol import (
    Event,
    FailedEvent,
    LoaderProbeRequest,
    MeasuredEvent,
    PhaseEvent,
    ProbedEvent,
    ProbeRequest,
    ReadAheadEvent,
    ReadAheadRequest,
    ReadSamplesRequest,
    ReadyEvent,
    RefusedEvent,
    SamplesEvent,
    SetUpRequest,
    StepProbeRequest,
    Task,
    TrialRequest,
    decode_request,
    encode,
)
from pipetune.trial.randomness import seed_on_host, undisturbed
from pipetune.trial.samples import serial_digests, worker_digests
from pipetune.trial.session import Session, check_module
from pipetune.trial.stream import NonFiniteLossError, NoStepError, Stream
from pipetune.trial.target import build_workload
from pipetune.trial.watch import MachineWatch

COMPUTE_ONLY_S = 1.0
"""How long the step is timed on one batch that lies on the device."""
SIGN_OF_LIFE_S = 1.0
"""How often the parent is told that a phase goes on."""


class Channel:
    """The way back to the parent, and the present phase with the time spent in each."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.phase = Phase.START
        self.phase_seconds: dict[str, float] = {}
        self._entered_s = self._told_s = time.monotonic()

    def send(self, event: Event) -> None:
        """Write one event; small lines arrive whole."""
        # What the user's code wrote into the pipe may lack the end of its line.
        data = b"\n" + encode(event)
        while data:
            data = data[os.write(self._descriptor, data) :]

    def enter(self, phase: Phase) -> None:
        """Note the phase and tell the parent, as a sign of life too."""
        now = time.monotonic()
        spent = self.phase_seconds.get(self.phase, 0.0)
        self.phase_seconds[self.phase] = spent + now - self._entered_s
        self.phase, self._entered_s = phase, now
        self.send(PhaseEvent(phase=phase))

    def sign_of_life(self) -> None:
        """Tell the parent that the present phase goes on; about once a second, however often this is called."""
        now = time.monotonic()
        if now - self._told_s >= SIGN_OF_LIFE_S:
            self._told_s = now
            self.send(PhaseEvent(phase=self.phase))

    def begin_trial(self) -> None:
        """Start a new account."""
        self.phase_seconds.clear()
        self._entered_s = time.monotonic()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptBatch:
    """The batch, on the host, that a step was last probed on: other precisions of its size need no loader."""

    batch_size: int
    batch: Any


class Host:
    """Answers requests one after another until they end."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._session: Session | None = None
        self._feed: Feed | None = None
        self._kept: _KeptBatch | None = None
        self._is_serial = False

    def serve(self, lines: Iterable[bytes]) -> None:
        """Read requests, one a line."""
        for line in lines:
            request = decode_request(line)
            if isinstance(request, SetUpRequest):
                self._channel.send(self._set_up(request))
            else:
                self._channel.send(self._answer(request))

    def _set_up(self, request: SetUpRequest) -> Event:
        try:
            self._channel.enter(Phase.BUILD)
            device = devices.resolve_device(request.device)
            devices.keep_free(device, request.gpu_memory_headroom)
            workload = build_workload(request.spec)
            check_module(workload.model)
            self._session = Session(workload, device, request.seed)
            self._session.rest()
            self._is_serial = request.serial
            first = None
            if request.serial:
                self._channel.enter(Phase.FIRST_SAMPLE)
                first = first_batch(workload)
            facts = facts_of(workload, device, first)
        except PipetuneError as error:
            return RefusedEvent(message=str(error), traceback_text="")
        except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is told, SystemExit too
            place = "building the workload" if self._channel.phase is Phase.BUILD else "reading its first sample"
            return RefusedEvent(
                message=f"workload.target: {request.spec.target} failed while {place}: {type(error).__name__}: {error}",
                traceback_text=_user_traceback(error),
            )
        return ReadyEvent(facts=facts)

    def _answer(self, request: Task) -> Event:
        assert self._session is not None
        began = time.monotonic()
        self._channel.begin_trial()
        try:
            return self._done(self._session, request, began)
        except BaseException as error:  # noqa: BLE001 - a trial that fails is an outcome, whatever it raised
            # torch raises anew for every further worker that dies, which would end this process in mid-sentence.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return FailedEvent(failure=self._failure(request.config, error, began))

    def _done(self, session: Session, request: Task, began: float) -> Event:
        if isinstance(request, TrialRequest):
            self._kept = None
            return self._measure(session, request, began)
        self._feed = None
        if isinstance(request, ProbeRequest):
            return self._probe(session, request, began)
        if isinstance(request, ReadAheadRequest):
            self._channel.enter(Phase.READ_AHEAD)
            return ReadAheadEvent(read_ahead=read_ahead(session.workload, request, self._channel.sign_of_life))
        self._channel.enter(Phase.COMPARE_SAMPLES)
        return SamplesEvent(digests=self._digests(session.workload, request))

    def _digests(self, workload: Workload, request: ReadSamplesRequest) -> SampleDigests:
        if self._is_serial:
            return serial_digests(workload, request.indices, request.limit_s, one_thread=request.one_thread)
        return worker_digests(workload, request.indices or (), request.limit_s)

    def _probe(self, session: Session, request: ProbeRequest, began: float) -> ProbedEvent:
        self._channel.enter(Phase.PROBE)
        with undisturbed():
            seed_on_host(session.seed)
            if isinstance(request, LoaderProbeRequest):
                return self._probe_loader(session, request, began)
            return self._probe_step(session, request, began)

    def _probe_step(self, session: Session, request: StepProbeRequest, began: float) -> ProbedEvent:
        size, samples = request.config.batch_size, 0
        if self._kept is None or self._kept.batch_size != size:
            self._kept = None
            loader = one_batch_loader(session.workload, request.config, request.part)
            self._feed = Feed(loader, self._channel.sign_of_life)
            self._kept = _KeptBatch(batch_size=size, batch=only_batch(self._feed))
            samples = size
        batch, sign_of_life = self._kept.batch, self._channel.sign_of_life
        probe = probe_step(session, request.config, batch, request.seconds, sign_of_life, began=began)
        return ProbedEvent(probe=probe, samples=samples)

    def _probe_loader(self, session: Session, request: LoaderProbeRequest, began: float) -> ProbedEvent:
        config = request.config
        self._kept = None  # it lies in shared memory, which workers may need
        if request.cold:
            evict(session.workload.data_paths)
        loader, _ = build_loader(session.workload, config, request.part)
        self._feed = Feed(loader, self._channel.sign_of_life)
        probe = probe_loader(self._feed, config, request.seconds, began=began)
        if config.pin_memory:
            devices.release_memory(session.device)
        asked = 1 + probe.batches + config.num_workers * (config.prefetch_factor or 0)
        return ProbedEvent(probe=probe, samples=asked * config.batch_size)

    def _measure(self, session: Session, request: TrialRequest, began: float) -> MeasuredEvent:
        config, enter = request.config, self._channel.enter
        enter(Phase.PREPARE)
        training = session.begin(config)
        if request.cold:
            evict(session.workload.data_paths)
        loader, endless = build_loader(session.workload, config, request.part)
        stream = self._feed = Stream(loader, training, self._channel.sign_of_life)
        watch = MachineWatch(session.device, cpus=usable_cpus().count)
        result = Loop(stream, endless, config, request.limits, enter=enter, watch=watch).measure()
        retries = watch.allocation_retries()
        watch.close()
        host_memory = tree_memory_bytes(os.getpid())
        enter(Phase.CLOSE)
        # Not on the way out of a failure: the parent then ends this process with all its workers.
        stream.close()
        compute_only = None
        if request.compute_only:
            enter(Phase.COMPUTE_ONLY)
            compute_only = compute_only_rate(training, stream.last_batch, stream.last_samples, COMPUTE_ONLY_S)
        peak = devices.peak_memory_bytes(session.device)
        stream.last_batch = None
        session.rest()
        enter(Phase.CLOSE)
        measurement = Measurement(
            config=config,
            windows=result.windows,
            epoch_start=result.epoch_start,
            settled=result.settled,
            censored=result.censored,
            set_aside=result.set_aside,
            drained_samples=result.drained_samples,
            interference=watch.summary(),
            allocation_retries=retries,
            gpu=None,
            gpu_reason="not read yet",
            peak_gpu_memory_bytes=peak,
            host_memory_bytes=host_memory,
            compute_only_samples_per_sec=compute_only,
            seconds=time.monotonic() - began,
            phase_seconds=dict(self._channel.phase_seconds),
        )
        return MeasuredEvent(measurement=measurement, samples=stream.samples)

    def _failure(self, config: TrialConfig, error: BaseException, began: float) -> TrialFailure:
        message = f"{type(error).__name__}: {error}"
        kind = classify_error(type(error).__name__, str(error))
        code = self._feed.dead_worker_code() if self._feed is not None and not kind.is_memory else None
        if code is not None:
            # torch meets a worker's death in many ways, a reset connection among them; only the code tells which.
            end = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            message = f"{message}; a DataLoader worker {end}"
            kind = classify_exit(code, "")
        if isinstance(error, NonFiniteLossError):
            kind = FailureKind.NON_FINITE
        elif isinstance(error, NoStepError | DataEndedError):
            kind = FailureKind.INVALID_DATA
        return TrialFailure(
            config=config,
            kind=kind,
            phase=self._channel.phase,
            message=message,
            traceback_text=_user_traceback(error),
            seconds=time.monotonic() - began,
        )


def _user_traceback(error: BaseException) -> str:
    """The traceback as text, without the frames of this package that come first."""
    told = traceback.TracebackException.from_exception(error)
    own = str(Path(__file__).parent.parent)
    frames = list(told.stack)
    while frames and frames[0].filename.startswith(own):
        frames.pop(0)
    if frames:
        told.stack = traceback.StackSummary.from_list(frames)
    return "".join(told.format())
