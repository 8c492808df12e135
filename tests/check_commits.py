#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""check_commits.py [RANGE] - the subjects of commits: `part: change` in 72 columns and one line, with an empty line
behind it.

RANGE is main..HEAD. The last line is `N passed, N failed, N skipped`."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS = 72


def faults(message):
    """Why a message is not as it should be."""
    subject, *body = message.rstrip("\n").split("\n")
    return ([f"has {len(subject)} columns, at most {COLUMNS}"] * (len(subject) > COLUMNS)
            + ["does not begin with its part, as `cpu: `"] * (not re.match(r"[\w./, -]+: \S", subject))
            + ["goes on in a second line"] * bool(body and body[0]))


def main():
    revisions = sys.argv[1] if len(sys.argv) > 1 else "main..HEAD"
    log = subprocess.run(["git", "log", "--no-merges", "-z", "--format=%h%n%B", revisions], cwd=ROOT, check=True,
                         stdout=subprocess.PIPE, text=True).stdout
    passed = failed = 0
    for name, message in (entry.split("\n", 1) for entry in log.split("\0") if entry):
        found = faults(message)
        passed += not found
        failed += bool(found)
        for fault in found:
            print(f"FAIL  {name} {message.splitlines()[0][:COLUMNS]}: {fault}")
    print(f"{passed} passed, {failed} failed, {0 if passed + failed else 1} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
