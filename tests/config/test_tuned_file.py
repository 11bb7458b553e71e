"""best.yaml: what is written comes back, a better file is not overwritten, and a damaged one is told completely."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml as pyyaml
from builders import measured, trial_config
from commands import environment
from hypothesis import given
from hypothesis import strategies as st

from pipetune.config import tuned_file
from pipetune.core.space import Amp, TrialConfig
from pipetune.core.throughput import Estimate
from pipetune.core.tuned import Ceiling, Measured, Status, TunedConfig
from pipetune.errors import ConfigError, InputError

TUNED = TunedConfig(
    status=Status.CERTIFIED,
    config=trial_config(14, batch_size=256, accumulation_steps=2, amp=Amp.BF16, pin_memory=True),
    changes_training=(),
    measured=measured(2404.0, 14.0, gpu=98.7),
    baseline_config=trial_config(0, batch_size=64, accumulation_steps=8),
    baseline_measured=measured(295.0, 3.0, gpu=18.2),
    ceiling=Ceiling(samples_per_sec=2488.0, limit="compute"),
    hardware={"fingerprint": "0123abcd", "gpu": "NVIDIA H200", "cpus_usable": 16},
    provenance={"study": "photos", "trials": 11, "torch": "2.13.0", "flags": {"cudnn_benchmark": "False"}},
)
PROVISIONAL = replace(TUNED, status=Status.PROVISIONAL, config=trial_config(3))

FILE = """\
schema_version: 1
status: certified
dataloader:
  batch_size: 256
  num_workers: 14
  prefetch_factor: 2
  pin_memory: true
  persistent_workers: true
training:
  effective_batch_size: 512
  gradient_accumulation_steps: 2
  amp: bf16
changes_training: []
measured:
  effective_samples_per_sec: {value: 2404.0, low: 2390.1, high: 2418.8}
  steady_samples_per_sec: {value: 2420.3, low: 2410, high: 2430.5}
  gpu_utilization_percent: {value: 98.7, low: 98.1, high: 99.2}
  data_wait_percent: 0.5
  epoch_start_s: 1.25
  peak_gpu_memory_bytes: 20971520
  host_memory_bytes: null
  speedup: 8.15
baseline:
  config:
    batch_size: 64
    num_workers: 0
    prefetch_factor: null
    pin_memory: false
    persistent_workers: false
    gradient_accumulation_steps: 8
    amp: fp32
  measured:
    effective_samples_per_sec: {value: 295.0, low: 292.0, high: 298.0}
    steady_samples_per_sec: {value: 295.0, low: 292.0, high: 298.0}
    gpu_utilization_percent: null
    gpu_utilization_reason: no GPU
    data_wait_percent: 88.5
    epoch_start_s: 0
    peak_gpu_memory_bytes: null
    host_memory_bytes: null
