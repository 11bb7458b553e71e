"""What a config may say: each key's values, and all problems of a file in one message."""

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml as pyyaml
from hypothesis import given
from hypothesis import strategies as st

from pipetune.config.schema import from_mapping, load
from pipetune.core.objective import Objective
from pipetune.core.probes import ProbeKind
from pipetune.core.space import Amp, Bounds, DeclaredSpace, TrialConfig
from pipetune.core.study import Budget, CachePolicy, Isolation, StudyConfig, WorkloadSpec
from pipetune.errors import ConfigError, InputError

MINIMAL = {
    "study": "quickstart",
    "workload": {"target": "job.py:build"},
    "training": {"effective_batch_size": 512},
}


def config(**sections: Any) -> StudyConfig:
    return from_mapping({**MINIMAL, **sections}, folder="/jobs")


def problems(**sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config(**sections)
    return list(caught.value.problems)


def file_with(folder: Path, text: str) -> Path:
    path = folder / "study.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def test_the_least_file_gets_the_documented_defaults(tmp_path):
    # GIVEN the three required keys
    path = file_with(
        tmp_path,
        """\
        study: quickstart
        workload: {target: job.py:build}
        training: {effective_batch_size: 512}
        """,
    )

    # WHEN it is loaded
    loaded = load(path)

    # THEN all else is the contract's default
    assert loaded == StudyConfig(
        study="quickstart",
        workload=WorkloadSpec(target="job.py:build", options={}, folder=str(tmp_path)),
        effective_batch_size=512,
        epochs=1,
        epoch_samples=None,
        baseline=None,
        search=DeclaredSpace(),
        objective=Objective.THROUGHPUT,
        budget=Budget(seconds=600.0, trials=None),
        device="auto",
        seed=0,
        storage=None,
        cache=CachePolicy.WARM,
        isolation=Isolation.WARM,
        probes=(ProbeKind.SAMPLE, ProbeKind.LOADER, ProbeKind.STEP),
        gpu_memory_headroom=0.1,
        source=path,
    )


def test_a_whole_file_becomes_core_values(tmp_path):
    path = file_with(
        tmp_path,
        """\
        study: full
        workload:
          target: pkg.jobs:build
          options: {root: data, lr: 1e-3, sizes: [1, 2], at: 12:30}
        training: {effective_batch_size: 512, epochs: 10, epoch_samples: 1e4}
        baseline: {num_workers: 4, pin_memory: true, batch_size: 64, amp: no}
        search:
          num_workers: {min: 0, max: 8}
          prefetch_factor: [2, "4"]
          pin_memory: true
          persistent_workers: [false, true]
          batch_size: [64, 128]
          amp: [off, bf16]
        objective: pareto
        budget: {time: 1h30m, trials: 50}
        device: cuda:1
        seed: 7
        storage: sqlite:///study.db
        cache: cold
        isolation: process
        probes: [step, sample]
        gpu_memory_headroom: 0.25
        """,
    )

    loaded = load(path)

    assert loaded == StudyConfig(
        study="full",
        workload=WorkloadSpec(
            target="pkg.jobs:build",
            options={"root": "data", "lr": 0.001, "sizes": [1, 2], "at": "12:30"},
            folder=str(tmp_path),
        ),
        effective_batch_size=512,
        epochs=10,
        epoch_samples=10_000,
        baseline=TrialConfig(
            num_workers=4,
            prefetch_factor=2,
            pin_memory=True,
            persistent_workers=False,
            batch_size=64,
            accumulation_steps=8,
            amp=Amp.FP32,
        ),
        search=DeclaredSpace(
            num_workers=Bounds(low=0, high=8),
            prefetch_factor=(2, 4),
            pin_memory=(True,),
            persistent_workers=(False, True),
            batch_size=(64, 128),
            amp=(Amp.FP32, Amp.BF16),
        ),
        objective=Objective.PARETO,
        budget=Budget(seconds=5400.0, trials=50),
        device="cuda:1",
        seed=7,
        storage="sqlite:///study.db",
        cache=CachePolicy.COLD,
        isolation=Isolation.PROCESS,
        probes=(ProbeKind.STEP, ProbeKind.SAMPLE),
        gpu_memory_headroom=0.25,
        source=path,
    )


def test_all_problems_come_in_one_message(tmp_path):
    # GIVEN a file with many mistakes, and overrides with more
    path = file_with(
        tmp_path,
        """\
        study: .hidden
        workload: {script: train.py}
        training: {effective_batch_size: 512, epoch: 3}
        baseline:
          persistent_workers: true
          prefetch_factor: 2
          batch_size: 100
          amp: on
        search:
          num_wrokers: auto
          num_workers: [0, many, -1]
          prefetch_factor: {mn: 1, max: 8}
          pin_memory: maybe
          batch_size:
            - 64
            - 100
          persistent_workers: []
          amp: bf6
        objective: thruput
        budget: {time: 12:30}
        batch_size: 64
        on: 1
        """,
    )
    overrides = ["seed=-1", "search.amp.min=x", "budget.trails=3", "device", "cache=[warm"]

    # WHEN it is loaded
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)

    # THEN each has its place, what was found, and what to write instead
    expected = [
        f"{path}: 25 problems",
        (
            'line 1: study: found ".hidden"; expected a name of up to 100 letters, digits, '
            "'.', '_' and '-', not beginning with a dot; a number needs quotes"
        ),
        (
            "line 2: workload.script: scripts are not supported yet; give `target: file.py:function`, "
            "a function that returns a pipetune.Workload"
        ),
        "line 3: training.epoch: unknown key; did you mean epochs?",
        (
            "line 5: baseline.persistent_workers: found true; expected false where num_workers is 0; "
            "leave it out, or give num_workers 1 or more"
        ),
        (
            "line 6: baseline.prefetch_factor: found 2; expected null where num_workers is 0; "
            "leave it out, or give num_workers 1 or more"
        ),
        (
            "line 7: baseline.batch_size: found 100; it does not divide training.effective_batch_size 512; "
            "nearest that do: 64 and 128"
        ),
        "line 8: baseline.amp: found true; that does not say which precision; write bf16 or fp16",
        "line 10: search.num_wrokers: unknown key; did you mean num_workers?",
        'line 11: search.num_workers[1]: found "many"; expected a whole number from 0 to 4096',
        "line 11: search.num_workers[2]: found -1; expected a whole number from 0 to 4096",
        "line 12: search.prefetch_factor.min: missing; expected the least value",
        "line 12: search.prefetch_factor.mn: unknown key; did you mean min?",
        'line 13: search.pin_memory: found "maybe"; expected true or false (or auto, or a list)',
        (
            "line 16: search.batch_size[1]: found 100; it does not divide training.effective_batch_size 512; "
            "nearest that do: 64 and 128"
        ),
        "line 17: search.persistent_workers: found []; expected at least one value",
        ('line 18: search.amp: found "bf6"; expected fp32, bf16 or fp16 (or auto, or a list); did you mean bf16?'),
        ('line 19: objective: found "thruput"; expected throughput, weighted or pareto; did you mean throughput?'),
        (
            'line 20: budget.time: found "12:30"; expected a time over 0 and up to a year: '
            "90s, 10m, 1h30m, 1.5h, or a number of seconds"
        ),
        "line 21: batch_size: unknown key here; did you mean baseline.batch_size or search.batch_size?",
        (
            "line 22: true: unknown key; known here: study, workload, training, baseline, search, objective, "
            "budget, device, seed, storage, cache, isolation, probes or gpu_memory_headroom"
        ),
        '--set search.amp.min: search.amp is "bf6" and has no keys',
        '--set device: found "device"; expected key=value',
        "--set cache: line 1: not valid YAML: expected ',' or ']', but got '<stream end>'",
        "--set budget.trails: unknown key; did you mean trials?",
        "--set seed: found -1; expected a whole number from 0 to 4294967295",
    ]
    assert str(caught.value) == "\n  ".join(expected)


