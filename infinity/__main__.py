"""The entry point of ``infinity``."""

import sys

from io_daemon.command.interrupt import quiet_interrupt


def main() -> int:
    with quiet_interrupt():
        from infinity.commands.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
