"""best.yaml, in and out. Reading needs neither pydantic nor torch: training code imports it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipetune.config import yaml
from pipetune.core.measurement import CacheState
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.throughput import Estimate
from pipetune.core.tuned import SCHEMA_VERSION, Ceiling, Measured, Status, TunedConfig
from pipetune.errors import ConfigError, InputError

_CHIP_COUNTERS = ("gpu_sm_percent", "gpu_tensor_percent", "gpu_memory_bandwidth_percent")
_HEADER = (
    "The {status} settings of the pipetune study {study!r}, measured on {where}.",
    'In training code: `tuned = pipetune.load("best.yaml")`, then `tuned.dataloader(dataset, shuffle=True)`.',
)


def write(path: Path, tuned: TunedConfig, *, keep_certified: bool = True) -> None:
    """Write it whole or not at all; a provisional result does not replace a certified one of the same study."""
    if keep_certified and tuned.status is Status.PROVISIONAL and _holds_certified(path, tuned):
        return
    where = tuned.hardware.get("gpu") or tuned.hardware.get("cpu")
    header = [line.format(status=tuned.status, study=tuned.provenance.get("study"), where=where) for line in _HEADER]
    yaml.write(path, to_mapping(tuned), header)


class ResultWriter:
    """Writes one study's results as they come; `replaces_older` lets the first replace whatever is there."""

    def __init__(self, path: Path, *, replaces_older: bool) -> None:
        self._path = path
        self._replaces_older = replaces_older

    def __call__(self, tuned: TunedConfig) -> None:
        """Write it."""
        write(self._path, tuned, keep_certified=not self._replaces_older)
        self._replaces_older = False


def to_mapping(tuned: TunedConfig) -> dict[str, Any]:
    """The file's keys in their order."""
    return {
        "schema_version": SCHEMA_VERSION,
        "status": tuned.status.value,
        **config_blocks(tuned.config),
        "changes_training": list(tuned.changes_training),
        "measured": best_measured_block(tuned),
        "baseline": {
            "config": flat_config(tuned.baseline_config),
            "measured": measured_block(tuned.baseline_measured),
        },
        "ceiling": ceiling_block(tuned.ceiling),
        "hardware": dict(tuned.hardware),
        "provenance": dict(tuned.provenance),
    }


def config_blocks(config: TrialConfig) -> dict[str, Any]:
    """The `dataloader` and `training` blocks."""
    return {
        "dataloader": {
            "batch_size": config.batch_size,
            "num_workers": config.num_workers,
            "prefetch_factor": config.prefetch_factor,
            "pin_memory": config.pin_memory,
            "persistent_workers": config.persistent_workers,
        },
        "training": {
            "effective_batch_size": config.effective_batch_size,
            "gradient_accumulation_steps": config.accumulation_steps,
            "amp": config.amp.value,
        },
    }


def flat_config(config: TrialConfig) -> dict[str, Any]:
    """One configuration as the config file's baseline writes it."""
    blocks = config_blocks(config)
    return {
        **blocks["dataloader"],
        "gradient_accumulation_steps": config.accumulation_steps,
        "amp": config.amp.value,
    }


def measured_block(measured: Measured) -> dict[str, Any]:
    """Figures with their intervals; utilisation is null beside a reason where it is not known."""
    utilization = measured.gpu_utilization_percent
    block: dict[str, Any] = {
        "effective_samples_per_sec": _estimate(measured.effective_samples_per_sec),
        "steady_samples_per_sec": _estimate(measured.steady_samples_per_sec),
        "gpu_utilization_percent": _estimate(utilization) if utilization else None,
    }
    if utilization is None:
        block["gpu_utilization_reason"] = measured.gpu_utilization_reason
    counters = {name: getattr(measured, name) for name in _CHIP_COUNTERS}
    block |= {name: _rounded(value) for name, value in counters.items() if value is not None}
    return block | {
        "data_wait_percent": _rounded(measured.data_wait_percent),
        "epoch_start_s": _rounded(measured.epoch_start_s),
        "peak_gpu_memory_bytes": measured.peak_gpu_memory_bytes,
        "host_memory_bytes": measured.host_memory_bytes,
        "cache": measured.cache.value if measured.cache else None,
        "stable": measured.stable,
    }


