# SPDX-License-Identifier: MIT
"""What a user reads first when something does not fit: packages that are missing or too old, what is no model and no
tensor, words of other libraries. Other packages are stood in for by folders with their name and version."""
import os
import pathlib
import subprocess
import sys

import numpy
import pytest

import normfuse
from normfuse._words import did_you_mean, meant


def imported(statement, tmp_path, *hidden, **versions):
    """The last line that Python prints of the statement, where packages have these versions, and others are not
    there."""
    for name, version in versions.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"__version__ = {version!r}\n")
        (tmp_path / f"{name}-{version}.dist-info").mkdir()
        (tmp_path / f"{name}-{version}.dist-info/METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    code = f"""
import sys
class Hidden:
    def find_spec(name, *others):
        if name in {hidden!r}:
            raise ModuleNotFoundError(name=name)
sys.meta_path.insert(0, Hidden)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", code + statement], env=environment, capture_output=True, text=True,
                          timeout=120)
    return (done.stdout + done.stderr).strip().splitlines()[-1]


@pytest.mark.parametrize("statement,package,title,oldest,extra", [
    ("import normfuse.torch", "torch", "PyTorch", "2.10", "normfuse[torch]"),
    ("import normfuse.jax", "jax", "JAX", "0.10", "normfuse[jax]"),
    ("import normfuse.onnx; normfuse.onnx.rewrite(b'')", "onnx", "onnx", "1.17", "normfuse[onnx]"),
    ("import normfuse.onnx, onnxruntime; normfuse.onnx.library_path()", "onnxruntime", "ONNX Runtime", "1.18",
     "normfuse[onnx]"),
])
def test_packages_that_are_too_old(tmp_path, statement, package, title, oldest, extra):
    """One sentence, with both versions and what to type; where the package is missing, too."""
    major, minor = map(int, oldest.split("."))
    said = imported(statement, tmp_path, **{package: f"{major}.{minor - 1}.7+cu124"})
    user = statement.split(";")[0].split()[1].rstrip(",") + (".rewrite" if package == "onnx" else "")
    assert said == (f"ImportError: {user} needs {title} {oldest} or newer, and this is {major}.{minor - 1}.7+cu124: "
                    f"pip install '{extra}'")
    if package != "onnxruntime":
        said = imported(statement, tmp_path / "..", package)
        assert said == f"ModuleNotFoundError: {user} needs {title} {oldest} or newer: pip install '{extra}'"


def test_a_package_that_is_broken_says_so_itself(tmp_path):
    """What it needs is missing: that is not said to be the package."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import a_library_of_torch\n")
    assert imported("import normfuse.torch", tmp_path) == "ModuleNotFoundError: No module named 'a_library_of_torch'"


@pytest.mark.parametrize("broken", ["old", "broken", "none"])
def test_info_never_raises(tmp_path, broken):
    if broken == "none":
        code = "import importlib.metadata as m; real = m.version\n" \
               "def version(name):\n    if name != 'numpy': raise m.PackageNotFoundError(name)\n    return real(name)\n" \
               "m.version = version; from normfuse.__main__ import info; info()"
        assert imported(code, tmp_path) == "torch       not installed"
        return
    code = "from normfuse.__main__ import info; info()"
    if broken == "old":
        assert imported(code, tmp_path, torch="2.4.1") == (
            "torch       2.4.1; normfuse.torch cannot be imported: normfuse.torch needs PyTorch 2.10 or newer, and this is "
            "2.4.1: pip install 'normfuse[torch]'")
    else:
        imported("print(1)", tmp_path, torch="2.13.0")
        (tmp_path / "torch/__init__.py").write_text("raise OSError('libcudart.so.13: no such file')\n")
        assert imported(code, tmp_path) == ("torch       2.13.0; normfuse.torch cannot be imported: libcudart.so.13: "
                                            "no such file")


@pytest.mark.parametrize("words,unbuffered", [("normfuse info", ""), ("normfuse info", "1"), ("normfuse --help", ""),
                                              ("normfuse.onnx rewrite --help", "")])
def test_closed_and_full_outputs(words, unbuffered):
    """The Python programs end as the program in C does: python -m normfuse info | true."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": unbuffered}
    read, write = os.pipe()
    os.close(read)
    for stdout, message in ((write, "Broken pipe"), (os.open("/dev/full", os.O_WRONLY), "No space left on device")):
        done = subprocess.run([sys.executable, "-m", *words.split()], stdout=stdout, stderr=subprocess.PIPE, text=True,
                              env=environment, timeout=120)
        os.close(stdout)
        assert (done.returncode, done.stderr) == (3, f"normfuse: standard output: {message}\n")


# ---- words ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word,name", [
    ("swish", "silu"), ("SiLU", "silu"), ("Leaky-ReLU", "leaky_relu"), ("leakyrelu", "leaky_relu"),
    ("hard_swish", "hardswish"),
    ("gelu_tahn", "gelu_tanh"), ("sliu", "silu"), ("none", "identity"), ("softplus", None), ("", None), (7, None)])
