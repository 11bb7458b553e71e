"""First code of a trial host: tied to its parent before anything slow is imported.

Started as `python -m pipetune.trial.entry REPLY_FD PARENT_PID`.
"""

import os
import signal
import sys

from pipetune.trial.guards import die_with_parent


def main() -> None:
    """Serve requests until standard input ends."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(parent)
    # The parent held its signals back while it started this process, and that was inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.set_inheritable(descriptor, False)
    from pipetune.trial.host import Channel, Host

    Host(Channel(descriptor)).serve()


if __name__ == "__main__":
    main()
