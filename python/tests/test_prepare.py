# SPDX-License-Identifier: MIT
"""normfuse.torch.prepare: the calls that it makes on fake tensors are those of a step, and nothing is computed."""
import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import normfuse.torch as nft  # noqa: E402
from normfuse import _library  # noqa: E402
from normfuse.torch import _native, _operators  # noqa: E402
from torch import nn  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
DRIVER = ROOT / "build/release/fake/gpu"


class Model(nn.Module):
    """Layers with additions, of several dtypes and layouts, and one whose statistics run."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.group = nft.GroupNorm(4, 8, activation="silu")
        self.batch = nft.BatchNorm2d(8, activation="relu")
        self.instance = nft.InstanceNorm2d(8, affine=True, activation="prelu")

    def forward(self, x):
        h = self.group(self.convolution(x))
        h = self.batch(h.to(memory_format=torch.channels_last), post_add=h.to(memory_format=torch.channels_last))
        h = self.instance(h, pre_bias=self.convolution.bias)
        return nft.functional.channel_affine(h.half(), self.convolution.bias, None), h


def described(function, options, tensors, address):
    """What a kernel depends on, of a call."""
    fields = {name: getattr(options, name) for name, _ in options._fields_}
    return function, fields, {slot: (tuple(tensor.shape), tensor.stride(), tensor.dtype, address(slot, tensor) % 16)
                              for slot, tensor in tensors.items()}


def step(model, x, kind):
    """The calls of a step that computes, and of one that prepares."""
    with pytest.MonkeyPatch.context() as patch:
        calls = []
        real = _native._note

        def noted(function, options, tensors):
            addresses = _native._addresses(tensors)
            calls.append(described(function, options, tensors, lambda slot, tensor: addresses[slot]))
            real(function, options, tensors)

        patch.setattr(_native, "_note", noted)
        with torch.set_grad_enabled(kind != "inference"):
            assert nft.prepare(model, x) == 0  # no CUDA here
        prepared, calls = calls, []

        class Spy:
            """The library, of which calls of operators are written down."""

            def __getattr__(self, name):
                return getattr(_library.library, name)

        def called(operator, direction, function, flags, numbers, tensors):
            def spied(name, *arguments):
                options = arguments[0]._obj
                calls.append(described(name, options, tensors, lambda slot, tensor: tensor.data_ptr()))
                return getattr(_library.library, name)(*arguments)

            spy = Spy()
            name = f"normfuse_{operator}_{function}"
            setattr(spy, name, lambda *arguments: spied(name, *arguments))
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(_native, "library", spy)
                original(operator, direction, function, flags, numbers, tensors)

        original = _native.call
        patch.setattr(_native, "call", called)
        with torch.set_grad_enabled(kind != "inference"):
            y, h = model(x)
            if model.training and y.requires_grad:
                torch.autograd.backward([y, h], [torch.ones_like(y), torch.ones_like(h)])
    return prepared, calls


@pytest.mark.skipif(_operators.binding()[0] != "ctypes", reason="needs NORMFUSE_TORCH_BINDING=ctypes")
@pytest.mark.parametrize("kind", ["training", "evaluation", "inference"])
@pytest.mark.parametrize("last", [False, True])
def test_calls_are_those_of_a_step(kind, last):
    model = Model().train(kind == "training")
    if last:
        model = model.to(memory_format=torch.channels_last)
    prepared, calls = step(model, torch.randn(2, 3, 12, 10), kind)
    assert len(calls) == (8 if kind == "training" else 4)
    assert prepared == calls


@pytest.mark.skipif(_operators.binding()[0] == "ctypes", reason="runs the test above with ctypes")
def test_with_ctypes():
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k",
                           "calls_are_those", __file__],
                          env={**os.environ, "NORMFUSE_TORCH_BINDING": "ctypes"}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def test_nothing_is_computed():
    model, x = Model(), torch.randn(2, 3, 12, 10)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    assert nft.prepare(model, x) == 0
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and not isinstance(parameter, FakeTensor) for parameter in model.parameters())
    assert nft.prepare(model, x=x) == 0


def test_errors_leave_it_ready():
    class Asks(nn.Module):
        def forward(self, x):
            return x if x.sum().item() > 0 else -x

    with pytest.raises(Exception):
        nft.prepare(Asks(), torch.ones(3))
    assert _native.preparation.devices is None
    with pytest.raises(RuntimeError, match="number of channels"):
        nft.prepare(nft.GroupNorm(2, 4), torch.ones(2, 6, 3))
    assert nft.prepare(nft.GroupNorm(2, 4), torch.ones(2, 4, 3)) == 0


def test_bar(monkeypatch, capsys):
    module = sys.modules["normfuse.torch.prepare"]

    class Library:
        @staticmethod
        def normfuse_prepare_with(device, progress, context):
            for done in (1, 3):
                progress(context, done, 3)
            return 0

    monkeypatch.setattr(module, "library", Library)
    assert module._compile(0, True) == 3
    shown = capsys.readouterr().err
    assert shown.startswith("\rnormfuse: kernels [########                ] 1/3\r") and shown.endswith("3/3\n")
    assert module._compile(0, False) == 3
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not (DRIVER / "libcuda.so.1").exists(), reason=f"needs {DRIVER}")
def test_on_a_stand_in_for_a_gpu():
    """Tensors of CUDA, whose autograd needs a PyTorch for CUDA: without gradients."""
    program = """if True:
        import torch, normfuse.torch as nft
        from normfuse.torch import _native
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        mode = FakeTensorMode()
        x = FakeTensor(mode, torch.empty(2, 8, 4, 4, device="meta"), torch.device("cuda:0"))
        devices = set()
        _native.preparation.devices = devices
        with torch.no_grad(), mode:
            y = nft.functional.group_norm(x, 4, activation="silu")
        _native.preparation.devices = None
        print(devices, y.shape, y.device)
        module = torch.nn.Identity()
        module.forward = lambda x: nft.functional.group_norm(x, 4)
        with torch.no_grad():
            print(nft.prepare(module, x) >= 0)
    """
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          env={**os.environ, "LD_LIBRARY_PATH": str(DRIVER), "NORMFUSE_NVRTC": "",
                               "PYTHONPATH": str(ROOT / "python")})
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.splitlines()[-2:] == ["{0} torch.Size([2, 8, 4, 4]) cuda:0", "True"], done.stdout[-3000:]
