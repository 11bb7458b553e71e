"""A stream on a clock of its own: workers, their queue and a step that take the seconds that are scripted.

The true rate is known, and a minute of training takes milliseconds. What is simulated is torch's multi-process
loader: tasks go to the workers in turn, `num_workers * prefetch_factor` of them are under way, batches come in order.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import torch

from pipetune.trial.loader import EndlessSampler
from pipetune.trial.loop import Loop, Sight
from pipetune.trial.protocol import MeasureLimits
from pipetune.trial.stages import StageClock
from pipetune.trial.stream import Stream


class Clock:
    """Seconds that pass only when something says so."""

    def __init__(self):
        self.now_s = 0.0


@dataclass(kw_only=True)
class Script:
    """Seconds that each thing takes; `load_s` and `step_s` get the number of batches before, and the time.

    `start_s` is of a worker, `dispatch_s` of the main thread for each task it hands out.
    """

    load_s: object
    step_s: object = lambda number, now_s: 0.001  # noqa: ARG005
    start_s: float = 0.0
    dispatch_s: float = 0.0
    dataset_batches: int = 10**9
    cold_until_s: float = 0.0


@dataclass
class _Loader:
    script: Script
    config: object
    clock: Clock
    sampler: EndlessSampler
    loaded: int = 0
    kept: bool = False
    free_s: list = field(default_factory=list)

    def __iter__(self):
        return _Iterator(self)

    def load_s(self):
        self.loaded += 1
        return self.script.load_s(self.loaded - 1, self.clock.now_s)


class _Iterator:
    def __init__(self, loader):
        self._loader = loader
        self._items = iter(loader.sampler)
        config, clock = loader.config, loader.clock
        if config.num_workers and not (loader.kept and config.persistent_workers):
            loader.free_s = [clock.now_s + loader.script.start_s] * config.num_workers
            loader.kept = True
        self._turn = 0
        self.arrivals = deque()
        for _ in range(config.num_workers * (config.prefetch_factor or 0)):
            self._dispatch()

    def _dispatch(self):
        if next(self._items, None) is None:
            return
        self._loader.clock.now_s += self._loader.script.dispatch_s
        free_s = self._loader.free_s
        worker = self._turn % len(free_s)
        self._turn += 1
        free_s[worker] = max(free_s[worker], self._loader.clock.now_s) + self._loader.load_s()
        self.arrivals.append(free_s[worker])

    def __next__(self):
        clock = self._loader.clock
        if not self._loader.config.num_workers:
            next(self._items)
            clock.now_s += self._loader.load_s()
        elif not self.arrivals:
            raise StopIteration
        else:
            clock.now_s = max(clock.now_s, self.arrivals.popleft())
            self._dispatch()
        return "batch"


class _Training:
    """Counts as many samples as a batch is said to have; a step takes its scripted time."""

    device = torch.device("cpu")

    def __init__(self, script, config, clock):
        self._script, self._config, self._clock = script, config, clock
        self._steps = 0
        self.step = SimpleNamespace(optimizer_steps=1, losses_are_finite=lambda: True)
        self.clock = StageClock()

    def skipped_steps(self):
        return 0

    def count(self, _batch):
        return self._config.batch_size

    def weight(self, _batch):
        return None

    def on_device(self, batch):
        return batch

    def learn(self, _batch, _weight):
        self._clock.now_s += self._script.step_s(self._steps, self._clock.now_s)
        self._steps += 1


class ScriptedStream(Stream):
    """The real stream over a scripted loader, on the scripted clock."""

    def __init__(self, script, config):
        self.clock = Clock()
        self.endless = EndlessSampler(range(script.dataset_batches))
        loader = _Loader(script, config, self.clock, self.endless)
        super().__init__(loader, _Training(script, config, self.clock))

    def now(self):
        return self.clock.now_s

    def close(self):
        super().close()
        self.loader.kept = False

    def ready_batches(self):
        if not self.loader.config.num_workers:
            return None
        return sum(arrival_s <= self.clock.now_s for arrival_s in self._iterator.arrivals)


class Reader:
    """A watch that sees bytes come from storage until so many seconds have passed."""

    def __init__(self, clock, until_s):
        self._clock, self._until_s = clock, until_s
        self._looked_s = 0.0

    def begin(self, _worker_pids):
        self._looked_s = self._clock.now_s

    def look(self):
        looked_s, self._looked_s = self._looked_s, self._clock.now_s
        cold_s = max(0.0, min(self._clock.now_s, self._until_s) - looked_s)
        return Sight(read_bytes=int(cold_s * 50e6))


def measured(script, config, *, watch=None, **limits):
    """What the loop says of a scripted stream."""
    stream = ScriptedStream(script, config)
    watch = watch or Reader(stream.clock, script.cold_until_s)
    limits = MeasureLimits(**limits)
    return Loop(stream, stream.endless, config, limits, enter=lambda _: None, watch=watch).measure()


def trained_for_epochs(script, config, *, epochs, epoch_batches):
    """Seconds that these epochs take as people write the loop: the truth that effective rates are held against."""
    script = replace(script, dataset_batches=epoch_batches)
    stream = ScriptedStream(script, config)
    stream.endless.bound(epoch_batches)
    for _ in range(epochs):
        stream.start_epoch()
        stream.drain()
    return stream.now()