def best_measured_block(tuned: TunedConfig) -> dict[str, Any]:
    """The winner's figures, and how many times the baseline it is."""
    return measured_block(tuned.measured) | {"speedup": _rounded(tuned.speedup)}


def ceiling_block(ceiling: Ceiling | None) -> dict[str, Any] | None:
    """The rate that no loader setting can pass."""
    if ceiling is None:
        return None
    return {"samples_per_sec": _rounded(ceiling.samples_per_sec), "limit": ceiling.limit}


def read(path: Path | str) -> TunedConfig:
    """Raise ConfigError with every problem of the file, InputError where it is of a newer pipetune."""
    document = yaml.read(path)
    version = document.data.get("schema_version")
    if version is None:
        raise InputError(f"{path} is no result of pipetune (it has no schema_version); give a best.yaml")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version is {version!r}; this pipetune reads {SCHEMA_VERSION}: "
            "use the pipetune that wrote it, or tune again"
        )
    return _Reader(document).tuned()


class _Reader:
    """Takes the file apart, and keeps every problem until the end."""

    def __init__(self, document: yaml.Document) -> None:
        self._document = document
        self._problems: list[str] = []

    def tuned(self) -> TunedConfig:
        status = self._get(("status",), str)
        if status is not None and status not in list(Status):
            self._problem(("status",), f"found {yaml.shown(status)}; expected {', '.join(Status)}")
        config = self._config(("dataloader",), ("training",))
        baseline = self._config(("baseline", "config"), ("baseline", "config"), says_effective=False)
        measured = self._measured(("measured",))
        baseline_measured = self._measured(("baseline", "measured"))
        changes = self._get(("changes_training",), list) or []
        hardware = self._get(("hardware",), dict) or {}
        provenance = self._get(("provenance",), dict) or {}
        ceiling = self._ceiling()
        if self._problems or config is None or baseline is None or measured is None or baseline_measured is None:
            raise ConfigError(self._document.source, self._problems)
        return TunedConfig(
            status=Status(str(status)),
            config=config,
            changes_training=tuple(str(change) for change in changes),
            measured=measured,
            baseline_config=baseline,
            baseline_measured=baseline_measured,
            ceiling=ceiling,
            hardware=hardware,
            provenance=provenance,
        )

    def _config(
        self, loader: yaml.KeyPath, training: yaml.KeyPath, *, says_effective: bool = True
    ) -> TrialConfig | None:
        batch = self._count((*loader, "batch_size"), least=1)
        steps = self._count((*training, "gradient_accumulation_steps"), least=1)
        values = {
            "num_workers": self._count((*loader, "num_workers"), least=0),
            "pin_memory": self._get((*loader, "pin_memory"), bool),
            "persistent_workers": self._get((*loader, "persistent_workers"), bool),
            "batch_size": batch,
            "accumulation_steps": steps,
            "amp": self._amp((*training, "amp")),
        }
        prefetch = self._get((*loader, "prefetch_factor"), int, optional=True)
        if says_effective:
            effective = self._get((*training, "effective_batch_size"), int)
            if effective is not None and batch is not None and steps is not None and effective != batch * steps:
                self._problem(
                    (*training, "effective_batch_size"),
                    f"is {effective}, but batch_size {batch} x gradient_accumulation_steps {steps} is {batch * steps}",
                )
        if any(value is None for value in values.values()):
            return None
        try:
            return TrialConfig(prefetch_factor=prefetch, **values)
        except InputError as error:
            self._problem(loader, str(error))
            return None

    def _count(self, path: yaml.KeyPath, *, least: int) -> int | None:
        value = self._get(path, int)
        if value is not None and value < least:
            self._problem(path, f"found {value}; expected {least} or more")
            return None
        return value  # type: ignore[no-any-return]

    def _amp(self, path: yaml.KeyPath) -> Amp | None:
        value = self._get(path, str)
        if value is None:
            return None
        if value not in list(Amp):
            self._problem(path, f"found {yaml.shown(value)}; expected {', '.join(Amp)}")
            return None
        return Amp(value)

    def _measured(self, path: yaml.KeyPath) -> Measured | None:
        effective = self._estimate((*path, "effective_samples_per_sec"), is_rate=True)
        steady = self._estimate((*path, "steady_samples_per_sec"), is_rate=True)
        wait = self._get((*path, "data_wait_percent"), float)
        start = self._get((*path, "epoch_start_s"), float)
        utilization = self._estimate((*path, "gpu_utilization_percent"), optional=True)
        reason = self._get((*path, "gpu_utilization_reason"), str, optional=True)
        peak = self._get((*path, "peak_gpu_memory_bytes"), int, optional=True)
        host = self._get((*path, "host_memory_bytes"), int, optional=True)
        cache = self._get((*path, "cache"), str, optional=True)
        if cache is not None and cache not in list(CacheState):
            self._problem((*path, "cache"), f"found {yaml.shown(cache)}; expected {', '.join(CacheState)} or null")
            return None
        # Not in files of the first versions.
        stable = self._get((*path, "stable"), bool, optional=True)
        counters = {name: self._get((*path, name), float, optional=True) for name in _CHIP_COUNTERS}
        if effective is None or steady is None or wait is None or start is None:
            return None
        return Measured(
            effective_samples_per_sec=effective,
            steady_samples_per_sec=steady,
            gpu_utilization_percent=utilization,
            gpu_utilization_reason=reason,
            data_wait_percent=wait,
            epoch_start_s=start,
            peak_gpu_memory_bytes=peak,
            host_memory_bytes=host,
            cache=CacheState(cache) if cache is not None else None,
            stable=stable is not False,
            **counters,
        )

    def _estimate(self, path: yaml.KeyPath, *, optional: bool = False, is_rate: bool = False) -> Estimate | None:
        block = self._get(path, dict, optional=optional)
        if block is None:
            return None
        value = self._rate((*path, "value")) if is_rate else self._get((*path, "value"), float)
        low, high = (self._get((*path, part), float) for part in ("low", "high"))
        if value is None or low is None or high is None:
            return None
        return Estimate(value=value, low=low, high=high)

    def _rate(self, path: yaml.KeyPath) -> float | None:
        value = self._get(path, float)
        if value is not None and not 0 < value < math.inf:
            self._problem(path, f"found {yaml.shown(value)}; expected a number above 0")
            return None
        return value  # type: ignore[no-any-return]

    def _ceiling(self) -> Ceiling | None:
        if self._get(("ceiling",), dict, optional=True) is None:
            return None
        rate = self._rate(("ceiling", "samples_per_sec"))
        limit = self._get(("ceiling", "limit"), str)
        return None if rate is None or limit is None else Ceiling(samples_per_sec=rate, limit=limit)

    def _get(self, path: yaml.KeyPath, kind: type, *, optional: bool = False) -> Any:
        """The value at a path, or None with a problem noted where it is missing or of another type."""
        value: Any = self._document.data
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            if not optional:
                self._problem(path, f"is missing; expected {_NAMES[kind]}")
            return None
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self._problem(path, f"found {yaml.shown(value)}; expected {_NAMES[kind]}")
            return None
        return value

    def _problem(self, path: yaml.KeyPath, text: str) -> None:
        line = self._document.line(path)
        place = f"line {line}: " if line is not None else ""
        self._problems.append(f"{place}{yaml.shown_path(path)}: {text}")


_NAMES: Mapping[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "keys with values",
    list: "a list",
}


def _holds_certified(path: Path, tuned: TunedConfig) -> bool:
    if not path.is_file():
        return False
    try:
        older = read(path)
    except InputError:
        return False
    is_same = all(older.provenance.get(key) == tuned.provenance.get(key) for key in ("study", "optuna_study"))
    return is_same and older.status is not Status.PROVISIONAL


def _estimate(estimate: Estimate) -> dict[str, float | None]:
    return {
        "value": _rounded(estimate.value),
        "low": _rounded(estimate.low),
        "high": _rounded(estimate.high),
    }


def _rounded(value: float) -> float:
    """Six significant digits: more would only pretend."""
    return float(f"{value:.6g}")
