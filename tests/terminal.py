# SPDX-License-Identifier: MIT
"""How tests start programs: on a terminal, and with what a signal does by default."""
import os
import signal
import subprocess


def default_signal(number):
    """In a child, ahead of its program: nohup and a shell's background jobs have some signals ignored, and so had all
    that they start."""
    signal.signal(number, signal.SIG_DFL)


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
