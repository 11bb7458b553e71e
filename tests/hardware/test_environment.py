import subprocess
import sys
from importlib import metadata

from pipetune import __version__
from pipetune.hardware import environment


def test_the_profile_joins_host_and_gpus():
    profile = environment.profile()
    assert 1 <= profile.cpus_usable <= profile.cpus_present
    assert profile.cpus_limit
    assert profile.memory_bytes > 0
    assert (profile.gpu_reason is None) == bool(profile.gpus)
    assert profile.fingerprint("cpu") == environment.profile().fingerprint("cpu")


def test_versions_name_what_decides_speed(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "torch":
            raise metadata.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(environment.metadata, "version", version)
    versions = environment.versions()
    assert list(versions) == ["pipetune", "python", "torch", "optuna", "numpy", "pillow"]
    assert versions["pipetune"] == __version__
    assert versions["torch"] == "not installed"
    assert versions["numpy"] == real("numpy")


def test_reading_the_machine_never_imports_torch():
    script = (
        "import sys; from pipetune.hardware.environment import profile, versions; profile(); versions(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
