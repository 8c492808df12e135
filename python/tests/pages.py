# SPDX-License-Identifier: MIT
"""What the system says of memory."""

import os

import pytest


def wants_huge_pages(address):
    """Whether the mapping that holds the address was advised to have huge pages. Skips where the system has none."""
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("this system has no transparent huge pages")
    is_there = False
    with open("/proc/self/smaps") as text:
        for line in text:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                first, end = (int(word, 16) for word in words[0].split("-"))
                is_there = first <= address < end
            elif words[0] == "VmFlags:" and is_there:
                return "hg" in words
    return False
