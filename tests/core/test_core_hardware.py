import re

import pytest
from builders import hardware
from hypothesis import given
from hypothesis import strategies as st


def test_the_fingerprint_is_short_and_stable():
    # THEN a study that was written by an older version is found again: the digits may never change
    found = hardware(cpus_usable=16, cpu_model="AMD EPYC 9654").fingerprint("NVIDIA H200")
    assert found == "57c2fe15"


@given(st.integers(1, 2**45), st.one_of(st.none(), st.integers(1, 2**45)))
def test_the_fingerprint_does_not_depend_on_memory(memory_bytes, shared_memory_bytes):
    grown = hardware(memory_bytes=memory_bytes, shared_memory_bytes=shared_memory_bytes)
    assert grown.fingerprint("cpu") == hardware().fingerprint("cpu")


@pytest.mark.parametrize(
    "changes", [{"driver": "570.1"}, {"python": "3.13"}, {"system": "Linux 6"}, {"cpus_present": 8}]
)
def test_the_fingerprint_does_not_depend_on_versions(changes):
    assert hardware(**changes).fingerprint("cpu") == hardware().fingerprint("cpu")


def test_the_fingerprint_depends_on_what_decides_speed():
    machines = [hardware(), hardware(8), hardware(cpu_model="Another")]
    found = {one.fingerprint(device) for one in machines for device in ("NVIDIA H200", "NVIDIA A100")}
    assert len(found) == 6
    assert all(re.fullmatch(r"[0-9a-f]{8}", one) for one in found)