def test_activations_by_other_names(word, name):
    from normfuse._library import ACTIVATIONS
    assert meant(word, ACTIVATIONS) == name
    with pytest.raises(ValueError) as caught:
        normfuse.group_norm(numpy.zeros((1, 4, 3), "f4"), 2, activation=word)
    assert str(caught.value).endswith(f"prelu{did_you_mean(word, ACTIVATIONS)}")
    assert ("did you mean" in str(caught.value)) is (name is not None)


def test_layouts_by_other_names():
    for word, name in (("NHWC", "nhwc"), ("channels_last", "nhwc"), ("channels_first", "nchw")):
        with pytest.raises(ValueError, match=f"did you mean '{name}'"):
            normfuse.group_norm(numpy.zeros((1, 4, 3), "f4"), 2, layout=word)
    with pytest.raises(ValueError, match="expected 'nchw' or 'nhwc'$"):
        normfuse.group_norm(numpy.zeros((1, 4, 3), "f4"), 2, layout="xyz")


# ---- PyTorch --------------------------------------------------------------------------------------------------------


@pytest.fixture
def nft():
    pytest.importorskip("torch")
    import normfuse.torch
    return normfuse.torch


@pytest.mark.parametrize("name", ["convert", "revert", "fused", "fold_batch_norm", "prepare"])
def test_what_is_no_module(nft, name):
    """A pipeline is told which parts it has; a tensor, a function and a class what is taken."""
    import torch

    class Pipeline:
        unet = torch.nn.Conv2d(1, 1, 1)

    function = getattr(nft, name)
    with pytest.raises(TypeError, match=rf"{name} takes a torch.nn.Module, but got a Pipeline: .*{name}\(pipe.unet\)"):
        function(Pipeline())
    for model in (torch.zeros(3), len, torch.nn.GroupNorm, None):
        with pytest.raises(TypeError, match=rf"but got a {type(model).__name__}: of a pipeline .*{name}\(pipe.vae\)"):
            function(model)
    with pytest.warns(DeprecationWarning):
        compiled = torch.jit.trace(torch.nn.GroupNorm(2, 4), torch.zeros(1, 4, 3))
    with pytest.raises(TypeError,
                       match=f"{name} takes no torch.jit.ScriptModule, whose code is compiled: call it before"):
        function(compiled)


def test_a_model_with_a_compiled_part(nft):
    """The part is left, the rest converted."""
    import torch
    with pytest.warns(DeprecationWarning):
        part = torch.jit.trace(torch.nn.Sequential(torch.nn.GroupNorm(2, 4), torch.nn.ReLU()), torch.zeros(1, 4, 3))
    model, x = torch.nn.Sequential(part, torch.nn.GroupNorm(2, 4), torch.nn.SiLU()), torch.randn(1, 4, 3)
    expected = model(x)
    assert str(nft.convert(model)).startswith("1 of 1 norms converted; 1 fused")
    assert torch.allclose(model(x), expected, atol=1e-6)
    other = torch.nn.Sequential(part, torch.nn.Conv1d(4, 4, 1), torch.nn.BatchNorm1d(4)).eval()
    expected = other(x)
    assert str(nft.fold_batch_norm(other)).startswith("1 of 1 norms folded")
    assert torch.allclose(other(x), expected, atol=1e-5)


def test_a_model_without_norms(nft):
    """The report says so, and which norms there are."""
    from torch import nn
    assert str(nft.convert(nn.Sequential(nn.Linear(3, 3),
                                         nn.ReLU()))) == "no norm of this model is one that normfuse has"
    model = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3), nn.LayerNorm(3), nn.RMSNorm(3))
    assert str(nft.convert(model)) == "no norm of this model is one that normfuse has\nnot taken: 2 LayerNorm, 1 RMSNorm"


def test_what_is_no_tensor(nft):
    x = numpy.zeros((2, 4, 3), "f4")
    calls = {"group_norm": (2,), "batch_norm": (None, None), "instance_norm": (), "channel_affine": (None, None)}
    for name, others in calls.items():
        for value in (x, x.tolist(), None):
            with pytest.raises(TypeError,
                               match=rf"normfuse.torch.{name} takes tensors, but got a {type(value).__name__}: "
                                                rf"normfuse.{name} takes arrays"):
                getattr(nft, name)(value, *others)


def test_sparse_tensors(nft):
    import torch
    x = torch.randn(2, 4, 3).to_sparse()
    for call in (lambda: nft.group_norm(x, 2), lambda: nft.GroupNorm(2, 4)(x), lambda: nft.instance_norm(x),
                 lambda: nft.batch_norm(x, None, None, training=True), lambda: nft.BatchNorm1d(4)(x),
                 lambda: nft.channel_affine(x, torch.ones(4), None)):
        with pytest.raises(TypeError,
                           match=r"normfuse takes no tensor of the layout torch.sparse_coo: call .to_dense\(\)"):
            call()
    y = nft.group_norm(x.to_dense(), 2)
    assert torch.allclose(y, torch.nn.functional.group_norm(x.to_dense(), 2), atol=1e-6)


def test_activations_of_torch_by_other_names(nft):
    import torch
    with pytest.raises(ValueError, match="but got 'swish': say activation='silu'$"):
        nft.GroupNorm(2, 4, activation="swish")
    with pytest.raises(ValueError, match="but got 'sliu': say activation='silu'$"):
        nft.group_norm(torch.zeros(1, 4, 3), 2, activation="sliu")
