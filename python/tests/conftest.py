# SPDX-License-Identifier: MIT
"""Tests run on the source tree's package unless NORMFUSE_INSTALLED says that an installed one is meant."""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
if not os.environ.get("NORMFUSE_INSTALLED"):
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


def pytest_collection_modifyitems(items):
    """NORMFUSE_TEST_SHARD=I/N leaves every Nth test, from the Ith on: N processes share a file (check_jax_cuda.sh)."""
    index, _, count = os.environ.get("NORMFUSE_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index)::int(count)]
