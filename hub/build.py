#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""build.py OUT MACHINE=LIBRARY... - makes the repository of the Kernel Hub in the folder OUT: for each machine (x86_64,
aarch64) the build variants that VARIANTS lists, each with the Python files of normfuse.torch and the libnormfuse.so
LIBRARY. `make hub` gives it the libraries of the wheels. Needs nothing but the standard library.

A variant is one package. Its operators are torch.ops.<id>, where id holds the backend and the commit, so that several
builds live in one process. A library with symbols beyond manylinux_2_28 is refused, unless --any-glibc says that it is
for this machine alone."""
import argparse
import base64
import hashlib
import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
HUB = ROOT / "hub"
PACKAGE = ROOT / "python/normfuse"
# The oldest PyTorch whose stable interface the library finds complete.
FRAMEWORK = "torch-stable-abi210"
# The library has no part of CUDA, and finds the driver and NVRTC of either version: one file serves all.
VARIANTS = {"x86_64": ("cu126", "cu130", "cpu"), "aarch64": ("cpu",)}
# Kernels are compiled at run time, for the GPU that is there.
ARCHITECTURES = ["8.0+PTX"]
# Libraries that manylinux_2_28 has, and that Hub kernels may need beside PyTorch.
GLIBC = (2, 28)
NEEDED = re.compile(r"(libc|libm|libdl|libpthread|librt|ld-linux-[a-z0-9-]+)\.so\.\d+")
# Older versions of `kernels` import the folder of the kernel's name.
SAME_NAME = '''\
# SPDX-License-Identifier: MIT
"""The package above, for versions of `kernels` that import this folder."""
import importlib.util
import pathlib
import sys

_name = "{id}"
if _name not in sys.modules:
    _spec = importlib.util.spec_from_file_location(_name, pathlib.Path(__file__).parent.parent / "__init__.py")
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
globals().update((word, getattr(sys.modules[_name], word)) for word in sys.modules[_name].__all__)
__all__ = sys.modules[_name].__all__
'''


def beyond(library):
    """The needs of a library that manylinux_2_28 does not meet: symbols of newer glibc, of C++ or Python, and
    libraries."""
    text = subprocess.run(["readelf", "-W", "--dyn-syms", "--dynamic", library], check=True, text=True,
                          stdout=subprocess.PIPE).stdout
    found = [name for name in re.findall(r"\(NEEDED\).*\[(.+)\]", text) if not NEEDED.fullmatch(name)]
    for symbol, version in re.findall(r" UND (\w+)(?:@+([\w.]+))?", text):
        numbers = re.fullmatch(r"GLIBC_([\d.]+)", version)
        if version and not numbers or numbers and tuple(map(int, numbers[1].split("."))) > GLIBC:
            found.append(f"{symbol}@{version}")
        elif symbol.startswith(("Py", "_Py")):
            found.append(symbol)
    return sorted(found)


def commit_of_tree():
    """The commit, with `_dirty` where files differ from it."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()

    try:
        return git("rev-parse", "--short=7", "HEAD") + ("_dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        sys.exit("build.py: not a checkout of git: give --commit")


def write_variant(folder, backend, commit, library):
    """The package of one variant: what it imports, the library, and what describes it."""
    kind = "cpu" if backend == "cpu" else "cuda"
    identifier = f"_normfuse_{kind}_{commit}"
    for part in ("torch", "lib", "normfuse"):
        (folder / part).mkdir(parents=True)
    for source in sorted((PACKAGE / "torch").glob("*.py")):
        shutil.copyfile(source, folder / "torch" / source.name)
    namespace = folder / "torch/_namespace.py"
    text = namespace.read_text()
    namespace.write_text(text.replace('NAMESPACE = "normfuse"', f'NAMESPACE = "{identifier}"'))
    if namespace.read_text() == text:
        sys.exit(f"build.py: {namespace.name} has no line that names the namespace")
    for name in ("_library.py", "_words.py"):
        shutil.copyfile(PACKAGE / name, folder / name)
    shutil.copyfile(HUB / "__init__.py", folder / "__init__.py")
    shutil.copyfile(HUB / "layers.py", folder / "layers.py")
    shutil.copyfile(library, folder / "lib/libnormfuse.so")
    (folder / "normfuse/__init__.py").write_text(SAME_NAME.format(id=identifier))
    digests = {str(path.relative_to(folder)): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
               for path in sorted(folder.rglob("*")) if path.is_file()}
    about = {"id": identifier, "name": "normfuse", "version": 0, "license": "mit", "python-depends": [],
             "backend": {"type": kind, **({"archs": ARCHITECTURES} if kind == "cuda" else {})},
             "digest": {"algorithm": "sha256", "files": digests}}
    (folder / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")


def build(out, libraries, commit, any_glibc=False):
    """libraries: {machine: path}. Returns the variants."""
    if out.exists():
        shutil.rmtree(out)
    made = []
    for machine, library in libraries.items():
        found = [] if any_glibc else beyond(library)
        if found:
            sys.exit(f"build.py: {library} needs what manylinux_2_28 does not have: {', '.join(found[:8])}")
        for backend in VARIANTS[machine]:
            made.append(f"{FRAMEWORK}-{backend}-{machine}-linux")
            write_variant(out / "build" / made[-1], backend, commit, library)
    for name in ("build.toml", "flake.nix"):
        shutil.copyfile(HUB / name, out / name)
    shutil.copyfile(HUB / "CARD.md", out / "README.md")
    shutil.copyfile(ROOT / "LICENSE", out / "LICENSE")
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("libraries", nargs="+", metavar="MACHINE=LIBRARY")
    parser.add_argument("--commit", help="up to 40 hexadecimal digits; default: that of the checkout")
    parser.add_argument("--any-glibc", action="store_true", help="take a library that was built for this machine alone")
    words = parser.parse_args()
    libraries = dict(word.split("=", 1) for word in words.libraries)
    for machine in libraries:
        if machine not in VARIANTS:
            parser.error(f"no variant for {machine}: one of {', '.join(VARIANTS)}")
    for variant in build(words.out, libraries, words.commit or commit_of_tree(), words.any_glibc):
        print(words.out / "build" / variant)


if __name__ == "__main__":
    main()
