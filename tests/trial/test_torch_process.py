"""torch is asked in a process of its own, whatever becomes of that process."""

import subprocess
import sys

import pytest
import torch

from pipetune.trial import torch_facts, torch_process
from pipetune.trial.torch_facts import is_compiled_for
from pipetune.trial.torch_process import ask_torch


def test_torch_tells_what_it_is():
    facts = ask_torch()
    assert facts.error is None
    assert facts.version == torch.__version__
    assert facts.cuda_version == torch.version.cuda
    assert facts.threads >= 1
    assert facts.start_method in {"fork", "forkserver", "spawn"}


def told_by(monkeypatch, code, **options):
    real = subprocess.run
    monkeypatch.setattr(
        torch_process.subprocess, "run", lambda _command, **given: real([sys.executable, "-c", code], **given)
    )
    return ask_torch(**options).error


@pytest.mark.parametrize(("code", "words"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    ("import sys; sys.exit('libcuda is broken')", "ended with code 1: libcuda is broken"),
    ("print('no answer')", "ended with code 0: it said nothing"),
    ("print('{}', end=''); import os; os._exit(7)", "ended with code 7"),
])  # fmt: skip
def test_a_process_that_does_not_answer_is_an_error(monkeypatch, code, words):
    assert words in told_by(monkeypatch, code)


def test_a_process_that_hangs_is_ended(monkeypatch):
    assert "hangs" in told_by(monkeypatch, "import time; time.sleep(60)", timeout_s=0.5)


@pytest.mark.parametrize(("error", "words"), [
    (ModuleNotFoundError("No module named 'torch'", name="torch"), "torch is not installed"),
    (ModuleNotFoundError("No module named 'sympy'", name="sympy"), "cannot be imported: No module named 'sympy'"),
    (OSError("libcudnn.so.9: cannot open\nmore"), "cannot be imported: libcudnn.so.9: cannot open"),
])  # fmt: skip
def test_a_torch_that_cannot_be_imported_is_told(monkeypatch, error, words):
    class Finder:
        def find_spec(self, name, *_):
            if name == "torch":
                raise error

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert words in torch_facts.look().error


@pytest.mark.parametrize(("capability", "compiled", "runs"), [
    ((9, 0), ["sm_80", "sm_90"], True),
    ((8, 6), ["sm_80", "sm_90"], True),  # the same major version
    ((8, 0), ["sm_86"], False),  # code for a later minor version
    ((12, 0), ["sm_80", "sm_90a"], False),
    ((12, 0), ["sm_80", "compute_90"], True),  # compiled by the driver
    ((10, 3), ["sm_100f"], True),
    ((6, 1), [], True),
    ((6, 1), ["gfx90"], False),
])  # fmt: skip
def test_code_runs_on_what_it_was_compiled_for(capability, compiled, runs):
    assert is_compiled_for(capability, compiled) is runs
