"""Asks torch without importing it: a process of its own may crash, hang, or hold a GPU, and then it is gone."""

import subprocess
import sys

from pipetune.core.machine import TorchFacts
from pipetune.trial.guards import signal_name
from pipetune.trial.protocol import decode_torch_facts

TIMEOUT_S = 120.0
_TAIL_LINES = 3


def ask_torch(timeout_s: float = TIMEOUT_S) -> TorchFacts:
    """What torch finds on this machine; a process that ends without an answer is an `error`."""
    try:
        done = subprocess.run(
            # -P: a file of the user's in the working folder must not take the place of a library.
            [sys.executable, "-P", "-m", "pipetune.trial.torch_facts"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"torch did not answer within {timeout_s:.0f} s: it hangs while it looks for devices")
    lines = done.stdout.strip().splitlines()
    facts = decode_torch_facts(lines[-1]) if lines else None
    if facts is not None and done.returncode == 0:
        return facts
    last = done.stderr.decode(errors="replace").strip().splitlines()[-_TAIL_LINES:]
    return TorchFacts(error=f"importing torch {_ending(done.returncode)}: {' / '.join(last) or 'it said nothing'}")


def _ending(code: int) -> str:
    return f"ended with code {code}" if code >= 0 else f"was ended by {signal_name(-code)}"
