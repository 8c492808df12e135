# SPDX-License-Identifier: MIT
"""What a release hands out, as its receivers use it: the archive of `make dist`, the wheels of `make wheel`, the Debian
packages of `make deb`. Each is used from an empty folder, in an environment that has nothing of this tree.

`make check-release` makes them first and runs this file; a part that a machine cannot make is skipped by name."""
import gzip
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
VERSION = ".".join(re.findall(r"#define NORMFUSE_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)",
                              (ROOT / "include/normfuse.h").read_text()))
ARCHIVE_LIMIT = 6_000_000  # unpacked
WHEEL_LIMIT = 3 * 1024 * 1024
LIBRARY_LIMIT = 5 * 512 * 1024
LIBRARIES = ("normfuse/lib/libnormfuse.so", "normfuse/lib/libnormfuse_onnxruntime.so")
CONSUMER = ROOT / "tests/consumers/consumer.c"

USE = """
import numpy, normfuse
from normfuse import _library
x = numpy.arange(48, dtype="float32").reshape(1, 4, 3, 4) % 7
y = normfuse.group_norm(x, 2)
z = x.reshape(2, -1)
z = (z - z.mean(1, keepdims=True)) / numpy.sqrt(z.var(1, keepdims=True) + 1e-5)
assert abs(y.reshape(2, -1) - z).max() < 1e-5
print(normfuse.__version__, _library.library.path)
"""


def run(command, folder, timeout=900, **environment):
    """With nothing of this tree in the environment; the output, or a failure that shows it."""
    clean = {key: value for key,
             value in os.environ.items() if not key.startswith(("NORMFUSE", "PYTHONPATH", "MAKE", "MFLAGS"))}
    done = subprocess.run([str(word) for word in command], cwd=folder, env={**clean, **environment}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}"
    return done.stdout


def without_network():
    """Words in front of a command that may not reach the network."""
    words = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*words, "true"], stderr=subprocess.DEVNULL).returncode != 0:
        pytest.skip("unshare cannot take the network away here")
    return words


