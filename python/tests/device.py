# SPDX-License-Identifier: MIT
"""Where the tests of normfuse.torch have their tensors: NORMFUSE_TEST_DEVICE, "cpu" (the default) or "cuda"."""
import os

import pytest

DEVICE = os.environ.get("NORMFUSE_TEST_DEVICE", "cpu")
ON_CUDA = DEVICE != "cpu"
of_the_cpu = pytest.mark.skipif(ON_CUDA, reason="is about the CPU")


def hardswish(z):
    """torch's own on CUDA multiplies by 1/6 in f32, whatever z is: 3e-8 from the function in f64. (Its derivative there
    divides by 3, and all other activations' constants are of z's own width.)"""
    return z * (z + 3).clamp(0, 6) / 6


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