def test_missing_keys_are_named_even_in_an_empty_config():
    with pytest.raises(ConfigError) as caught:
        from_mapping({}, folder="/jobs")

    assert str(caught.value) == (
        "config: 3 problems\n"
        "  study: missing; expected a name for the study's folder\n"
        "  workload.target: missing; expected file.py:function, package.module:function or builtin:name\n"
        "  training.effective_batch_size: missing; expected the samples of one optimizer step"
    )


def test_a_missing_key_has_the_line_of_its_section(tmp_path):
    path = file_with(tmp_path, "study: a\nworkload: {target: a:b}\ntraining: {effective_batch_size: 8}\nbaseline: {}")

    with pytest.raises(ConfigError) as caught:
        load(path)

    assert caught.value.problems == (
        "line 4: baseline.batch_size: missing; expected the samples of one step of one process",
    )


def test_an_empty_section_says_nothing(tmp_path):
    path = file_with(
        tmp_path,
        """\
        study: a
        workload: {target: a:b, options: }
        training: {effective_batch_size: 8}
        baseline:
        search:
          # num_workers: auto
        budget:
        """,
    )

    loaded = load(path)

    assert (loaded.baseline, loaded.search, loaded.budget.seconds) == (None, DeclaredSpace(), 600.0)
    assert loaded.workload.options == {}


