"""The report for programs: the contract's names, and JSON that every reader takes."""

import json
from dataclasses import replace

import pytest
from builders import PLAN, estimate, facts, measured, space
from made_results import RECORDS, certified, failures, no_gain, provisional, result, summary, widest

from pipetune.config.tuned_file import to_mapping
from pipetune.core.ceilings import LoaderDemand
from pipetune.core.record import Validation
from pipetune.report.machine import result_object, validation_object

ALL = pytest.mark.parametrize(
    "made", [certified, no_gain, provisional, failures, widest], ids=lambda made: made.__name__
)


@ALL
def test_the_keys_of_the_contract_are_there(made):
    told = result_object(made())
    assert {
        "study_dir",
        "status",
        "best",
        "baseline",
        "speedup",
        "ceiling",
        "bottleneck",
        "trials",
        "seconds",
    } <= set(told)
    assert {"dataloader", "training", "measured"} <= set(told["best"])
    for trial in told["trials"]:
        assert {
            "number",
            "config",
            "state",
            "steady_samples_per_sec",
            "effective_samples_per_sec",
            "gpu_utilization_percent",
            "failure",
        } <= set(trial)


@ALL
def test_it_is_strict_json_of_plain_values(made):
    told = result_object(made())
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_best_is_the_blocks_of_the_file():
    made = certified()
    file = to_mapping(made.tuned)
    assert result_object(made)["best"] == {key: file[key] for key in ("dataloader", "training", "measured")}


def test_values_are_the_results():
    told = result_object(certified())
    assert told["study_dir"] == "studies/photos"
    assert (told["status"], told["bottleneck"]) == ("certified", "compute")
    assert told["speedup"] == pytest.approx(2404.4 / 295.1)
    assert told["baseline"]["measured"]["effective_samples_per_sec"]["value"] == 295.1
    assert told["ceiling"] == {"samples_per_sec": 2488.0, "limit": "compute"}
    assert told["seconds"] == 254.6


def test_what_the_loader_lacks_is_told_in_numbers():
    made = result(summary=summary(demand=LoaderDemand(cpus=22.345, wait_share=0.1), probes_s=31.26))
    told = result_object(made)
    assert (told["loader_demand"], told["probe_seconds"]) == ({"cpus": 22.34, "wait_share": 0.1}, 31.3)
    assert result_object(certified())["loader_demand"] is None


def test_importances_are_shares_or_null():
    told = result_object(result(summary=summary(importances={"num_workers": 0.79604, "amp": 0.20396})))
    assert told["importances"] == {"num_workers": 0.796, "amp": 0.204}
    assert result_object(certified())["importances"] is None


def test_a_measured_trial_has_numbers_and_no_failure():
    [trial] = result_object(result(records=RECORDS[2:]))["trials"]
    assert (trial["number"], trial["state"], trial["failure"]) == (2, "measured", None)
    assert trial["config"]["num_workers"] == 14
    assert trial["effective_samples_per_sec"] == pytest.approx(RECORDS[2].measurement.effective(PLAN).value)
    assert trial["steady_samples_per_sec"] > trial["effective_samples_per_sec"]
    assert trial["gpu_utilization_percent"] == pytest.approx(98.6)


def test_other_trials_have_no_numbers_and_a_reason():
    told = result_object(failures())["trials"]
    states = {trial["state"] for trial in told if trial["steady_samples_per_sec"] is None}
    assert states == {"infeasible", "failed"}
    assert told[1]["failure"].startswith("gpu_out_of_memory in warm_up: CUDA out of memory")


def test_without_a_gpu_utilisation_is_null_beside_a_reason():
    block = result_object(no_gain())["best"]["measured"]
    assert block["gpu_utilization_percent"] is None
    assert block["gpu_utilization_reason"] == "no GPU"


def test_utilisation_zero_is_a_number():
    idle = replace(certified().tuned, measured=replace(measured(gpu=50.0), gpu_utilization_percent=estimate(0.0)))
    assert result_object(result(tuned=idle))["best"]["measured"]["gpu_utilization_percent"]["value"] == 0.0


def test_a_validation_is_plain_values():
    told = validation_object(Validation(facts=facts(), plan=PLAN, space=space(), workers_limit="all CPUs present"))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["search"]["batch_size"] == [64, 128, 256]
    assert told["configurations"] == len(space())
    assert told["epoch_samples"] == PLAN.epoch_samples
