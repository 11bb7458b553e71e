"""What torch finds on this machine. Run as a process of its own: `python -m pipetune.trial.torch_facts`."""

import sys
from typing import Any

from pipetune.core.machine import CudaDevice, TorchFacts
from pipetune.trial.protocol import encode_torch_facts


def look() -> TorchFacts:
    """Import torch, ask it for its devices; whatever fails is told, not raised."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        reason = "torch is not installed" if is_missing else f"torch cannot be imported: {_line(error)}"
        return TorchFacts(error=reason)
    from pipetune.training.loader import start_method

    devices, cuda_error = _devices(torch)
    return TorchFacts(
        version=str(torch.__version__),
        cuda_version=torch.version.cuda,
        cuda_error=cuda_error,
        cudnn_version=torch.backends.cudnn.version() if devices else None,
        devices=devices,
        start_method=start_method(),
        threads=torch.get_num_threads(),
        opencv_threads=_opencv_threads(),
    )


def _devices(torch: Any) -> tuple[tuple[CudaDevice, ...], str | None]:
    """The GPUs, and why there are none."""
    if torch.version.cuda is None:
        return (), None
    try:
        torch.cuda.init()
        compiled = torch.cuda.get_arch_list()
        return (
            tuple(
                CudaDevice(
                    name=torch.cuda.get_device_name(index),
                    capability=torch.cuda.get_device_capability(index),
                    is_compiled_for=is_compiled_for(torch.cuda.get_device_capability(index), compiled),
                )
                for index in range(torch.cuda.device_count())
            ),
            None,
        )
    except Exception as error:  # noqa: BLE001 - whatever it says is the evidence
        return (), _line(error)


def is_compiled_for(capability: tuple[int, int], compiled: list[str]) -> bool:
    """Whether code for one of these runs on it: `sm_XY` on the same major version, `compute_XY` on any later card."""
    for name in compiled:
        kind, _, digits = name.partition("_")
        digits = digits.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit():
            continue
        made_for = (int(digits[:-1]), int(digits[-1]))
        if made_for <= capability and (kind == "compute" or made_for[0] == capability[0]):
            return True
    return not compiled  # a build that does not tell


def _opencv_threads() -> int | None:
    """Threads of OpenCV, where it is installed."""
    try:
        import cv2  # type: ignore[import-not-found, unused-ignore]
    except Exception:  # noqa: BLE001 - broken is as good as missing
        return None
    return int(cv2.getNumThreads())


def _line(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return words[0] if words else type(error).__name__


if __name__ == "__main__":
    sys.stdout.buffer.write(b"\n" + encode_torch_facts(look()))