@pytest.mark.parametrize("section", ["workload", "training", "baseline", "search", "budget"])
@pytest.mark.parametrize("value", [5, "text", [1]])
def test_a_section_that_is_none_is_refused(section, value):
    assert any(
        p.startswith(f"{section}: found ") and p.endswith("; expected a section: keys with values")
        for p in problems(**{section: value})
    )


def test_overrides_replace_values_of_the_file(tmp_path):
    # GIVEN a file
    path = file_with(
        tmp_path,
        """\
        study: a
        workload: {target: a:b, options: {root: x}}
        training: {effective_batch_size: 512}
        search: {num_workers: {min: 0, max: 8}}
        """,
    )

    # WHEN overrides are given: a list, a nested key, a new section, the same key twice, an `=` in the value
    loaded = load(
        path,
        [
            "search.batch_size=[64,128]",
            "search.num_workers.max=4",
            "baseline.batch_size=64",
            "seed=1",
            "seed=2",
            "workload.options.query=a=b",
            "budget.time=90s",
        ],
    )

    # THEN they hold, and what they leave alone stands
    assert loaded.search.batch_size == (64, 128)
    assert loaded.search.num_workers == Bounds(low=0, high=4)
    assert loaded.baseline is not None
    assert loaded.baseline.accumulation_steps == 8
    assert loaded.seed == 2
    assert loaded.workload.options == {"root": "x", "query": "a=b"}
    assert loaded.budget == Budget(seconds=90.0, trials=None)


def test_overrides_replace_values_of_a_mapping():
    assert from_mapping(MINIMAL, "/jobs", ["seed=3"]).seed == 3


def test_an_override_can_repair_the_file(tmp_path):
    path = file_with(tmp_path, "study: a\nworkload: {target: a:b}\ntraining: {effective_batch_size: x}")

    assert load(path, ["training.effective_batch_size=8"]).effective_batch_size == 8


@pytest.mark.parametrize("override", ["", "=", "=1", "study.=1", ".study=1", "a..b=1"])
def test_an_override_without_a_key_is_a_problem(tmp_path, override):
    path = file_with(tmp_path, "study: a\nworkload: {target: a:b}\ntraining: {effective_batch_size: 8}")

    with pytest.raises(ConfigError) as caught:
        load(path, [override])

    [problem] = caught.value.problems
    assert problem.startswith("--set ")
    assert problem.endswith(f'found "{override}"; expected key=value')


