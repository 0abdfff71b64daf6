"""`python -m qwenimg`: the command line of the Python that runs it, where no `qwenimg` is on the PATH."""

import sys

from qwenimg.cli.main import run

if __name__ == "__main__":
    sys.exit(run())
