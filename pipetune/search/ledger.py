"""What a study has seen and said so far: its trials in order of merit, its baseline, its notes and its cost."""

from collections.abc import Callable
from math import exp

from pipetune.core.measurement import TrialFailure
from pipetune.core.needs import Memory, Needs, Room, memory_of
from pipetune.core.objective import Objective
from pipetune.core.probes import Probe, ProbeKind
from pipetune.core.record import StudySummary, TrialRecord, TrialState
from pipetune.core.repeats import CONTENDING, PRIOR, margin, pooled
from pipetune.core.space import SearchSpace, TrialConfig
from pipetune.search.failures import is_beyond
from pipetune.search.ranking import Yardstick, ranked, search_noise
from pipetune.search.setting import Setting

OTHER_LOAD_CPUS = 0.3
"""From this much work of other programs on, the study says that it does not measure alone."""
RACE_SHARE = 0.9
"""A trial that cannot reach this share of the best is ended early."""


class Ledger:
    """The trials as the storage has them, with what this run adds.

    `space` grows where the search widens it. `bars_workers` once workers were found to read other samples.
    `alternatives` stand around what was chosen in the end, `importances` are Optuna's of the knobs, and `demand` is
    what the chosen step asks of the loader.
    """

    def __init__(self, setting: Setting, *, space: SearchSpace, baseline: TrialConfig) -> None:
        self._setting = setting
        self._notes: list[str] = []
        self._first_number = setting.store.trial_count()
        earlier = setting.store.summary()
        self._earlier_notes = earlier.notes if earlier else ()
        self.space = space
        self.baseline = baseline
        self.bars_workers = False
        self._probed: tuple[Probe | TrialFailure, ...] = setting.store.probes()
        self.probes_s = earlier.probes_s if earlier else 0.0
        self.alternatives = earlier.alternatives if earlier else ()
        self.importances = earlier.importances if earlier else {}
        self.demand = earlier.demand if earlier else None

    def records(self) -> tuple[TrialRecord, ...]:
        """Every finished trial, in order, those of earlier runs too."""
        return self._setting.store.records()

    def records_of_this_run(self) -> list[TrialRecord]:
        """Without those of earlier runs."""
        return [record for record in self.records() if record.number >= self._first_number]

    def is_old_failure(self, record: TrialRecord) -> bool:
        """Whether an earlier run met it in code that may have been repaired since."""
        return record.number < self._first_number and record.state is TrialState.FAILED

    def tried(self) -> dict[TrialConfig, TrialRecord]:
        """The first trial of each configuration that need not be measured again."""
        beaten = self._beaten_rate()
        found: dict[TrialConfig, TrialRecord] = {}
        for record in self.records():
            if not self.is_old_failure(record) and not _may_still_win(record, beaten):
                found.setdefault(record.config, record)
        return found

    def _beaten_rate(self) -> float:
        """What a trial that was ended early would have to reach, were it raced against the best of now."""
        best = self.best_first()
        if not best or best[0].measurement is None:
            return 0.0
        return self._race_share() * best[0].measurement.effective(self._setting.plan).low

    def _race_share(self) -> float:
        """The share of the best that a trial has to be able to reach, noise between trials allowed for."""
        noise = pooled(PRIOR, search_noise(self.records(), self.yardstick()))
        return min(RACE_SHARE, exp(-margin(noise, rounds=1, confidence=CONTENDING)))

    def least_rate(self) -> float | None:
        """What the next trial of the search has to be able to reach; None where none ran, or more than rates count."""
        is_rate = self._setting.config.objective is Objective.THROUGHPUT
        return (self._beaten_rate() or None) if is_rate else None

    @property
    def probes(self) -> tuple[Probe, ...]:
        """Those of the kinds that are asked for; an earlier run may have made others."""
        kinds = self._setting.config.probes
        return tuple(one for one in self._probed if not isinstance(one, TrialFailure) and one.kind in kinds)

    @property
    def unfit_probes(self) -> tuple[TrialFailure, ...]:
        """Steps that did not fit when they were probed."""
        asked = ProbeKind.STEP in self._setting.config.probes
        return tuple(one for one in self._probed if isinstance(one, TrialFailure) and asked)

    def keep_probe(self, probe: Probe | TrialFailure) -> None:
        """Keep it with the study."""
        self._probed = (*self._probed, probe)
        self._setting.store.keep_probes(self._probed)

    def missing_memory(self) -> Callable[[TrialConfig], Memory | None]:
        """Tells which kind of memory a configuration needs more of than there is, as far as probes saw."""
        needs, room, unfit = Needs.of(self.probes), room_of(self._setting), self.unfit_probes

        def missing(config: TrialConfig) -> Memory | None:
            met = next((one for one in unfit if is_beyond(config, one)), None)
            return needs.missing(config, room) if met is None else memory_of(met.kind)

        return missing

    def candidates(self) -> tuple[TrialRecord, ...]:
        """Trials of what may win, none that was ended early. The baseline is compared with, whatever it is."""
        whole = (r for r in self.records() if r.measurement is None or not r.measurement.censored)
        return tuple(
            r for r in whole if not self.bars_workers or r.config.num_workers == 0 or r.config == self.baseline
        )

    def best_first(self) -> list[TrialRecord]:
        """Measured configurations that may win in the order of the objective, repeats pooled."""
        return ranked(self.candidates(), self.yardstick())

    def yardstick(self) -> Yardstick:
        """What measurements are compared by."""
        return Yardstick(
            objective=self._setting.config.objective, plan=self._setting.plan, baseline_rate=self.baseline_rate()
        )

    def baseline_rate(self, default: float = 1.0) -> float:
        """The baseline's rate; where it did not run, the first that did stands in for it."""
        measured = [(record.config, record.measurement) for record in self.records() if record.measurement is not None]
        # A stable sort: the first of the baseline that was not ended early, or else the first of all.
        for _, measurement in sorted(measured, key=lambda pair: (pair[0] != self.baseline, pair[1].censored)):
            return measurement.effective(self._setting.plan).value
        return default

    def note(self, text: str) -> None:
        """Tell it now, and keep it with the study."""
        self._notes.append(text)
        self._setting.progress.note(text)

    def note_other_load(self, busy: float) -> None:
        """Tell of CPUs that were busy while no trial ran: whatever they did was not ours."""
        if busy >= OTHER_LOAD_CPUS:
            self.note(
                f"other programs keep {busy:.1f} of {self._setting.hardware.cpus_present} CPUs busy: what is best "
                "beside them may not be best without them"
            )

    def keep_summary(self) -> StudySummary:
        """Keep what is known of the study beside its trials."""
        summary = StudySummary(
            study=self._setting.config.study,
            plan=self._setting.plan,
            space_size=len(self.space),
            most_workers=self.space.num_workers[-1],
            workers_limit=self._setting.hardware.cpus_limit,
            notes=tuple(dict.fromkeys([*self._earlier_notes, *self._notes])),
            seconds=self._setting.spending.seconds(),
            alternatives=self.alternatives,
            importances=self.importances,
            demand=self.demand,
            probes_s=self.probes_s,
        )
        self._setting.store.keep_summary(summary)
        return summary


def room_of(setting: Setting) -> Room:
    """What trials may use of this machine: all memory, and of the GPU's what the headroom leaves."""
    hardware = setting.hardware
    # NVML puts a prefix before what torch calls the UUID.
    uuid = (setting.facts.device_uuid or "none").removeprefix("GPU-")
    gpu_bytes = next((gpu.memory_bytes for gpu in hardware.gpus if gpu.uuid.removeprefix("GPU-") == uuid), None)
    return Room(
        gpu_bytes=None if gpu_bytes is None else round(gpu_bytes * (1 - setting.config.gpu_memory_headroom)),
        shared_bytes=hardware.shared_memory_bytes,
        host_bytes=hardware.memory_bytes,
    )


def _may_still_win(record: TrialRecord, beaten_rate: float) -> bool:
    """Whether a trial was ended early for a best that was not so good after all, or cannot win any more."""
    measurement = record.measurement
    return measurement is not None and measurement.censored and measurement.steady().value >= beaten_rate
