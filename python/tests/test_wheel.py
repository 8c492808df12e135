# SPDX-License-Identifier: MIT
"""The source distribution and the wheel that pip makes of it: what is in them, and that they work where nothing else of
this tree is. The wheel has plain C kernels only, whose compilation is short. tests/test_release.py has whole wheels.
Needs pip and scikit-build-core beside pytest; a fresh environment gets NumPy from the package index."""
import os
import pathlib
import platform
import re
import subprocess
import sys
import tarfile
import zipfile

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
pytest.importorskip("scikit_build_core")

USE = """
import numpy, normfuse
x = numpy.random.default_rng(0).standard_normal((2, 6, 5, 7))
y = normfuse.group_norm(x, 3, activation="relu")
sets = x.reshape(2, 3, -1)
z = (sets - sets.mean(2, keepdims=True)) / numpy.sqrt(sets.var(2, keepdims=True) + 1e-5)
assert abs(y.reshape(sets.shape) - numpy.maximum(z, 0)).max() < 1e-12
print(normfuse.__version__, normfuse.__file__)
from normfuse import _library
print(_library.library.path)
"""

# Nothing that names libnormfuse.so is loaded before it.
USE_ONNX = """
import importlib.util, ctypes, pathlib
folder = pathlib.Path(importlib.util.find_spec("normfuse").origin).parent
ctypes.CDLL(str(folder / "lib/libnormfuse_onnxruntime.so")).RegisterCustomOps
import normfuse.onnx
print(normfuse.onnx.library_path())
"""


def version():
    lines = re.findall(r"#define NORMFUSE_VERSION_\w+ (\d+)", (ROOT / "include/normfuse.h").read_text())
    return ".".join(lines)


def run(command, folder, timeout=600, **environment):
    """Runs with nothing of this tree in the environment; the output, or a failure that shows it."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("NORMFUSE", "PYTHONPATH"))}
    done = subprocess.run([str(word) for word in command], cwd=folder, env={**clean, **environment}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}"
    return done.stdout


def build(source, folder, defines):
    """The one wheel that pip makes of `source`."""
    words = [f"--config-settings=cmake.define.{name}={value}" for name, value in defines.items()]
    run([sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, *words, source],
        folder, CMAKE_BUILD_PARALLEL_LEVEL=os.environ.get("JOBS", "2"))
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1
    return wheels[0]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    run([sys.executable, "-c", f"import scikit_build_core.build as b; b.build_sdist({str(folder)!r})"], ROOT)
    return folder / f"normfuse-{version()}.tar.gz"


@pytest.fixture(scope="module")
def wheel(archive, tmp_path_factory):
    """`pip wheel normfuse-N.tar.gz`"""
    return build(archive, tmp_path_factory.mktemp("wheel"),
                 {"NORMFUSE_ENABLE_AVX2": "OFF", "NORMFUSE_ENABLE_AVX512": "OFF"})


def environment(folder, python="python"):
    """A fresh virtual environment's Python, with pip and nothing else."""
    run([sys.executable, "-m", "venv", folder], folder.parent)
    return folder / "bin" / python


def test_name(wheel):
    # One wheel for every Python: neither an extension's tag nor an ABI's.
    assert wheel.name == f"normfuse-{version()}-py3-none-linux_{platform.machine()}.whl"


def test_contents(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {str(path.relative_to(ROOT / "python")) for path in (ROOT / "python/normfuse").rglob("*.py")}
    libraries = {"normfuse/lib/libnormfuse.so", "normfuse/lib/libnormfuse_onnxruntime.so"}
    assert package | {"normfuse/py.typed"} | libraries <= names
    others = {name for name in names - package if not name.startswith(f"normfuse-{version()}.dist-info/")}
    assert others == {"normfuse/py.typed"} | libraries


def test_old_glibc(wheel, tmp_path):
    """The libraries need no function younger than glibc 2.17, so auditwheel names the wheel manylinux_2_17."""
    if platform.libc_ver()[0] != "glibc" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("functions are bound to old versions on glibc of x86-64 and aarch64 alone")
    with zipfile.ZipFile(wheel) as files:
        libraries = [name for name in files.namelist() if name.endswith(".so")]
        files.extractall(tmp_path)
    assert len(libraries) == 2
    for name in libraries:
        versions = re.findall(r"Name: GLIBC_(\d+)\.(\d+)", run(["readelf", "-V", "-W", tmp_path / name], tmp_path))
        assert versions and max((int(major), int(minor)) for major, minor in versions) <= (2, 17)


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as files:
        text = files.read(f"normfuse-{version()}.dist-info/METADATA").decode()
        assert any(name.endswith("LICENSE") for name in files.namelist())
    head = text.split("\n\n", 1)[0].splitlines()
    assert f"Version: {version()}" in head and "Requires-Python: >=3.10" in head
    assert "License-Expression: MIT" in head
    needed = [line for line in head if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert len(needed) == 1 and needed[0].startswith("Requires-Dist: numpy")


def test_fresh_environment(wheel, tmp_path):
    """Installed as a user would, used from an empty folder: the library that runs is the wheel's."""
    python = environment(tmp_path / "venv")
    run([python, "-m", "pip", "install", "--quiet", wheel, f"numpy=={numpy.__version__}"], tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    first, library = run([python, "-c", USE], empty).splitlines()
    assert first.startswith(version() + " ") and str(tmp_path / "venv") in first
    assert library.startswith(str(tmp_path / "venv")) and library.endswith("normfuse/lib/libnormfuse.so")
    custom = run([python, "-c", USE_ONNX], empty).strip()
    assert custom.startswith(str(tmp_path / "venv")) and custom.endswith("normfuse/lib/libnormfuse_onnxruntime.so")
    info = run([python, "-m", "normfuse", "info"], empty)
    assert version() in info and re.search(r"^torch +not installed$", info, re.M)
    # No part of CUDA is needed to build it.
    assert ("not built" in info) == (platform.machine() not in ("x86_64", "aarch64"))
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "normfuse"], empty)
    assert not (pathlib.Path(first.split(" ", 1)[1]).parent).exists()


def test_source_distribution(archive):
    """It has every file of the folders that it needs, and nothing that was made."""
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    for folder in ("include", "src", "cmake", "python/normfuse", "python/tests", "tests"):
        wanted = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*")
                  if path.is_file() and "__pycache__" not in path.parts}
        assert wanted <= names, f"missing: {sorted(wanted - names)}"
    assert not [name for name in names if name.startswith(("build/", ".git/"))]
