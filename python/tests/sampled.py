# SPDX-License-Identifier: MIT
"""Tests of many slow cases are marked @pytest.mark.sampled(times=1). With NORMFUSE_TEST_SAMPLED=1, as in `make check`, so
many of their cases run that each value of each argument occurs `times` times. The choice depends on the names of the
cases alone. Every case runs without the variable, as in `make check FULL=1`."""
import collections
import hashlib


def cover(cases, times):
    """The chosen names of {name: its arguments' values}: each time the one with most values that still lack cases."""
    counts = collections.Counter(value for values in cases.values() for value in values)
    lacking = {value: min(times, count) for value, count in counts.items()}
    left, chosen = sorted(cases, key=lambda name: hashlib.sha256(name.encode()).digest()), set()
    while any(lacking.values()):
        best = max(left, key=lambda name: sum(lacking[value] > 0 for value in cases[name]))
        left.remove(best)
        chosen.add(best)
        for value in cases[best]:
            lacking[value] = max(0, lacking[value] - 1)
    return chosen


def select(items):
    """(items that run, items that do not), both in their order."""
    tests, times = collections.defaultdict(dict), {}
    for item in items:
        mark = item.get_closest_marker("sampled")
        if mark is not None:
            test = item.nodeid.partition("[")[0]
            tests[test][item.nodeid] = [(name, repr(value)) for name, value in item.callspec.params.items()]
            times[test] = mark.kwargs.get("times", 1)
    left_out = set()
    for test, cases in tests.items():
        left_out |= set(cases) - cover(cases, times[test])
    return [item for item in items if item.nodeid not in left_out], [item for item in items if item.nodeid in left_out]