def test_a_relative_file_keeps_an_absolute_folder(tmp_path, monkeypatch):
    file_with(tmp_path, "study: a\nworkload: {target: job.py:build}\ntraining: {effective_batch_size: 8}")
    monkeypatch.chdir(tmp_path)

    assert load("study.yaml").workload.folder == str(tmp_path)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("10m", 600.0),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("1h 2m 3s", 3723.0),
        ("0.5s", 0.5),
        (600, 600.0),
        (0.5, 0.5),
        ("600", 600.0),
    ],
)
def test_times_are_in_human_units(value, seconds):
    assert config(budget={"time": value}).budget == Budget(seconds=seconds, trials=None)


@pytest.mark.parametrize(
    "value",
    [0, -1, "0s", "-5m", "12:30", "1 0", "m10", "10x", "1m1h", "", "h", True, [1], float("inf"), "9999h"],
)
def test_what_is_no_time_is_refused(value):
    [problem] = problems(budget={"time": value})

    assert problem.startswith("budget.time: found ")
    assert problem.endswith("expected a time over 0 and up to a year: 90s, 10m, 1h30m, 1.5h, or a number of seconds")


def test_a_trial_count_alone_leaves_time_open():
    assert config(budget={"trials": 20}).budget == Budget(seconds=None, trials=20)
    assert config(budget={"time": None, "trials": None}).budget == Budget(seconds=600.0, trials=None)


@pytest.mark.parametrize("value", [64, "64", 64.0, "6.4e1", "0x40", np.int64(64)])
def test_a_whole_number_may_be_spelled_in_several_ways(value):
    assert config(training={"effective_batch_size": value}).effective_batch_size == 64


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", "010", "12:30", "", True, None, [64], float("nan"), 1e300])
def test_what_is_no_whole_number_is_refused(value):
    [problem] = problems(training={"effective_batch_size": value})

    assert problem.startswith("training.effective_batch_size: found ")
    assert problem.endswith("; expected a whole number from 1 to 2147483647")


@pytest.mark.parametrize(
    ("value", "declared"),
    [
        ("auto", "auto"),
        (4, (4,)),
        ("4", (4,)),
        ([0, 2, "1e1"], (0, 2, 10)),
        ((1, 2), (1, 2)),
        ({"min": 0, "max": 8}, Bounds(low=0, high=8)),
    ],
)
def test_number_knobs_take_auto_values_lists_and_ranges(value, declared):
    assert config(search={"num_workers": value}).search.num_workers == declared


@pytest.mark.parametrize(
    ("knob", "value", "problem"),
    [
        (
            "num_workers",
            "many",
            (
                'search.num_workers: found "many"; expected a whole number from 0 to 4096 '
                "(or auto, a list, or {min, max})"
            ),
        ),
        (
            "num_workers",
            {"min": 8, "max": 2},
            "search.num_workers.max: found 2; expected 8 or more, because min is 8",
        ),
        (
            "num_workers",
            {"min": -1, "max": 2},
            "search.num_workers.min: found -1; expected a whole number from 0 to 4096",
        ),
        (
            "prefetch_factor",
            None,
            (
                "search.prefetch_factor: found null; expected a whole number from 1 to 4096 "
                "(or auto, a list, or {min, max})"
            ),
        ),
        (
            "prefetch_factor",
            [0],
            "search.prefetch_factor[0]: found 0; expected a whole number from 1 to 4096",
        ),
        (
            "pin_memory",
            {"min": 0, "max": 1},
            'search.pin_memory: found {"min": 0, "max": 1}; expected true or false (or auto, or a list)',
        ),
        ("pin_memory", [1], "search.pin_memory[0]: found 1; expected true or false"),
        (
            "batch_size",
            96,
            (
                "search.batch_size: found 96; it does not divide training.effective_batch_size 512; "
                "nearest that do: 64 and 128"
            ),
        ),
        (
            "batch_size",
            1024,
            (
                "search.batch_size: found 1024; it does not divide training.effective_batch_size 512; "
                "nearest that do: 512"
            ),
        ),
        (
            "batch_size",
            {"min": 300, "max": 500},
            (
                'search.batch_size: found {"min": 300, "max": 500}; no number in it divides '
                "training.effective_batch_size 512; nearest that do: 256 and 512"
            ),
        ),
        ("amp", [[1]], "search.amp[0]: found [1]; expected fp32, bf16 or fp16"),
    ],
)
def test_a_knob_says_what_it_takes(knob, value, problem):
    assert problems(search={knob: value}) == [problem]


