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


@pytest.fixture(autouse=True)
def seeded_f64():
    """Of the modules that import this: each test begins with one seed, and makes tensors of f64 unless it says
    otherwise."""
    import torch
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
