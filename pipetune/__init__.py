"""pipetune measures the fastest loader, batch and precision settings for a PyTorch run."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetune.api import load, tune
    from pipetune.core.record import StudyResult
    from pipetune.core.space import TrialConfig
    from pipetune.errors import PipetuneError
    from pipetune.integrations.torch import Tuned
    from pipetune.training.workload import Workload

__version__ = "0.1.0"

__all__ = ["PipetuneError", "StudyResult", "TrialConfig", "Tuned", "Workload", "__version__", "load", "tune"]

_HOMES = {
    "PipetuneError": "pipetune.errors",
    "StudyResult": "pipetune.core.record",
    "TrialConfig": "pipetune.core.space",
    "Tuned": "pipetune.integrations.torch",
    "Workload": "pipetune.training.workload",
    "load": "pipetune.api",
    "tune": "pipetune.api",
}


def __dir__() -> list[str]:
    """The public names, for whoever completes them."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: importing pipetune itself costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pipetune' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
