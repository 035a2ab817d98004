"""The entry point of ``infinity``."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # where `python -m` was typed: modules that lie there are not ours

from io_daemon.command.interrupt import hear_of_children, quiet_interrupt
from io_daemon.command.standard_files import fill_standard_files


def main() -> int:
    fill_standard_files()
    hear_of_children()
    with quiet_interrupt():
        from infinity.commands.cli import main as run
    return run()


if __name__ == "__main__":
    sys.exit(main())
