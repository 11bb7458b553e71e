"""`pipetune doctor` for real: on this machine, in a memory limit, with Docker's 64 MiB of shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import MAIN, pipetune

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 900 * 2**20


def findings(run):
    return {finding["code"]: finding for finding in json.loads(run.stdout)["findings"]}


def in_shell(script, cwd):
    """The command at the end of a shell script."""
    command = f'{script}\nexec "{sys.executable}" -c "{MAIN}" doctor --json'
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        ["unshare", "--mount", "sh", "-ec", command], cwd=cwd, env=environ, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip


def can_mount():
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


def test_a_machine_in_order_is_told_with_its_figures(tmp_path):
    run = pipetune("doctor", "--json", cwd=tmp_path)
    found = findings(run)
    assert run.returncode == (1 if json.loads(run.stdout)["worst"] == "stop" else 0)
    assert found["torch"]["severity"] == "ok"
    assert {"driver", "cpus", "memory", "shared_memory", "open_files", "swap", "storage", "start_method"} <= set(found)
    assert all(finding["figure"] and finding["why"] for finding in found.values())


def test_for_people_each_line_has_its_state_and_reason(tmp_path):
    run = pipetune("doctor", cwd=tmp_path)
    assert "torch" in run.stdout
    assert "workers decode and augment on them" in run.stdout
    assert max(map(len, run.stdout.splitlines())) <= 80


def test_what_is_not_there_is_bad_input(tmp_path):
    for option in ("--data", "--script"):
        run = pipetune("doctor", option, str(tmp_path / "gone"), cwd=tmp_path)
        assert (run.returncode, run.stdout) == (2, "")
        assert option in run.stderr


@pytest.mark.skipif(not can_mount(), reason="mounting needs root")
def test_64_mib_of_shared_memory_would_stop_training(tmp_path):
    run = in_shell("mount -t tmpfs -o size=64m tmpfs /dev/shm", tmp_path)
    found = findings(run)["shared_memory"]
    assert run.returncode == 1
    assert (found["severity"], "64 MiB free of 64 MiB" in found["figure"]) == ("stop", True)
    assert "shm" in found["remedy"]


@pytest.mark.skipif(not os.access(MEMORY_GROUPS, os.W_OK), reason="making a memory group needs root and cgroup v1")
def test_a_memory_limit_that_torch_does_not_fit_in_would_stop_training(tmp_path):
    group = MEMORY_GROUPS / f"pipetune-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
        run = in_shell(f"echo $$ > {group}/cgroup.procs", tmp_path)
    finally:
        group.rmdir()
    found = findings(run)["memory"]
    assert run.returncode == 1
    assert (found["severity"], "limited to 900 MiB" in found["figure"]) == ("stop", True)
    assert "--memory" in found["remedy"]


def test_few_open_files_are_told(tmp_path):
    run = pipetune("doctor", "--json", cwd=tmp_path)
    assert findings(run)["open_files"]["severity"] in {"ok", "warning"}
    limited = subprocess.run(
        ["sh", "-ec", f'ulimit -n 64; exec "{sys.executable}" -c "{MAIN}" doctor --json'],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert limited.returncode == 1
    assert findings(limited)["open_files"]["severity"] == "stop"
