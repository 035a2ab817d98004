import sys

from io_daemon.cli import main

if __name__ == "__main__":
    sys.exit(main())
