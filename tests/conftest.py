"""What all tests share: builders and the scripted runner are importable from every folder."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "search"))
pytest.register_assert_rewrite("runner_contract", "lab")

# The machine may be busy: a slow example is no finding. The same examples every time: a red run can be repeated.
settings.register_profile("pipetune", deadline=None, derandomize=True)
settings.load_profile("pipetune")


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory):
    """A small study that was tuned to its end, once for all tests; copy its folder to change it."""
    from commands import finish_study

    return finish_study(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def visible_gpu_uuid():
    """The GPU that torch takes: not the first of the machine where CUDA_VISIBLE_DEVICES says otherwise."""
    code = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