def test_batches_are_not_judged_against_an_unknown_effective_batch():
    assert problems(training={"effective_batch_size": "x"}, search={"batch_size": [100]}) == [
        'training.effective_batch_size: found "x"; expected a whole number from 1 to 2147483647'
    ]


@pytest.mark.parametrize("word", ["off", "Off", "OFF", "no", "No", "false", "False", "fp32", "FP32", "'off'"])
def test_all_ways_to_say_no_reduced_precision_are_fp32(tmp_path, word):
    text = "study: a\nworkload: {target: a:b}\ntraining: {effective_batch_size: 8}\nsearch: {amp: %s}"
    path = file_with(tmp_path, text % word)

    assert load(path).search.amp == (Amp.FP32,)


@pytest.mark.parametrize("word", ["true", "on", "yes"])
def test_a_true_precision_is_refused_with_the_remedy(tmp_path, word):
    text = "study: a\nworkload: {target: a:b}\ntraining: {effective_batch_size: 8}\nsearch: {amp: [%s]}"

    with pytest.raises(ConfigError) as caught:
        load(file_with(tmp_path, text % word))

    assert caught.value.problems == (
        "line 4: search.amp[0]: found true; that does not say which precision; write bf16 or fp16",
    )


def test_a_baseline_is_torchs_defaults_where_it_says_nothing():
    assert config(baseline={"batch_size": 128}).baseline == TrialConfig(
        num_workers=0,
        prefetch_factor=None,
        pin_memory=False,
        persistent_workers=False,
        batch_size=128,
        accumulation_steps=4,
        amp=Amp.FP32,
    )


@pytest.mark.parametrize(("given", "prefetch"), [({}, 2), ({"prefetch_factor": None}, 2), ({"prefetch_factor": 5}, 5)])
def test_a_baseline_with_workers_has_a_prefetch_factor(given, prefetch):
    baseline = config(baseline={"batch_size": 64, "num_workers": 2, "persistent_workers": True, **given}).baseline

    assert baseline is not None
    assert baseline.prefetch_factor == prefetch
    assert baseline.persistent_workers


@pytest.mark.parametrize("name", ["a", "A.b_c-1", "-x", "x" * 100])
def test_study_names_are_folder_names(name):
    assert config(study=name).study == name


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "a b", "ä", "a\n", "x" * 101, 2024, None, True])
def test_other_study_names_are_refused(name):
    [problem] = problems(study=name)

    assert problem.startswith("study: found ")


@pytest.mark.parametrize("target", ["job.py:build", "../my jobs/a-b.py:f", "pkg:f", "pkg.mod:f", "builtin:images"])
def test_targets_of_three_forms(target):
    assert config(workload={"target": target}).workload.target == target


@pytest.mark.parametrize(
    "target", ["job.py", "job.py:", ":build", ".py:f", "a-b:f", "pkg..mod:f", "job.py:1", "a:b:c", 5]
)
def test_other_targets_are_refused(target):
    [problem] = problems(workload={"target": target})

    assert problem.endswith("; expected file.py:function, package.module:function or builtin:name")


