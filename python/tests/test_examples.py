# SPDX-License-Identifier: MIT
"""The examples for PyTorch, run as a user would."""
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_train_digits():
    pytest.importorskip("sklearn", reason="scikit-learn, whose digits it trains on, is not installed")
    # One thread: on busy cores OpenMP's threads wait for one another, and stock's steps of 9 ms take 0.7 s too.
    done = subprocess.run([sys.executable, ROOT / "examples/train_digits.py", "--epochs", "2", "--seeds", "2"],
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                               "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 of 3 norms converted; 3 fused with what follows" in done.stdout
    lines = re.findall(r"^(seed \d+|mean): stock (0\.\d+).*, normfuse (0\.\d+)", done.stdout, re.M)
    assert [name for name, _, _ in lines] == ["seed 0", "seed 1", "mean"]
    _, stock, ours = lines[-1]
    # The promise of the script. Networks that learned nothing would agree as well, at 0.1; two epochs come to 0.86.
    assert abs(float(stock) - float(ours)) <= 0.02 and min(float(stock), float(ours)) > 0.7, done.stdout


# A tiny U-Net of nnU-Net's blocks: convolution, instance norm, leaky ReLU.
NNUNET = """
import inspect, sys, types
sys.modules["torchvision"] = None
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, 3, stride, 1)
        self.norm = nn.InstanceNorm3d(outputs, affine=True)
        self.nonlin = nn.LeakyReLU(inplace=True)
        self.all_modules = nn.Sequential(self.conv, self.norm, self.nonlin)
    def forward(self, x):
        return self.all_modules(x)

class Network(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.down, self.deep = Block(inputs, 8), Block(8, 16, 2)
        self.up, self.head = Block(24, 8), nn.Conv3d(8, outputs, 1)
    def forward(self, x):
        skip = self.down(x)
        deep = nn.functional.interpolate(self.deep(skip), scale_factor=2.0)
        return self.head(self.up(torch.cat([deep, skip], 1)))

class nnUNetTrainer:
    @staticmethod
    def build_network_architecture(plans_manager, configuration_manager, num_input_channels, num_output_channels,
                                   enable_deep_supervision=True):
        return Network(num_input_channels, num_output_channels)

for name in ("nnunetv2", "nnunetv2.training", "nnunetv2.training.nnUNetTrainer",
             "nnunetv2.training.nnUNetTrainer.nnUNetTrainer"):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].nnUNetTrainer = nnUNetTrainer
"""
# Spheres of another brightness than their noise, in 16 volumes; twelve steps of both trainers from the same weights.
TRAINING = """
import runpy
example = runpy.run_path(EXAMPLE)
ours, stock = example["nnUNetTrainerNormfuse"], example["nnUNetTrainer"]
signature = inspect.signature(ours.build_network_architecture)
assert list(signature.parameters) == list(inspect.signature(stock.build_network_architecture).parameters)
assert "plans_manager" in signature.parameters
torch.manual_seed(0)
at = torch.stack(torch.meshgrid(*[torch.arange(16.0)] * 3, indexing="ij"))
centre = 4 + 8 * torch.rand(16, 3, 1, 1, 1)
labels = ((at - centre) ** 2).sum(1).lt(16).long()
volumes = torch.randn(16, 1, 16, 16, 16) + 2 * labels[:, None]
words = (None, None, 1, 2, False)
a, b = stock.build_network_architecture(*words), ours.build_network_architecture(*words)
b.load_state_dict(a.state_dict())
losses = []
for network in (a, b):
    optimizer, each = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, nesterov=True), []
    for k in range(12):
        x, y = volumes[k % 4 * 4:][:4], labels[k % 4 * 4:][:4]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 12)
        optimizer.step()
        each.append(loss.item())
    losses.append(each)
assert losses[0][-1] < 0.5 * losses[0][0], losses
assert max(abs(p - q) for p, q in zip(*losses)) < 1e-3, losses
a.load_state_dict(b.state_dict())
print("trained")
"""


def test_nnunet_trainer():
    """The trainer's networks are converted, train as nnU-Net's do, and their checkpoints fit; nnU-Net reads the names
    of the arguments. nnU-Net is stood in for."""
    example = f"EXAMPLE = {str(ROOT / 'examples/nnunet_trainer.py')!r}"
    done = subprocess.run([sys.executable, "-c", NNUNET + example + TRAINING], capture_output=True, text=True,
                          timeout=300, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                               "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()
    assert first.startswith("normfuse: 3 of 3 norms converted; 3 fused with what follows"), done.stdout
    assert last == "trained"


def test_decoder():
    pytest.importorskip("diffusers", reason="diffusers, which makes the decoder, is not installed")
    # Without torchvision, whose wheel from PyPI cannot be imported beside a PyTorch without CUDA.
    words = [sys.executable, "-c", "import runpy, sys; sys.modules['torchvision'] = None; sys.argv = sys.argv[1:]; "
             "runpy.run_path(sys.argv[0], run_name='__main__')", str(ROOT / "examples/decoder.py"), "--size", "64"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # Both halves: 24 residual blocks with two convolutions each, and their shortcuts.
    assert re.search(r"^52 of 52 norms converted; 50 fused with what follows; \d+ biases of convolutions moved on CUDA$",
                     done.stdout, re.M), done.stdout
    assert re.search(r"^64 x 64 pixels on (cpu|cuda): differs by", done.stdout, re.M), done.stdout
