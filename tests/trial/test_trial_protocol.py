import math
from dataclasses import replace

import pytest
from builders import facts, failure, measurement, trial_config
from hypothesis import given
from hypothesis import strategies as st

from pipetune.core.cache import ReadAhead, ReadAheadEnd
from pipetune.core.measurement import Phase
from pipetune.core.probes import LoaderProbe, StepProbe
from pipetune.core.samples import SampleDigests
from pipetune.core.study import WorkloadSpec
from pipetune.trial.protocol import (
    FailedEvent,
    LoaderProbeRequest,
    MeasuredEvent,
    MeasureLimits,
    PhaseEvent,
    ProbedEvent,
    ReadAheadEvent,
    ReadAheadRequest,
    ReadPart,
    ReadSamplesRequest,
    ReadyEvent,
    RefusedEvent,
    SamplesEvent,
    SetUpRequest,
    StepProbeRequest,
    TrialRequest,
    decode_event,
    decode_request,
    encode,
)

SPEC = WorkloadSpec(target="job.py:build", options={"a": [1, None, {"b": "é\n"}]}, folder="/tmp")
REQUESTS = [
    SetUpRequest(spec=SPEC, device="cpu", seed=3, serial=True),
    TrialRequest(config=trial_config(2), limits=MeasureLimits(), compute_only=True, cold=False),
    TrialRequest(config=trial_config(0), limits=MeasureLimits(max_s=1), compute_only=False, cold=True),
    TrialRequest(
        config=trial_config(1),
        limits=MeasureLimits(epoch_samples=7, until_warm=False),
        compute_only=False,
        cold=False,
        part=ReadPart(first=3, count=None, seed=1),
    ),
    ReadSamplesRequest(config=trial_config(2), indices=(0, 5), limit_s=2.0, one_thread=True),
    StepProbeRequest(config=trial_config(2), seconds=0.5, part=ReadPart(first=0, count=9, seed=1)),
    LoaderProbeRequest(config=trial_config(0), seconds=1.5, cold=True),
    ReadAheadRequest(config=trial_config(2), dataset_samples=None, seed=0, seconds=9.5, memory_bytes=2**40),
]
STEP_PROBE = StepProbe(
    config=trial_config(0),
    batch_s=1e-3,
    copy_s=None,
    pinned_copy_s=None,
    peak_gpu_memory_bytes=None,
    batch_bytes=2**30,
    seconds=1.0,
)
LOADER_PROBE = LoaderProbe(
    config=trial_config(2),
    first_batch_s=0.3,
    batch_s=0.1,
    receive_s=1e-4,
    work_share=None,
    spread=None,
    batches=5,
    batch_bytes=2**20,
    worker_memory_bytes=2**28,
    seconds=1.2,
)
EVENTS = [
    PhaseEvent(phase=Phase.WARM_UP),
    ReadyEvent(facts=facts()),
    MeasuredEvent(measurement=measurement(), samples=1024),
    MeasuredEvent(measurement=measurement(compute_only_samples_per_sec=math.inf), samples=0),
    ProbedEvent(probe=STEP_PROBE, samples=64),
    ProbedEvent(probe=replace(STEP_PROBE, copy_s=2e-3, pinned_copy_s=1e-3, peak_gpu_memory_bytes=2**35), samples=0),
    ProbedEvent(probe=LOADER_PROBE, samples=512),
    ProbedEvent(probe=replace(LOADER_PROBE, work_share=1.0, spread=0.2, worker_memory_bytes=None), samples=512),
    SamplesEvent(digests=SampleDigests(asked=3, indices=(0, 7), digests=("a", None))),
    ReadAheadEvent(read_ahead=ReadAhead(samples=9, read_bytes=2**40, seconds=1.5, end=ReadAheadEnd.MEMORY)),
    FailedEvent(failure=failure(message="line 1\nline 2 é")),
    RefusedEvent(message="no", traceback_text="Traceback\n  a\n"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: message.kind)
def test_a_request_is_one_line_and_comes_back_the_same(request_):
    line = encode(request_)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_request(line) == request_


@pytest.mark.parametrize("event", EVENTS, ids=lambda message: message.kind)
def test_an_event_is_one_line_and_comes_back_the_same(event):
    line = encode(event)
    assert line.count(b"\n") == 1
    assert decode_event(line) == event


def test_a_name_that_is_no_utf_8_does_not_hide_the_error():
    """Linux file names are bytes: Python shows those that are no UTF-8 as lone surrogates."""
    event = FailedEvent(failure=failure(message="cannot read photo-\udce9.jpg", traceback_text="\udce9"))
    told = decode_event(encode(event))
    assert told.failure.message.startswith("cannot read photo-")
    assert told.failure.message.endswith(".jpg")


@pytest.mark.parametrize("options", [{"clip": math.inf}, {"class_weights": {0: 1.0, 1: 5.0}}], ids=["inf", "int_key"])
def test_options_reach_the_child_as_the_config_gave_them(options):
    spec = WorkloadSpec(target="job.py:build", options=options, folder="/tmp")
    request = SetUpRequest(spec=spec, device="cpu", seed=0, serial=True)
    assert decode_request(encode(request)).spec.options == options


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(min_size=1), PLAIN, max_size=3))
def test_no_options_are_changed_on_their_way(options):
    test_options_reach_the_child_as_the_config_gave_them(options)


@pytest.mark.parametrize("line", [b"", b"\n", b"garbage\n", b"{}\n", b'{"kind": "measured"}\n', b"\xff\n", b"[1]\n"])
def test_what_is_no_event_is_passed_over(line):
    assert decode_event(line) is None


def test_what_is_no_request_is_an_error():
    with pytest.raises(ValueError, match="kind"):
        decode_request(b'{"kind": "other"}\n')