def test_a_script_is_told_apart_from_its_target():
    both = problems(workload={"script": "train.py", "target": "job.py"})

    assert [p.partition(":")[0] for p in both] == ["workload.target", "workload.script"]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(device):
    assert config(device=device).device == device


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:01", "CPU", 0, None])
def test_other_devices_are_refused(device):
    [problem] = problems(device=device)

    assert problem.endswith("; expected auto, cpu, cuda or cuda:N")


@pytest.mark.parametrize(
    ("key", "value", "ending"),
    [
        ("objective", "Weighted", "expected throughput, weighted or pareto; did you mean weighted?"),
        ("cache", "worm", "expected warm or cold; did you mean warm?"),
        ("probes", "all", "expected auto, or a list of sample, loader or step; [] for none"),
        ("probes", ["step", "walk"], "expected auto, or a list of sample, loader or step; [] for none"),
        ("isolation", ["warm"], "expected warm or process; did you mean warm?"),
        ("gpu_memory_headroom", 10, "expected a share of the GPU's memory, 0 to 0.9"),
        ("seed", 2**32, "expected a whole number from 0 to 4294967295"),
        ("storage", "", "expected null or an Optuna storage URL"),
        ("storage", 5, "expected null or an Optuna storage URL"),
    ],
)
def test_other_keys_say_what_they_take(key, value, ending):
    [problem] = problems(**{key: value})

    assert problem.startswith(f"{key}: found ")
    assert problem.endswith(f"; {ending}")


def test_options_may_be_anything_plain_but_their_names_are_text():
    options = {"root": Path("data"), "sizes": (1, np.int64(2)), "classes": {0: "cat"}}

    assert config(workload={"target": "a:b", "options": options}).workload.options == {
        "root": "data",
        "sizes": [1, 2],
        "classes": {0: "cat"},
    }
    assert problems(workload={"target": "a:b", "options": {1: 2}}) == [
        'workload.options: found {"1": 2}; expected argument names (text) with their values'
    ]


def test_a_live_object_is_refused_by_name():
    with pytest.raises(InputError, match=r"workload\.options\.model: object is no plain value"):
        config(workload={"target": "a:b", "options": {"model": object()}})


def test_the_callers_mapping_is_left_alone():
    mapping = {"study": "a", "workload": {"target": "a:b"}, "training": {"effective_batch_size": 8}}

    from_mapping(mapping, folder=".")

    assert mapping == {"study": "a", "workload": {"target": "a:b"}, "training": {"effective_batch_size": 8}}


keys = st.sampled_from(
    [
        *(
            "study",
            "workload",
            "training",
            "baseline",
            "search",
            "budget",
            "objective",
            "device",
            "seed",
            "storage",
        ),
        *("target", "script", "options", "effective_batch_size", "epoch_samples", "num_workers", "amp"),
        *("prefetch_factor", "persistent_workers", "batch_size", "time", "trials", "min", "max"),
    ]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["auto", "off", "10m", "a:b", "cuda:1", "1e3", "bf16"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys | st.text(max_size=3) | st.integers() | st.none() | st.booleans(), inner, max_size=5)
    ),
    max_leaves=25,
)


def assert_study_or_problem(path: Path, overrides: list[str]) -> None:
    try:
        loaded = load(path, overrides)
    except ConfigError as error:
        assert str(error).encode("utf-8")  # noqa: PT017 - either outcome is right
    else:
        assert isinstance(loaded, StudyConfig)


@given(
    data=st.dictionaries(keys, values),
    overrides=st.lists(st.text() | st.builds("{}={}".format, keys, st.text())),
)
def test_any_mapping_is_a_study_or_a_problem(tmp_path_factory, data, overrides):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(pyyaml.safe_dump({**MINIMAL, **data}))

    assert_study_or_problem(path, overrides)


@given(content=st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_file_is_a_study_or_a_problem(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)

    assert_study_or_problem(path, [])


@given(data=values)
def test_any_values_are_a_study_or_a_problem(data):
    with pytest.raises(ConfigError):
        from_mapping({"training": data, "search": data, "baseline": data, "budget": data}, folder=".")
