# SPDX-License-Identifier: MIT
"""Tests run on the source tree's package unless NORMFUSE_INSTALLED says that an installed one is meant."""
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
if not os.environ.get("NORMFUSE_INSTALLED"):
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))


import sampled  # noqa: E402


def pytest_configure(config):
    config.addinivalue_line("markers", "sampled(times): cases of which NORMFUSE_TEST_SAMPLED=1 runs some (sampled.py)")


def pytest_collection_modifyitems(config, items):
    """NORMFUSE_TEST_SAMPLED=1 leaves some cases of tests that are marked sampled. NORMFUSE_TEST_SHARD=I/N leaves every
    Nth test, from the Ith on: N processes share a file (check_jax_cuda.sh)."""
    if os.environ.get("NORMFUSE_TEST_SAMPLED"):
        items[:], left_out = sampled.select(items)
        config.hook.pytest_deselected(items=left_out)
    index, _, count = os.environ.get("NORMFUSE_TEST_SHARD", "0/1").partition("/")
    items[:] = items[int(index)::int(count)]
