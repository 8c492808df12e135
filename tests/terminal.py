# SPDX-License-Identifier: MIT
"""What a program shows on a terminal."""
import os
import subprocess


def on_a_terminal(words, timeout, **options):
    """The exit status of a program and, as bytes, what it writes to standard error where that is a terminal."""
    master, slave = os.openpty()
    child = subprocess.Popen(words, stderr=slave, **options)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    os.close(master)
    return child.wait(timeout), shown