def git(*words):
    done = subprocess.run(["git", *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if done.returncode != 0:
        pytest.skip("not a checkout of git")
    return done.stdout


# ---- the archive ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def archive():
    path = BUILD / f"dist/normfuse-{VERSION}.tar.gz"
    assert path.is_file(), "make dist"
    return path


@pytest.fixture
def tree(archive, tmp_path):
    with tarfile.open(archive) as files:
        files.extractall(tmp_path)
    return tmp_path / f"normfuse-{VERSION}"


def test_archive_is_the_commit(archive, tree):
    wanted = {name for name in git("ls-files").split("\n") if name
              and not name.startswith("bench/results/")} | {"PKG-INFO"}
    assert sum(path.stat().st_size for path in tree.rglob("*") if path.is_file()) <= ARCHIVE_LIMIT
    assert {str(path.relative_to(tree)) for path in tree.rglob("*") if not path.is_dir()} == wanted
    sums = (archive.parent / "SHA256SUMS").read_text().split()
    assert sums == [hashlib.sha256(archive.read_bytes()).hexdigest(), archive.name]


def test_archive_is_reproducible(archive, tmp_path):
    """The same bytes from a clone elsewhere, made with another umask, time zone and locale."""
    head = git("rev-parse", "HEAD").strip()
    run(["git", "clone", "--quiet", ROOT, "clone"], tmp_path)
    run(["git", "checkout", "--quiet", head], tmp_path / "clone")
    (tmp_path / "clone/untracked.c").write_text("int not_of_the_commit;\n")
    (tmp_path / "clone/build").mkdir()
    (tmp_path / "clone/build/venv-release").symlink_to(BUILD / "venv-release")
    run(["sh", "-c", "umask 077; make dist"], tmp_path / "clone", TZ="Asia/Tokyo", LC_ALL="C")
    other = tmp_path / "clone/build/dist" / archive.name
    assert gzip.decompress(other.read_bytes()) == gzip.decompress(archive.read_bytes())
    assert other.read_bytes() == archive.read_bytes()


def test_archive_builds_offline(tree, tmp_path):
    """By a compiler and CMake alone; the program knows its commit."""
    offline = without_network()
    run([*offline, "cmake", "-S", tree, "-B", tmp_path / "b", "-DNORMFUSE_CUDA=OFF", "-DNORMFUSE_ENABLE_AVX2=OFF",
         "-DNORMFUSE_ENABLE_AVX512=OFF", "-DNORMFUSE_BUILD_TESTS=OFF"], tmp_path)
    run([*offline, "cmake", "--build", tmp_path / "b", "-j", os.environ.get("JOBS", "2")], tmp_path)
    run([*offline, "cmake", "--install", tmp_path / "b", "--prefix", tmp_path / "installed"], tmp_path)
    info = run([tmp_path / "installed/bin/normfuse", "info"], tmp_path)
    assert VERSION in info and git("rev-parse", "HEAD")[:12] in info
    libraries = next((tmp_path / "installed").rglob("pkgconfig")).parent
    run([os.environ.get("CC") or "cc", CONSUMER, f"-I{tmp_path / 'installed/include'}", f"-L{libraries}", "-lnormfuse",
         f"-Wl,-rpath,{libraries}", "-o", "consumer"], tmp_path)
    assert VERSION in run(["./consumer"], tmp_path)


def test_archive_installs_by_pip_offline(archive, tmp_path):
    """The source distribution: pip builds and installs it where scikit-build-core and NumPy are there already."""
    plain = ["NORMFUSE_CUDA", "NORMFUSE_ENABLE_AVX2", "NORMFUSE_ENABLE_AVX512"]
    run([*without_network(), BUILD / "venv-release/bin/python", "-m", "pip", "install", "--no-index", "--no-deps",
         "--no-build-isolation", "--target", tmp_path / "site", *(f"-Ccmake.define.{name}=OFF" for name in plain),
         archive], tmp_path)
    first = run([sys.executable, "-c", USE], tmp_path, PYTHONPATH=str(tmp_path / "site")).split()
    assert first[0] == VERSION and first[1].startswith(str(tmp_path / "site"))


# ---- the wheels -----------------------------------------------------------------------------------------------------


def wheel(machine):
    found = list((BUILD / "wheel").glob(f"normfuse-{VERSION}-py3-none-*_{machine}.whl"))
    if not found:
        pytest.skip(f"no wheel for {machine} was made")
    assert len(found) == 1
    return found[0]


@pytest.fixture(params=["x86_64", "aarch64"])
def machine(request):
    return request.param


def test_wheel_is_manylinux(machine):
    """What package indexes accept, and every glibc from 2.17 on runs."""
    path = wheel(machine)
    assert path.name == f"normfuse-{VERSION}-py3-none-manylinux2014_{machine}.manylinux_2_17_{machine}.whl"
    assert path.stat().st_size < WHEEL_LIMIT, f"{path.stat().st_size} bytes"
    with zipfile.ZipFile(path) as files:
        names = files.namelist()
        assert sorted(name for name in names if ".so" in name) == sorted(LIBRARIES)
        for name in LIBRARIES:
            assert files.read(name)[18:20] == {"x86_64": b"\x3e\x00", "aarch64": b"\xb7\x00"}[machine]
        record = files.read(f"normfuse-{VERSION}.dist-info/WHEEL").decode()
    assert f"Tag: py3-none-manylinux_2_17_{machine}" in record
    assert "linux_" + machine not in record.replace("manylinux", "")


def test_wheel_has_a_page(machine):
    """The description that an index shows."""
    run([BUILD / "venv-release/bin/python", "-m", "twine", "check", "--strict", wheel(machine)], ROOT)


def test_wheel_has_the_kernels(machine, tmp_path):
    """The text that NVRTC compiles for every GPU, and no more."""
    with zipfile.ZipFile(wheel(machine)) as files:
        library = files.extract(LIBRARIES[0], tmp_path)
    assert ".device_text" in run(["readelf", "-S", "-W", library], tmp_path)
    assert os.path.getsize(library) <= LIBRARY_LIMIT, f"{os.path.getsize(library)} bytes"


def test_wheel_of_this_machine(tmp_path):
    """Installed into an empty environment, used from an empty folder."""
    path = wheel(platform.machine())
    run([sys.executable, "-m", "venv", tmp_path / "venv"], tmp_path)
    python = tmp_path / "venv/bin/python"
    run([python, "-m", "pip", "install", "--quiet", path], tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    first = run([python, "-c", USE], empty).split()
    assert first[0] == VERSION and first[1].startswith(str(tmp_path / "venv"))


def test_hub(machine):
    """The package for the Kernel Hub: each variant has the library of the wheel, which manylinux_2_28 suffices for."""
    with zipfile.ZipFile(wheel(machine)) as files:
        library = files.read(LIBRARIES[0])
    variants = list((BUILD / "hub/build").glob(f"torch-stable-abi210-*-{machine}-linux"))
    assert variants, "make hub"
    for variant in variants:
        assert (variant / "lib/libnormfuse.so").read_bytes() == library
        needed = run(["readelf", "-W", "--dyn-syms", variant / "lib/libnormfuse.so"], ROOT)
        versions = {tuple(map(int, version.split("."))) for version in re.findall(r" UND \w+@GLIBC_([\d.]+)", needed)}
        assert versions and max(versions) <= (2, 28), max(versions)
        assert not re.search(r" UND (_?Py|\w+@(?!GLIBC_\d))", needed)


@pytest.fixture(scope="module")
def aarch64(tmp_path_factory):
    """Words that run a Python for aarch64 with NumPy: Debian's, unpacked into a folder, under an emulator."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not emulator or not shutil.which("apt-get"):
        pytest.skip("needs qemu-aarch64-static, and apt-get for a Python of aarch64")
    folder = tmp_path_factory.mktemp("aarch64")
    for name in ("lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    words = [f"-o{key}={value}" for key, value in (
        ("APT::Architecture", "arm64"), ("APT::Architectures", "arm64"), ("Dir::State::Lists", folder / "lists"),
        ("Dir::State::status", folder / "status"), ("Dir::Cache", folder / "cache"), ("APT::Sandbox::User", "root"),
        ("Acquire::Languages", "none"), ("APT::Install-Recommends", "0"))]
    try:
        run(["apt-get", "-q", *words, "update"], folder, 300)
        # libstdc++6: NumPy's.
        run(["apt-get", "-q", *words, "--download-only", "-y", "install", "python3-minimal", "libpython3-stdlib",
             "libstdc++6"],
            folder, 300)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"apt-get gives no Python of aarch64: {str(error)[-200:]}")
    for package in sorted((folder / "cache/archives").glob("*.deb")):
        run(["dpkg-deb", "-x", package, folder / "root"], folder)
    root = folder / "root"
    python = next(root.glob("usr/bin/python3.*"))
    version = python.name.replace("python", "")
    run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--platform",
         "manylinux_2_28_aarch64", "--platform", "manylinux_2_17_aarch64", "--platform", "manylinux2014_aarch64",
         "--python-version", version, "--target", folder / "numpy", "numpy"], folder)
    return [emulator, "-L", root, "-E", f"PYTHONHOME={root / 'usr'}", python], folder / "numpy"


def test_wheel_of_aarch64(aarch64, tmp_path):
    """Unpacked as pip does it, imported, one call; the library chooses NEON."""
    command, numpy = aarch64
    with zipfile.ZipFile(wheel("aarch64")) as files:
        files.extractall(tmp_path / "site")
    path = f"{tmp_path / 'site'}:{numpy}"
    words = [*command[:-1], "-E", f"PYTHONPATH={path}", command[-1]]
    first = run([*words, "-c", "import platform; print(platform.machine())" + USE], tmp_path).split()
    assert first[0] == "aarch64" and first[1] == VERSION and first[2].startswith(str(tmp_path / "site"))
    assert re.search(r"^isa\s+neon\b", run([*words, "-m", "normfuse", "info"], tmp_path), re.M)


# ---- the Debian packages --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packages():
    found = {path.name.split("_")[0]: path for path in (BUILD / "deb").glob(f"*_{VERSION}-*.deb")
             if "dbgsym" not in path.name}
    if not found:
        pytest.skip("no Debian packages were made")
    return found


def test_debian_packages_are_clean(packages):
    if not shutil.which("lintian"):
        pytest.skip("lintian is not installed")
    words = ["--allow-root"] if os.getuid() == 0 else []
    found = run(["lintian", *words, "--fail-on", "error", *(BUILD / "deb").glob("*.changes")], ROOT)
    assert "no-symbols-control-file" not in found


def test_debian_packages_work(packages, tmp_path):
    """Unpacked, not installed: debian/tests/use is what autopkgtest runs on installed ones."""
    assert set(packages) == {"libnormfuse0.1", "libnormfuse-dev", "libnormfuse-onnxruntime", "normfuse"}
    for package in packages.values():
        run(["dpkg-deb", "-x", package, tmp_path], tmp_path)
    libraries = next(tmp_path.glob("usr/lib/*/libnormfuse.so.0.1")).parent
    assert VERSION in run([tmp_path / "usr/bin/normfuse", "info"], tmp_path)
    assert (tmp_path / "usr/share/man/man1/normfuse.1.gz").is_file()
    run(["cc", CONSUMER, f"-I{tmp_path / 'usr/include'}", f"-L{libraries}", "-lnormfuse", "-o", "consumer"], tmp_path)
    assert VERSION in run(["./consumer"], tmp_path, LD_LIBRARY_PATH=str(libraries))
    needed = run(["readelf", "-d", libraries / "normfuse/libnormfuse_onnxruntime.so"], tmp_path)
    assert "libnormfuse.so.0.1" in needed and "RUNPATH" not in needed
