# SPDX-License-Identifier: MIT
"""Where the tests of normfuse.torch have their tensors: NORMFUSE_TEST_DEVICE, "cpu" (the default) or "cuda"."""
import os

import pytest

DEVICE = os.environ.get("NORMFUSE_TEST_DEVICE", "cpu")
ON_CUDA = DEVICE != "cpu"
of_the_cpu = pytest.mark.skipif(ON_CUDA, reason="is about the CPU")


@pytest.fixture(autouse=True, scope="module")
def default_device():
    """Of the modules that import this: what they make is on DEVICE."""
    if not ON_CUDA:
        yield
        return
    import torch
    torch.set_default_device(DEVICE)
    yield
    torch.set_default_device(None)
