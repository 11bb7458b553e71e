"""First code of a trial host: tied to its parent before anything slow is imported.

Started as `python -m pipetune.trial.entry REPLY_FD PARENT_PID`.
"""

import os
import signal
import sys

from pipetune.trial.guards import die_with_parent


def main() -> None:
    """Serve requests until they end."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    # The parent held its signals back while it started this process, and that was inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(descriptor, False)
    # The user's code, and what it starts, must not read the requests away.
    requests, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    from pipetune.trial.host import Channel, Host

    with os.fdopen(requests, "rb") as lines:
        Host(Channel(descriptor)).serve(lines)


if __name__ == "__main__":
    main()
