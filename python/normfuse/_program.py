# SPDX-License-Identifier: MIT
"""How the Python programs end: as the program in C does where standard output cannot be written."""
import os
import sys
from typing import Callable

NOT_WRITTEN = 3


def run(main: Callable[[], int]) -> None:
    """Exits with main's status; with a message and 3 if standard output is full, or its reader has gone."""
    try:
        try:
            status = main()
        finally:  # argparse exits once it has printed help
            print(end="", flush=True)
    except OSError as error:
        print(f"normfuse: standard output: {error.strerror}", file=sys.stderr)
        # Python flushes standard output once more when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = NOT_WRITTEN
    sys.exit(status)
