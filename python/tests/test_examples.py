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
    # What the script promises. Networks that learned nothing would agree as well, at 0.1; two epochs come to 0.86.
    assert abs(float(stock) - float(ours)) <= 0.02 and min(float(stock), float(ours)) > 0.7, done.stdout


def test_decoder():
    pytest.importorskip("diffusers", reason="diffusers, which makes the decoder, is not installed")
    # Without torchvision, whose wheel from PyPI cannot be imported beside a PyTorch without CUDA.
    words = [sys.executable, "-c", "import runpy, sys; sys.modules['torchvision'] = None; sys.argv = sys.argv[1:]; "
             "runpy.run_path(sys.argv[0], run_name='__main__')", str(ROOT / "examples/decoder.py"), "--size", "64"]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    # Of both halves: 24 residual blocks with two convolutions each, and their shortcuts.
    assert re.search(r"^52 of 52 norms converted; 50 fused with what follows; \d+ biases of convolutions moved on CUDA$",
                     done.stdout, re.M), done.stdout
    assert re.search(r"^64 x 64 pixels on (cpu|cuda): differs by", done.stdout, re.M), done.stdout
