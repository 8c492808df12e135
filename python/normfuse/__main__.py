# SPDX-License-Identifier: MIT
"""python -m normfuse info: what is installed, what it runs on, and how PyTorch's operators are bound. A line that
cannot be found out says why."""
import argparse
import importlib.metadata
import platform
from typing import Callable, Iterator, Tuple

from . import __version__
from ._library import CompilerInformation, Information, Missing, call, library
from ._program import run


def torch_binding() -> str:
    """PyTorch's version, and which binding of the operators is active and why not the other, or why there is none."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    try:
        from .torch import _operators
        binding, reason = _operators.binding()
        return f"{version}; operators through {binding}" + (f": {reason}" if reason else "")
    except Exception as error:
        return f"{version}; normfuse.torch cannot be imported: {error or type(error).__name__}"


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def text(words: bytes) -> str:
    return words.decode("utf-8", "replace")


def library_rows() -> Iterator[Tuple[str, str]]:
    facts, compiler = Information(), CompilerInformation()
    call(library.normfuse_info(facts))
    yield from (("cpu", text(facts.cpu)),
                ("isa", f"{text(facts.isa)} (usable: {text(facts.isas_usable)}; built: {text(facts.isas_built)})"),
                ("caches", f"{facts.l1_bytes} {facts.l2_bytes} {facts.llc_bytes} bytes"),
                ("threads", str(facts.threads)),
                ("compiler", text(facts.compiler)), ("cuda", text(facts.cuda)))
    if library.normfuse_compiler_info(compiler) == 0:
        yield "nvrtc", text(compiler.compiler)
        yield "kernels", (f"{compiler.cache_kernels} in {text(compiler.cache)}" if not compiler.cache_problem else
                          f"kept nowhere: {text(compiler.cache)} {text(compiler.cache_problem)}")


def rows() -> Iterator[Tuple[str, str]]:
    yield "version", __version__
    try:
        yield "library", str(library.path)
        yield from library_rows()
    except Exception as error:
        yield "library", str(error)
    yield "python", platform.python_version()
    others: Tuple[Tuple[str, Callable[[], str]], ...] = (
        *((name, lambda name=name: version_of(name)) for name in ("numpy", "jax", "onnxruntime")),
        ("torch", torch_binding))
    for name, value in others:
        try:
            yield name, value()
        except Exception as error:
            yield name, f"unknown: {error}"


def info() -> None:
    for name, value in rows():
        print(f"{name:11} {value}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m normfuse", description=__doc__)
    parser.add_argument("command", choices=["info"],
                        help="info: version, instruction sets, GPUs, driver, NVRTC, the cache of kernels, PyTorch's "
                             "binding")
    parser.parse_args()
    info()
    return int(isinstance(library, Missing))  # Python itself exits with 1 where a module cannot be imported


if __name__ == "__main__":
    run(main)