ceiling: {samples_per_sec: 2488.0, limit: compute}
hardware: {fingerprint: 0123abcd, gpu: NVIDIA H200, cpus_usable: 16}
provenance: {study: photos, trials: 11}
"""


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    text = FILE
    for old, new in changes:
        assert text.count(old) >= 1, old
        text = text.replace(old, new, 1)
    path = folder / "best.yaml"
    path.write_text(text)
    return path


def problems(path: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        tuned_file.read(path)
    assert caught.value.source == str(path)
    return list(caught.value.problems)


# --- round trip ------------------------------------------------------------------------------------------------


def six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def rounded(figures: Measured) -> Measured:
    def one(estimate: Estimate | None) -> Estimate | None:
        if estimate is None:
            return None
        return Estimate(value=six_digits(estimate.value), low=six_digits(estimate.low), high=six_digits(estimate.high))

    return replace(
        figures,
        effective_samples_per_sec=one(figures.effective_samples_per_sec),
        steady_samples_per_sec=one(figures.steady_samples_per_sec),
        gpu_utilization_percent=one(figures.gpu_utilization_percent),
        data_wait_percent=six_digits(figures.data_wait_percent),
        epoch_start_s=six_digits(figures.epoch_start_s),
    )


positive = st.floats(1e-3, 1e9)
counts = st.integers(1, 4096)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | positive | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def estimates(draw, values=positive):
    low, value, high = sorted(draw(st.tuples(values, values, values)))
    return Estimate(value=value, low=low, high=high)


@st.composite
def configs(draw):
    workers = draw(st.integers(0, 512))
    return TrialConfig(
        num_workers=workers,
        prefetch_factor=draw(st.integers(1, 64)) if workers else None,
        pin_memory=draw(st.booleans()),
        persistent_workers=bool(workers) and draw(st.booleans()),
        batch_size=draw(counts),
        accumulation_steps=draw(counts),
        amp=draw(st.sampled_from(Amp)),
    )


@st.composite
def figures(draw):
    gpu = draw(st.none() | estimates(st.floats(0, 100)))
    return Measured(
        effective_samples_per_sec=draw(estimates()),
        steady_samples_per_sec=draw(estimates()),
        gpu_utilization_percent=gpu,
        gpu_utilization_reason=draw(texts) if gpu is None else None,
        data_wait_percent=draw(st.floats(0, 100)),
        epoch_start_s=draw(st.floats(0, 1e4)),
        peak_gpu_memory_bytes=draw(st.none() | st.integers(0, 2**50)),
        host_memory_bytes=draw(st.none() | st.integers(0, 2**50)),
    )


tuned_configs = st.builds(
    TunedConfig,
    status=st.sampled_from(Status),
    config=configs(),
    changes_training=st.lists(texts, max_size=3).map(tuple),
    measured=figures(),
    baseline_config=configs(),
    baseline_measured=figures(),
    ceiling=st.none() | st.builds(Ceiling, samples_per_sec=positive, limit=texts),
    hardware=st.dictionaries(texts, plain_values, max_size=4),
    provenance=st.dictionaries(texts, plain_values, max_size=4),
)


@given(tuned=tuned_configs)
def test_what_is_written_comes_back_to_six_digits(tmp_path_factory, tuned):
    # GIVEN any result
    path = tmp_path_factory.mktemp("round") / "best.yaml"

    # WHEN it is written and read
    tuned_file.write(path, tuned)
    found = tuned_file.read(path)

    # THEN it is the same, but for digits that nobody measured
    ceiling = tuned.ceiling and replace(tuned.ceiling, samples_per_sec=six_digits(tuned.ceiling.samples_per_sec))
    assert found == replace(
        tuned,
        measured=rounded(tuned.measured),
        baseline_measured=rounded(tuned.baseline_measured),
        ceiling=ceiling,
    )


@given(tuned=tuned_configs)
def test_writing_what_was_read_changes_nothing(tmp_path_factory, tuned):
    folder = tmp_path_factory.mktemp("again")
    tuned_file.write(folder / "one.yaml", tuned)
    tuned_file.write(folder / "two.yaml", tuned_file.read(folder / "one.yaml"))
    # The speedup is derived from rounded rates the second time.
    one, two = (
        [line for line in (folder / name).read_text().splitlines() if "speedup" not in line]
        for name in ("one.yaml", "two.yaml")
    )
    assert one == two


# --- what the file looks like ----------------------------------------------------------------------------------


def test_keys_stand_in_the_order_of_the_contract(tmp_path):
    path = tmp_path / "best.yaml"
    tuned_file.write(path, TUNED)
    data = pyyaml.safe_load(path.read_text())
    assert list(data) == [
        "schema_version",
        "status",
        "dataloader",
        "training",
        "changes_training",
        "measured",
        "baseline",
        "ceiling",
        "hardware",
        "provenance",
    ]
    assert list(data["dataloader"]) == [
        "batch_size",
        "num_workers",
        "prefetch_factor",
        "pin_memory",
        "persistent_workers",
    ]
    assert list(data["training"]) == ["effective_batch_size", "gradient_accumulation_steps", "amp"]
    assert list(data["measured"]["steady_samples_per_sec"]) == ["value", "low", "high"]
    wanted = ["effective_samples_per_sec", "steady_samples_per_sec", "gpu_utilization_percent", "speedup"]
    assert [key for key in data["measured"] if key in wanted] == wanted
    assert list(data["baseline"]) == ["config", "measured"]
    assert data["measured"]["speedup"] == pytest.approx(2404 / 295, rel=1e-5)


def test_two_comment_lines_say_what_it_is_and_how_to_use_it(tmp_path):
    path = tmp_path / "best.yaml"
    tuned_file.write(path, TUNED)
    lines = path.read_text().splitlines()
    assert [line.startswith("#") for line in lines[:3]] == [True, True, False]
    assert "certified" in lines[0]
    assert "'photos'" in lines[0]
    assert "NVIDIA H200" in lines[0]
    assert "pipetune.load(" in lines[1]


def test_without_a_gpu_utilisation_is_null_beside_a_reason(tmp_path):
    path = tmp_path / "best.yaml"
    tuned_file.write(path, replace(TUNED, measured=measured(100.0, gpu=None)))
    block = pyyaml.safe_load(path.read_text())["measured"]
    assert block["gpu_utilization_percent"] is None
    assert block["gpu_utilization_reason"] == "no GPU"


# --- which file gives way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [Status.CERTIFIED, Status.NO_GAIN])
def test_a_provisional_result_never_replaces_a_certified_one(tmp_path, status):
    # GIVEN a study's certified file
    path = tmp_path / "best.yaml"
    tuned_file.write(path, replace(TUNED, status=status))
    before = path.read_bytes()

    # WHEN the same study writes a provisional one
    tuned_file.write(path, PROVISIONAL)

    # THEN the file is as it was
    assert path.read_bytes() == before


def test_a_provisional_result_replaces_a_provisional_one(tmp_path):
    path = tmp_path / "best.yaml"
    tuned_file.write(path, replace(TUNED, status=Status.PROVISIONAL))
    tuned_file.write(path, PROVISIONAL)
    assert tuned_file.read(path).config.num_workers == 3


def test_a_certified_result_replaces_a_certified_one(tmp_path):
    path = tmp_path / "best.yaml"
    tuned_file.write(path, TUNED)
    tuned_file.write(path, replace(TUNED, config=trial_config(5)))
    assert tuned_file.read(path).config.num_workers == 5


def test_a_provisional_result_replaces_another_studys(tmp_path):
    path = tmp_path / "best.yaml"
    tuned_file.write(path, TUNED)
    tuned_file.write(path, replace(PROVISIONAL, provenance={"study": "other"}))
    assert tuned_file.read(path).status is Status.PROVISIONAL


def test_a_damaged_file_gives_way(tmp_path):
    path = edited(tmp_path, ("batch_size: 256", "batch_size: -1"))
    tuned_file.write(path, PROVISIONAL)
    assert tuned_file.read(path).status is Status.PROVISIONAL


# --- edited by hand --------------------------------------------------------------------------------------------


def test_the_file_of_the_contract_is_read(tmp_path):
    tuned = tuned_file.read(edited(tmp_path))
    assert tuned.config == TUNED.config
    assert tuned.baseline_config == TUNED.baseline_config
    assert tuned.measured.steady_samples_per_sec == Estimate(value=2420.3, low=2410.0, high=2430.5)
    assert tuned.baseline_measured.gpu_utilization_reason == "no GPU"
    assert tuned.speedup == pytest.approx(2404 / 295)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("status: certified", "status: great", 'line 2: status: found "great"; expected certified'),
        ("  batch_size: 256", "  batch_size: -1", "line 4: dataloader.batch_size: found -1; expected 1 or more"),
        ("  batch_size: 256", "  batch_size: '256'", 'line 4: dataloader.batch_size: found "256"; expected a whole'),
        ("  batch_size: 256", "  batch_size: 256.0", "line 4: dataloader.batch_size: found 256.0; expected a whole"),
        ("  num_workers: 14", "  num_workers: true", "line 5: dataloader.num_workers: found true; expected a whole"),
        ("  num_workers: 14", "  num_workers:", "line 5: dataloader.num_workers: is missing"),
        ("  num_workers: 14", "  num_workers: 0", "line 3: dataloader: prefetch_factor must be null"),
        ("  prefetch_factor: 2", "  prefetch_factor: null", "line 3: dataloader: prefetch_factor is None"),
        ("  pin_memory: true", "  pin_memory: 1", "line 7: dataloader.pin_memory: found 1; expected true or false"),
        ("  amp: bf16", "  amp: fp64", 'line 12: training.amp: found "fp64"; expected fp32, bf16, fp16'),
        ("size: 512", "size: 500", "line 10: training.effective_batch_size: is 500, but batch_size 256 x"),
        ("changes_training: []", "changes_training: none", 'line 13: changes_training: found "none"; expected a list'),
        ("value: 2404.0", "value: fast", "line 15: measured.effective_samples_per_sec.value: found"),
        ("{value: 2420.3, low: 2410, high: 2430.5}", "2420", "line 16: measured.steady_samples_per_sec: found 2420"),
        ("  epoch_start_s: 1.25\n", "", "line 14: measured.epoch_start_s: is missing; expected a number"),
        ("    batch_size: 64", "    batch_size: 0", "line 25: baseline.config.batch_size: found 0; expected 1 or more"),
        ("    amp: fp32", "    amp: 32", "line 31: baseline.config.amp: found 32; expected text"),
        ("limit: compute", "limit: 3", "line 41: ceiling.limit: found 3; expected text"),
        ("hardware: {", "hardwire: {", "hardware: is missing; expected keys with values"),
    ],
)
def test_each_kind_of_nonsense_is_named_with_line_and_key(tmp_path, old, new, problem):
    found = problems(edited(tmp_path, (old, new)))
    assert any(problem in text for text in found), found


def test_all_problems_come_together(tmp_path):
    path = edited(
        tmp_path,
        ("  num_workers: 14", "  num_workers: many"),
        ("  amp: bf16", "  amp: fp64"),
        ("value: 2420.3", "value: '2420.3'"),
        ("gradient_accumulation_steps: 8", "gradient_accumulation_steps: 0"),
        ("samples_per_sec: 2488.0", "samples_per_sec: null"),
    )
    found = "\n".join(problems(path))
    for key in (
        "line 5: dataloader.num_workers",
        "line 12: training.amp",
        "line 16: measured.steady_samples_per_sec.value",
        "line 30: baseline.config.gradient_accumulation_steps: found 0",
        "line 41: ceiling.samples_per_sec",
    ):
        assert key in found
    assert len(found.splitlines()) == 5


def test_a_missing_block_is_told_with_every_key_of_it(tmp_path):
    block = FILE[FILE.index("training:") : FILE.index("changes_training:")]
    found = "\n".join(problems(edited(tmp_path, (block, ""))))
    for key in ("effective_batch_size", "gradient_accumulation_steps", "amp"):
        assert f"training.{key}" in found


def test_two_impossible_values_of_one_block_are_both_named(tmp_path):
    path = edited(tmp_path, ("  batch_size: 256", "  batch_size: -1"), ("  num_workers: 14", "  num_workers: -2"))
    found = "\n".join(problems(path))
    assert "line 4: dataloader.batch_size: found -1; expected 1 or more" in found
    assert "dataloader.num_workers: found -2; expected 0 or more" in found


def test_a_wrong_rate_does_not_hide_what_is_wrong_below_it(tmp_path):
    path = edited(tmp_path, ("value: 2404.0", "value: fast"), ("host_memory_bytes: null", "host_memory_bytes: much"))
    found = "\n".join(problems(path))
    assert "line 15: measured.effective_samples_per_sec.value" in found
    assert "line 21: measured.host_memory_bytes" in found


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("value: 295.0", "value: 0", "baseline.measured.effective_samples_per_sec"),
        ("value: 2404.0", "value: -2404.0", "measured.effective_samples_per_sec"),
        ("value: 2404.0", "value: .nan", "measured.effective_samples_per_sec"),
        ("samples_per_sec: 2488.0", "samples_per_sec: 0", "ceiling.samples_per_sec"),
    ],
)
def test_a_rate_is_a_positive_number(tmp_path, old, new, key):
    # Speedup and bottleneck divide by these.
    found = problems(edited(tmp_path, (old, new)))
    assert any(key in text for text in found), found


def test_a_file_of_another_kind_is_called_so(tmp_path):
    path = edited(tmp_path, ("schema_version: 1", "schema_version: null"))
    with pytest.raises(InputError, match="is no result of pipetune"):
        tuned_file.read(path)


@pytest.mark.parametrize("version", ["2", "'1'"])
def test_another_schema_version_is_refused_with_the_remedy(tmp_path, version):
    path = edited(tmp_path, ("schema_version: 1", f"schema_version: {version}"))
    with pytest.raises(InputError, match=r"best\.yaml: schema_version is .*; this pipetune reads 1.*tune again"):
        tuned_file.read(path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("- 1\n- 2\n", "expected keys with values"),
        ("just words", "expected keys with values"),
        ("a: [1, 2\nb: }", "line 2: not valid YAML"),
    ],
)
def test_what_is_no_mapping_is_one_problem(tmp_path, text, problem):
    path = tmp_path / "best.yaml"
    path.write_text(text)
    [found] = problems(path)
    assert problem in found


def test_a_file_that_is_not_there_is_named(tmp_path):
    [found] = problems(tmp_path / "best.yaml")
    assert "No such file" in found


# --- what reading costs ----------------------------------------------------------------------------------------


def test_reading_imports_nothing_heavy(tmp_path):
    # GIVEN a fresh interpreter
    code = (
        "import sys\n"
        "from pipetune.config import tuned_file\n"
        "tuned_file.read(sys.argv[1])\n"
        "print(*sorted({'pydantic', 'optuna', 'torch', 'rich', 'typer'} & set(sys.modules)))\n"
    )

    # WHEN it reads a result
    run = subprocess.run(
        [sys.executable, "-c", code, str(edited(tmp_path))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    # THEN none of these came along
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_infinite_ends_of_an_interval_survive(tmp_path):
    # A single window has no interval.
    path = tmp_path / "best.yaml"
    unknown = Estimate(value=5.0, low=0.0, high=math.inf)
    tuned_file.write(path, replace(TUNED, measured=replace(TUNED.measured, steady_samples_per_sec=unknown)))
    assert tuned_file.read(path).measured.steady_samples_per_sec == unknown
