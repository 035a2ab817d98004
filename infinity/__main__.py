"""The entry point of ``infinity``."""

import sys

from io_daemon.interrupt import quiet_interrupt


def main() -> int:
    with quiet_interrupt():
        from infinity.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
