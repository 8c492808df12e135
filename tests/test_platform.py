# SPDX-License-Identifier: MIT
"""The program built for another platform, NORMFUSE_OTHER_PROGRAM, beside this machine's, NORMFUSE_PROGRAM: from the
same files both write the same bytes, whatever the byte order of file and machine, the instruction set and the C
library.
Only f64 activations that go through libm are left out: C libraries round those differently."""
import itertools
import os
import pathlib
import subprocess

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROGRAM = os.path.abspath(os.environ.get("NORMFUSE_PROGRAM", ROOT / "build/normfuse"))
OTHER = os.path.abspath(os.environ["NORMFUSE_OTHER_PROGRAM"])

OUTPUTS = ["y", "mean", "rstd", "dx", "dweight", "dbias"]
ACTIVATIONS = ["identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh", "hardswish", "elu", "mish", "relu6"]


def run(program, *words):
    return subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=100)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def outputs(program, *words):
    """What a run writes, as bytes, header and all."""
    names = [name for name in OUTPUTS if words[1] != "affine" or name not in ("mean", "rstd")]
    options = itertools.chain.from_iterable((f"--{'output' if name == 'y' else name}", f"{name}.npy") for name in names)
    result = run(program, *words, "--backward", "dy.npy", *options)
    assert result.returncode == 0, f"{program} {words}: {result.stderr}"
    return {name: pathlib.Path(f"{name}.npy").read_bytes() for name in names}


def make_tensors(dtype, shape, channels):
    """x, dy, weight and bias as files of a dtype that names a byte order, |V2 for the bits of bf16."""
    random = np.random.default_rng(3)
    for name, sizes in (("x", shape), ("dy", shape), ("weight", channels), ("bias", channels)):
        values = random.standard_normal(sizes) * 2 + (name == "x")
        if dtype[1:] in ("u2", "V2"):
            bits = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
            np.save(f"{name}.npy", bits.view("V2") if dtype[1] == "V" else bits.astype(dtype))
        else:
            np.save(f"{name}.npy", values.astype(dtype))


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<f4", ">f4", "<f2", ">f2", "<u2", ">u2", "|V2"])
def test_the_same_bytes(folder, dtype, layout):
    make_tensors(dtype, (3, 8, 7, 9) if layout == "nchw" else (3, 7, 9, 8), 8)
    words = ["x.npy", f"layout={layout}", "--weight", "weight.npy", "--bias", "bias.npy"]
    if dtype[1:] in ("u2", "V2"):
        words += ["dtype=bf16", "weight_dtype=bf16"]
    for operator in (["group_norm", "groups=4"], ["batch_norm"], ["affine"]):
        words_of = ["run", operator[0], *words, *operator[1:], "act=relu"]
        mine, others = outputs(PROGRAM, *words_of), outputs(OTHER, *words_of)
        assert [name for name in mine if mine[name] != others[name]] == []


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_the_same_bits_of_activations(folder, act):
    make_tensors("<f4", (2, 4, 33, 65), 4)
    words = ["run", "group_norm", "x.npy", "groups=2", f"act={act}", "--weight", "weight.npy", "--bias", "bias.npy"]
    mine, others = outputs(PROGRAM, *words), outputs(OTHER, *words)
    assert [name for name in mine if mine[name] != others[name]] == []


def test_a_descr_without_a_mark_has_the_machines_order(folder):
    """As in NumPy. What the other machine's order is, `normfuse run` does not say: its reading is one of the two."""
    values = np.arange(1, 7, dtype="<f4").reshape(2, 3)
    np.save("x.npy", values)
    marked = pathlib.Path("x.npy").read_bytes()
    pathlib.Path("x.npy").write_bytes(marked.replace(b"'<f4'", b"'=f4'"))
    result = run(OTHER, "run", "affine", "x.npy", "-o", "y.npy")
    assert result.returncode == 0, result.stderr
    assert pathlib.Path("y.npy").read_bytes() == pathlib.Path("x.npy").read_bytes()


def test_info_and_check():
    result = run(OTHER, "info")
    assert result.returncode == 0 and "scalar" in result.stdout, result.stderr
    for problem in ("group_norm 3x8x7x9 groups=4 act=silu dtype=bf16", "batch_norm 4x6x5 layout=nhwc dtype=f16"):
        result = run(OTHER, "check", *problem.split())
        assert result.returncode == 0, result.stdout + result.stderr
