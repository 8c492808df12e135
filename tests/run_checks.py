# SPDX-License-Identifier: MIT
"""Runs every check of `make check`, `make check-changed`, `make check-sanitize`, `make check-platforms`,
`make check-torch-versions`, `make check-pythons` or `make check-release`, adds up what they counted, prints the ten
slowest commands, and closes with the line `N passed, N failed, N skipped`. Needs nothing but the standard library.
Logs: build/logs/."""
import argparse
import concurrent.futures
import fnmatch
import functools
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")
PROGRAMS = ["test_passes", "test_problem_line", "test_arguments", "test_failures", "test_threads", "test_reference",
            "test_verify", "test_processes", "test_operators", "test_stack", "test_torch_shim", "test_onnxruntime_shim"]
# In a static program libc itself calls what they refuse, and no library can be loaded.
DYNAMIC = {"test_failures", "test_torch_shim"}
# There only where the CUDA side is built.
CUDA_PROGRAMS = ["test_cuda_host", "test_cuda_calls", "test_compile"]
CUDA_PLANS = "test_cuda_plans"  # has one thread: nothing for ThreadSanitizer
# -Wpadded: no struct of the interface has bytes that nobody sets.
HEADER_FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wundef", "-Wredundant-decls",
                "-Wpadded", "-Werror", "-fsyntax-only"]
# The compiler of a platform, the program that runs its programs here, and the packages of Debian that bring the
# compiler and its static C library.
PLATFORMS = {
    "aarch64": ("aarch64-linux-gnu-gcc", "qemu-aarch64-static", "gcc-aarch64-linux-gnu and libc6-dev-arm64-cross"),
    "s390x": ("s390x-linux-gnu-gcc", "qemu-s390x-static", "gcc-s390x-linux-gnu and libc6-dev-s390x-cross"),
    "riscv64": ("riscv64-linux-gnu-gcc", "qemu-riscv64-static", "gcc-riscv64-linux-gnu and libc6-dev-riscv64-cross"),
    "musl": ("musl-gcc", None, "musl-tools"),
}
PYTHON_TESTS = ROOT / "python/tests"
# Files of python/tests that share a process, since each process imports PyTorch, and some of them models, for up to five
# seconds. The longest groups first; the other files have a process each.
TOGETHER = [("test_operators.py", "test_tools.py"),
            ("test_functional.py", "test_modules.py", "test_vmap.py", "test_channel_norm.py",
             "test_channel_norm_draws.py", "test_rules.py", "test_prepare.py", "test_words.py", "test_cuda.py"),
            ("test_convert_channel_norm.py", "test_convert_graphs.py"),
            ("test_convert.py", "test_convert_meaning.py", "test_convert_biases.py", "test_convert_programs.py",
             "test_models.py", "test_comfyui.py"),
            ("test_jax.py",), ("test_jax_devices.py",), ("test_distributed.py",), ("test_bench.py",),
            ("test_onnx.py", "test_onnx_graphs.py"), ("test_examples.py",)]
FUZZ_TARGETS = ["fuzz_calls", "fuzz_npy", "fuzz_problem_line"]

totals = [0, 0, 0]
failures = []
times = []  # (seconds, name) of every command
printing = threading.Lock()  # what a check prints stays together


def count(name, passed, failed, skipped, note="", shown=()):
    """Adds up a check and prints it, below the lines `shown`."""
    passed, failed, skipped = int(passed), int(failed), int(skipped)
    line = (f"{'FAIL' if failed else 'skip' if skipped and not passed else 'ok':4}  {name}: "
            f"{passed} passed, {failed} failed, {skipped} skipped{'  (' + note + ')' if note else ''}")
    with printing:
        for k, n in enumerate((passed, failed, skipped)):
            totals[k] += n
        if failed:
            failures.append(name)
        print(*shown, line, sep="\n", flush=True)


def skip(name, reason, shown=()):
    count(name, 0, 0, 1, reason, shown)


def at_once(groups):
    """Runs groups of checks, as many at once as --jobs says, the first ones first. Checks of one group run in turn;
    those that it returns are groups of their own, behind all others."""
    with concurrent.futures.ThreadPoolExecutor(int(args.jobs)) as pool:
        futures = [pool.submit(group) for group in groups]
        try:
            for future in futures:  # which grow meanwhile
                futures += [pool.submit(group) for group in future.result() or ()]
        except BaseException:
            for future in futures:
                future.cancel()
            raise


def log_of(name, ending):
    LOGS.mkdir(parents=True, exist_ok=True)
    return LOGS / (re.sub(r"[^A-Za-z0-9]+", "-", name) + ending)


def run(name, command, timeout=300, env=None, cwd=ROOT):
    """(exit code, output, seconds); a command that runs past its time has the exit code None."""
    log = log_of(name, ".txt")
    start = time.monotonic()
    try:
        process = subprocess.Popen([str(word) for word in command], cwd=cwd, env={**os.environ, **(env or {})},
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True)
    except OSError as error:
        return 127, f"{error}\n", 0.0
    try:
        output, _ = process.communicate(timeout=timeout)
        code = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        code = None
    seconds = time.monotonic() - start
    times.append((seconds, name))
    output = output.decode("utf-8", "replace")
    log.write_text(f"$ {' '.join(str(word) for word in command)}\n{output}\nexit code {code}\n")
    return code, output, seconds


def check(name, command, timeout=300, env=None, cwd=ROOT, expect=None):
    """One check: the command succeeds, and prints `expect` if given. True if so."""
    code, output, seconds = run(name, command, timeout, env, cwd)
    good = code == 0 and (expect is None or expect in output)
    count(name, good, not good, 0,
          "ran past its time" if code is None else f"exit code {code}" if code else
          f"did not print {expect!r}" if not good else f"{seconds:.0f} s", [] if good else output.splitlines()[-40:])
    return good


def test_program(name, command, timeout=300, env=None, past_time_is_skip=False):
    """A program that prints a closing line. Without one, or with an exit code that contradicts it, it failed."""
    code, output, seconds = run(name, command, timeout, env)
    lines = output.splitlines()
    closing = next(filter(None, (CLOSING.match(line) for line in reversed(lines))), None)
    shown = [line for line in lines if line.startswith(("FAIL", "SKIP", "skip", "#"))]
    if code is None and past_time_is_skip and not any(line.startswith("FAIL") for line in lines):
        skip(name, f"stopped after {timeout} s without a result")
        return
    if not closing:
        count(name, 0, 1, 0, f"ran past {timeout} s" if code is None else f"no closing line, exit code {code}",
              lines[-40:])
        return
    passed, failed, skipped = (int(n) for n in closing.groups())
    note = f"{seconds:.0f} s"
    shown = (shown[:40] or lines[-40:]) if failed else ["      " + line for line in shown[:20]]
    if code != 0 and not failed:
        shown += lines[-40:]
        failed, note = 1, f"exit code {code} after its closing line"
    if passed + failed + skipped == 0:
        failed, note = 1, "counted nothing"
    count(name, passed, failed, skipped, note, shown)


def pytest(name, words, timeout=300, env=None, python=sys.executable):
    report = log_of(name, ".xml")
    report.unlink(missing_ok=True)
    code, output, seconds = run(name, [python, "-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider",
                                       f"--junitxml={report}", *words], timeout,
                                {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})})
    passed = failed = skipped = 0
    if report.exists():
        for suite in xml.etree.ElementTree.parse(report).iter("testsuite"):
            failed += int(suite.get("failures", 0)) + int(suite.get("errors", 0))
            skipped += int(suite.get("skipped", 0))
            passed += int(suite.get("tests", 0))
        passed -= failed + skipped
    # A file that is skipped as a whole ends with pytest's code for "no tests".
    skipped_whole = code == 5 and skipped > 0 and passed == 0
    if (code != 0 or passed == 0) and not failed and not skipped_whole:
        failed = 1
    lines = output.splitlines()
    count(name, passed, failed, skipped, "ran past its time" if code is None else f"{seconds:.0f} s",
          lines[-60:] if failed else ["      " + line for line in lines if line.startswith("SKIPPED")])


def cmake_build(name, folder, options, targets=()):
    """Configures and builds all, or these targets, into build/<folder>. True if that worked; counted as one check."""
    start = time.monotonic()
    binary = BUILD / folder
    code, output, _ = run(name + " configure", [args.cmake, "-S", ROOT, "-B", binary, *options], 120)
    if code == 0:
        words = ["--target", *targets] if targets else []
        code, output, _ = run(name, [args.cmake, "--build", binary, "-j", args.jobs, *words], 900)
    count(name, code == 0, code != 0, 0, f"{time.monotonic() - start:.0f} s" if code == 0 else f"exit code {code}",
          [] if code == 0 else output.splitlines()[-40:])
    return code == 0


def some(few, all_of_them):
    """How many cases of many: few, and all of them with --full."""
    return str(all_of_them if args.full else few)


def compiler():
    return os.environ.get("CC") or "cc"


def cxx_compiler():
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


# ---- make check -----------------------------------------------------------------------------------------------------

# Exceptions, results, and a compiler without exceptions, which gives results.
CXX_MODES = {"": [], "results": ["-DNORMFUSE_NO_EXCEPTIONS"], "-fno-exceptions": ["-fno-exceptions"]}
CXX_FLAGS = ["-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wold-style-cast",
             "-Wzero-as-null-pointer-constant", "-Werror"]


def link_words():
    """What a program that links the static library needs."""
    return [f"-I{ROOT / 'include'}", BUILD / "release/libnormfuse.a", "-lpthread", "-ldl", "-lm"]


def cxx():
    """normfuse.hpp: alone, its test with exceptions and without, and its example."""
    header = BUILD / "header.cpp"
    header.write_text("#include <normfuse.hpp>\n")
    program = BUILD / "test_cpp"
    for command in ("g++", "clang++"):
        if not shutil.which(command):
            skip(f"normfuse.hpp, {command}", f"{command} is not installed")
            continue
        for mode, flags in CXX_MODES.items():
            check(f"normfuse.hpp alone, {command} {mode}".rstrip(),
                  [command, *CXX_FLAGS, *flags, "-fsyntax-only", f"-I{ROOT / 'include'}", header])
        # Each compiler in one of the two ways.
        flags = CXX_MODES["" if command == "g++" else "-fno-exceptions"]
        title = f"test_cpp, {command} {' '.join(flags)}".rstrip()
        if check(f"{title}, build", [command, *CXX_FLAGS, *flags, f"-I{ROOT / 'tests'}",
                                     ROOT / "tests/cpu/test_cpp.cpp", *link_words(), "-o", program]):
            test_program(title, [program])
    if not cxx_compiler():
        return
    example = BUILD / "example_strips"
    if check("example: strips.cpp, build", [cxx_compiler(), *CXX_FLAGS, ROOT / "examples/strips.cpp", *link_words(),
                                            "-o", example]):
        check("example: strips.cpp", [example], timeout=60, expect="largest difference")


def header_alone(compilers=("gcc", "clang")):
    """The header as the first and only thing that a file includes."""
    source = BUILD / "header.c"
    source.write_text("#include <normfuse.h>\n")
    empty = BUILD / "empty.c"
    empty.write_text("typedef int nothing;\n")
    for name in compilers:
        for language, command, standards, flags in (
                ("C", name, ("c11", "c17", "c2x"), ["-Wstrict-prototypes"]),
                ("C++", name.replace("gcc", "g++").replace("clang", "clang++"), ("c++17", "c++20", "c++2b"),
                 ["-Wold-style-cast", "-Wzero-as-null-pointer-constant", "-x", "c++"])):
            if not shutil.which(command):
                skip(f"header alone, {command}", f"{command} is not installed")
                continue
            for standard in standards:
                title = f"header alone, {command} -std={standard}"
                if run(title + ", empty", [command, f"-std={standard}", "-fsyntax-only", *flags, empty])[0] != 0:
                    skip(title, "the compiler does not have that standard")
                else:
                    check(title, [command, f"-std={standard}", *HEADER_FLAGS, *flags, f"-I{ROOT / 'include'}", source])


def static_alone():
    """An installation of the static library alone, used as users would. Nothing is compiled for it."""
    binary, stage, out = BUILD / "static", BUILD / "stage-static", BUILD / "consumers-static"
    for folder in (binary, stage, out):
        shutil.rmtree(folder, ignore_errors=True)
    if not check("static library alone, configure", [
            args.cmake, "-S", ROOT, "-B", binary, "-DNORMFUSE_BUILD_SHARED=OFF", "-DNORMFUSE_BUILD_CLI=OFF",
            "-DNORMFUSE_BUILD_TESTS=OFF", "-DNORMFUSE_CUDA=OFF"]):
        return
    shutil.copy(BUILD / "release/libnormfuse.a", binary)
    out.mkdir()
    if not check("static library alone, install", [args.cmake, "--install", binary, "--prefix", stage]):
        return
    pc = next(stage.rglob("normfuse.pc"))
    version = re.search(r"^Version: (.*)$", pc.read_text(), re.M).group(1)
    if check("static library alone: find_package, configure", [
            args.cmake, "-S", ROOT / "tests/consumers/find_package", "-B", out, f"-DCMAKE_PREFIX_PATH={stage}",
            "-DCONSUMER_SHARED=OFF", "-DCONSUMER_CXX=OFF"]) and \
       check("static library alone: find_package, build", [args.cmake, "--build", out, "-j", args.jobs]):
        for name in ("consumer_c", "consumer_static"):
            check(f"static library alone: find_package, {name}", [out / name], expect=version)
    for option in ([], ["--static"]) if shutil.which("pkg-config") else ():
        name = " ".join(["static library alone: pkg-config", *option])
        words = subprocess.run(["pkg-config", *option, "--cflags", "--libs", "normfuse"],
                               env={**os.environ, "PKG_CONFIG_PATH": str(pc.parent)}, stdout=subprocess.PIPE,
                               text=True).stdout.split()
        if check(f"{name}, build", [compiler(), "-std=c11", ROOT / "tests/consumers/consumer.c", "-o",
                                    out / "pkg_config", *words]):
            check(f"{name}, run", [out / "pkg_config"], expect=version)


def inexact_math():
    """Flags that change results are refused when CMake is run, and by the compiler, however they came there."""
    source = BUILD / "exact.c"
    source.write_text('#include "scalar.h"\nint main(void) { return 0; }\n')
    words = [compiler(), "-std=c11", "-fsyntax-only", f"-I{ROOT / 'include'}", f"-I{ROOT / 'src'}"]
    check("flags: none", [*words, source])
    flags = {"-ffast-math": True, "-Ofast": True, "-ffinite-math-only": True, "-fno-signed-zeros": None,
             "-funsafe-math-optimizations": None, "-freciprocal-math": None,
             "-fassociative-math -fno-signed-zeros -fno-trapping-math": None}
    for flag, has_macro in flags.items():
        code, output, _ = run(f"flags: {flag}", [*words, *flag.split(), source])
        good = code != 0 and "must be compiled without -ffast-math" in output
        if good or has_macro:
            count(f"flags: {flag}, compiled", good, not good, 0, f"exit code {code}")
        else:
            skip(f"flags: {flag}, compiled", "the compiler has no macro for it; CMake knows its name")
    for number, option in enumerate(["-DCMAKE_C_FLAGS=-ffast-math", "-DCMAKE_C_FLAGS=-O2 -fassociative-math",
                                     "-DCMAKE_C_FLAGS_RELEASE=-Ofast", "-DCMAKE_C_FLAGS=-ffinite-math-only"]):
        folder = BUILD / f"inexact-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        code, output, _ = run(f"flags: {option}, configured", [
            args.cmake, "-S", ROOT, "-B", folder, "-DNORMFUSE_CUDA=OFF", "-DCMAKE_BUILD_TYPE=Release", option])
        good = code not in (0, None) and "must be compiled without -ffast-math" in " ".join(output.split())
        count(f"flags: {option[2:]}, configured", good, not good, 0, f"exit code {code}",
              [] if good else output.splitlines()[-20:])


def installed():
    """Installs into build/stage, moves that, and builds programs against it as users would."""
    for folder in ("stage", "moved", "consumers"):
        shutil.rmtree(BUILD / folder, ignore_errors=True)
    if not check("install", [args.cmake, "--install", BUILD / "release", "--prefix", BUILD / "stage"]):
        return
    wanted = ["include/normfuse.h", "include/normfuse.hpp", "bin/normfuse", "*/libnormfuse.so",
              "*/libnormfuse_onnxruntime.so", "*/libnormfuse.a", "*/pkgconfig/normfuse.pc",
              "*/cmake/normfuse/normfuse-config.cmake", "share/man/man1/normfuse.1",
              "share/bash-completion/completions/normfuse", "share/zsh/site-functions/_normfuse"]
    files = [str(path.relative_to(BUILD / "stage")) for path in (BUILD / "stage").rglob("*")]
    missing = [name for name in wanted if not fnmatch.filter(files, name)]
    count("installed files", len(wanted) - len(missing), len(missing), 0, "missing: " + ", ".join(missing) if missing
          else "")
    stage = BUILD / "moved"  # an installed tree may be moved: nothing in it holds its first path
    os.rename(BUILD / "stage", stage)
    pc = next(stage.rglob("normfuse.pc"), None)
    if pc is None:
        return
    libdir = pc.parent.parent
    out = BUILD / "consumers"
    out.mkdir()
    version = re.search(r"^Version: (.*)$", pc.read_text(), re.M).group(1)
    source = ROOT / "tests/consumers/consumer.c"

    if check("consumer: find_package, configure", [
            args.cmake, "-S", ROOT / "tests/consumers/find_package", "-B", out / "find_package",
            f"-DCMAKE_PREFIX_PATH={stage}", f"-DCONSUMER_CXX={'ON' if cxx_compiler() else 'OFF'}"]) and \
       check("consumer: find_package, build", [args.cmake, "--build", out / "find_package", "-j", args.jobs]):
        for name in ("consumer_c", "consumer_static") + (("consumer_cxx", "consumer_hpp") if cxx_compiler() else ()):
            check(f"consumer: find_package, {name}", [out / "find_package" / name], expect=version)
        check("consumer: find_package, unloaded and loaded again", [out / "find_package/unload", *sorted(
            (out / "find_package").glob("libplugin_*.so"))], timeout=20, expect="unloaded")
    if not cxx_compiler():
        skip("consumer: find_package, consumer_cxx and consumer_hpp", "no C++ compiler is installed")

    check("consumer: add_subdirectory, configure", [args.cmake, "-S", ROOT / "tests/consumers/add_subdirectory",
                                                    "-B", out / "add_subdirectory", f"-DNORMFUSE_SOURCE={ROOT}"])

    if shutil.which("pkg-config"):
        env = {"PKG_CONFIG_PATH": str(pc.parent)}
        words = subprocess.run(["pkg-config", "--cflags", "--libs", "normfuse"], env={**os.environ, **env},
                               stdout=subprocess.PIPE, text=True).stdout.split()
        if check("consumer: pkg-config, build", [compiler(), "-std=c11", source, "-o", out / "pkg_config", *words,
                                                 f"-Wl,-rpath,{libdir}"]):
            check("consumer: pkg-config, run", [out / "pkg_config"], expect=version)
        if cxx_compiler() and check("consumer: pkg-config, normfuse.hpp, build", [
                cxx_compiler(), "-std=c++17", source.with_suffix(".cpp"), "-o", out / "pkg_config_hpp", *words,
                f"-Wl,-rpath,{libdir}"]):
            check("consumer: pkg-config, normfuse.hpp, run", [out / "pkg_config_hpp"], expect=version)
        words = subprocess.run(["pkg-config", "--static", "--cflags", "--libs", "normfuse"], env={**os.environ, **env},
                               stdout=subprocess.PIPE, text=True).stdout.split()
        words = ["-l:libnormfuse.a" if word == "-lnormfuse" else word for word in words]
        if check("consumer: pkg-config --static, build", [compiler(), "-std=c11", source, "-o", out / "pkg_static",
                                                          *words]):
            check("consumer: pkg-config --static, run", [out / "pkg_static"], expect=version)
    else:
        skip("consumer: pkg-config", "pkg-config is not installed")

    check("installed program", [stage / "bin/normfuse", "info"], expect=version)


def examples():
    for name in ("example_group_norm",):
        check(f"example: {name}", [BUILD / "release" / name], timeout=60)


C_FLAGS = ["-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror"]


def shards():
    """The examples in C over processes and over GPUs."""
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        skip("example: mpi_group_norm.c", "mpicc and mpirun are not installed (Debian: libopenmpi-dev, openmpi-bin)")
    else:
        program = BUILD / "mpi_group_norm"
        if check("example: mpi_group_norm.c, build", ["mpicc", *C_FLAGS, ROOT / "examples/mpi_group_norm.c",
                                                      *link_words(), "-o", program]):
            # Open MPI refuses root and more ranks than cores unless told so; other MPIs do not know the words.
            version = run("mpirun", ["mpirun", "--version"], 20)[1]
            words = ["--allow-run-as-root", "--oversubscribe"] if "Open MPI" in version else []
            for ranks in (2, 4):
                check(f"example: mpi_group_norm.c, {ranks} ranks", ["mpirun", *words, "-n", str(ranks), program],
                      timeout=60, env={"NORMFUSE_NUM_THREADS": "1"},
                      expect=f"{ranks} ranks: statistics, sums and parameter gradients have the same bits")
    source = BUILD / "nccl.c"
    source.write_text("#include <cuda_runtime_api.h>\n#include <nccl.h>\n")
    folders = [os.path.join(home, "include") for home in (os.environ.get("NCCL_HOME"), os.environ.get("CUDA_HOME"),
                                                          "/usr/local/cuda") if home]
    words = [word for folder in folders for word in ("-isystem", folder)]
    if run("nccl.h", [compiler(), "-fsyntax-only", *words, source], 20)[0] != 0:
        skip("example: nccl_batch_norm.c", "nccl.h and cuda_runtime_api.h are not both found (NCCL_HOME, CUDA_HOME)")
    else:
        check("example: nccl_batch_norm.c, compiled only", [compiler(), *C_FLAGS, "-fsyntax-only", *words,
                                                            f"-I{ROOT / 'include'}",
                                                            ROOT / "examples/nccl_batch_norm.c"])


def second_compiler():
    """The other of gcc and clang: no warnings, and the same bits from its tables."""
    code, output, _ = run("compiler", [compiler(), "--version"], 20)
    other = "gcc" if "clang" in output else "clang"
    if not shutil.which(other):
        skip(f"build with {other}", f"{other} is not installed")
        return
    # The library, the program and one test; all of it with --full.
    if cmake_build(f"build with {other}, warnings are errors", other,
                   ["-DNORMFUSE_WERROR=ON", f"-DCMAKE_C_COMPILER={other}"],
                   [] if args.full else ["normfuse_program", "normfuse_onnxruntime", "test_passes"]):
        test_program(f"{other}: test_passes", [BUILD / other / "test_passes"])


def cross_build(name, *targets, flags=None):
    """Builds static programs for another platform, warnings as errors; `make check` without --full with these flags in
    place of Release's. Returns the words that run them here, in front of the program's name; None, and counted: this
    machine has no compiler or emulator for it, or the build failed."""
    compiler, emulator, package = PLATFORMS[name]
    found = emulator and (shutil.which(emulator) or shutil.which(emulator.replace("-static", "")))
    if emulator and not found:
        skip(name, f"{emulator} is not installed")
        return None
    source, program = BUILD / f"static-{name}.c", BUILD / f"static-{name}"
    source.write_text("#include <pthread.h>\nint main(void) { return 0; }\n")
    if not shutil.which(compiler) or run(f"{name} compiler", [compiler, "-static", source, "-o", program], 60)[0] != 0:
        skip(name, f"{compiler} with a static C library is not installed (Debian: {package})")
        return None
    quick = [f"-DCMAKE_C_FLAGS_RELEASE={flags}"] if flags and not args.full else []
    system = [] if not emulator else ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={name}"]
    if not cmake_build(f"{name}: build, warnings are errors", name, [
            f"-DCMAKE_C_COMPILER={compiler}", "-DCMAKE_EXE_LINKER_FLAGS=-static", "-DNORMFUSE_BUILD_SHARED=OFF",
            "-DNORMFUSE_WERROR=ON", "-DNORMFUSE_CUDA=OFF", *quick, *system], targets):
        return None
    return [found] if emulator else []


def cross_tests(name, emulator, *tests, limit=400):
    """Each test: a program with its words, or {variable: value} first. Emulated ones may run past their time."""
    for words in tests:
        environment, words = (words[0], words[1:]) if isinstance(words[0], dict) else ({}, words)
        title = " ".join([f"{name}: {words[0]}", *environment.values()])
        test_program(title, [*emulator, BUILD / name / words[0], *words[1:]], limit,
                     {"NORMFUSE_NUM_THREADS": "2", **environment}, past_time_is_skip=bool(emulator))


def cross_program(name, emulator, *words):
    """Words of pytest, which finds the platform's program under NORMFUSE_PROGRAM, and this machine's for
    test_platform.py."""
    program = BUILD / name / "run-normfuse"
    program.write_text("#!/bin/sh\nexec " + " ".join([*emulator, f"'{BUILD / name / 'normfuse'}'"]) + ' "$@"\n')
    program.chmod(0o755)
    pytest(f"{name}: test_platform.py", ["tests/test_platform.py"],
           env={"NORMFUSE_PROGRAM": str(BUILD / "release/normfuse"), "NORMFUSE_OTHER_PROGRAM": str(program)})
    pytest(f"{name}: test_program.py", ["tests/test_program.py", *words], 900, env={"NORMFUSE_PROGRAM": str(program)})


# Reaches every pass; all operator cases would take an emulator a quarter of an hour.
OPTIONS = ("test_operators", ROOT / "tests/cases/options.txt")
# So does each third of its cases: the lists in it have two or four choices, mostly, so that each choice has its turn.
THIRD = ("test_operators", "--every", "3", ROOT / "tests/cases/options.txt")


def neon():
    """The NEON tables, on an emulated aarch64."""
    if os.uname().machine == "aarch64":
        return
    # gcc takes a minute less for the tables of NEON.
    emulator = cross_build("aarch64", "test_passes", "test_operators", flags="-O1 -DNDEBUG")
    if emulator is not None:
        cross_tests("aarch64", emulator, ("test_passes",), THIRD)


def big_endian():
    """Another byte order, and a CPU without a table of its own: what takes seconds. Without CUDA, and without
    optimization, which has no other build."""
    emulator = cross_build("s390x", "test_arguments", "test_problem_line", "normfuse_program", flags="-O0")
    if emulator is not None:
        cross_tests("s390x", emulator, ("test_arguments",), ("test_problem_line",))
        cross_program("s390x", emulator, "-k", "order or spellings or header_versions or written_header")


def all_platforms():
    """What takes an emulator minutes, and compilers of other versions."""
    for name in PLATFORMS:
        emulator = cross_build(name)
        if emulator is None:
            continue
        skip(f"{name}: {' and '.join(sorted(DYNAMIC))}", "the program is static")
        cross_tests(name, emulator,
                    *((program,) for program in PROGRAMS if program not in {"test_operators", *DYNAMIC}), OPTIONS)
        if name == "musl":
            cross_tests(name, emulator, ({"NORMFUSE_MAX_ISA": "avx2"}, *OPTIONS),
                        ({"NORMFUSE_MAX_ISA": "scalar"}, *OPTIONS))
        # Timed out, or ended by a signal, an emulator is not what it emulates.
        cross_program(name, emulator, *(["-k", "not bench and not signal"] if emulator else []))
    names = {name for folder in os.get_exec_path() if os.path.isdir(folder) for name in os.listdir(folder)
             if re.fullmatch(r"(gcc|clang)-\d+", name)}
    usual = {os.path.realpath(shutil.which(name)) for name in ("gcc", "clang") if shutil.which(name)}
    for name in sorted(names):
        if os.path.realpath(shutil.which(name)) in usual:
            continue
        if cmake_build(f"build with {name}, warnings are errors", name,
                       ["-DNORMFUSE_WERROR=ON", "-DNORMFUSE_CUDA=OFF", f"-DCMAKE_C_COMPILER={name}"]):
            test_program(f"{name}: test_passes", [BUILD / name / "test_passes"])
        header_alone([name])


def has_cuda():
    return (BUILD / "release" / CUDA_PLANS).exists()


def nvrtc():
    """Kernels that are compiled at run time, by NVRTC itself."""
    if not has_cuda():
        return
    venv = BUILD / "venv-nvrtc"
    code, output, _ = run("environment of NVRTC", [ROOT / "cmake/venv.sh", venv,
                                                   ROOT / "tests/cuda/requirements-nvrtc.txt"], 600)
    if code != 0:
        skip("NVRTC", output.strip().splitlines()[-1] if output.strip() else "its environment cannot be made")
        return
    for major in (12, 13):
        path = next(venv.glob(f"lib/python*/site-packages/nvidia/**/libnvrtc.so.{major}"))
        test_program(f"test_compile with NVRTC {major}", [BUILD / "release/test_compile", "--nvrtc", path])
    # path: the newer one
    test_program("check_kernel_resources.py", [sys.executable, ROOT / "tests/cuda/check_kernel_resources.py", path])
    for gpu in ("8.0", "9.0", "10.0", "12.0"):
        folder = BUILD / "kernels" / gpu
        shutil.rmtree(folder, ignore_errors=True)
        check(f"normfuse compile for {gpu}",
              [BUILD / "release/normfuse", "compile", "--random", some(5, 20), "--gpu", gpu, "-o",
                                              folder], env={"NORMFUSE_NVRTC": str(path)}, expect="kernels")


def emulator():
    """The CUDA kernels on the CPU."""
    if has_cuda():
        test_program("check_emulator.py", [sys.executable, ROOT / "tests/cuda/check_emulator.py", "--jobs", args.jobs,
                                           "--cmake", args.cmake, *(["--full"] if args.full else [])], 1500)


def cuda():
    """The host side of the CUDA backend, without a GPU, and what its kernels use of one."""
    if not has_cuda():
        skip("CUDA", "left out of the build")
        return
    for name in CUDA_PROGRAMS:
        test_program(name, [BUILD / "release" / name])
    test_program(*program_of_build(CUDA_PLANS))
    test_program("test_driver_headers", [BUILD / "release" / "test_driver_headers"])
    test_program("test_cuda", [BUILD / "release" / "test_cuda"])  # the rest of make check-cuda takes minutes
    check("CMake with NORMFUSE_CUDA=OFF in the environment",
          [args.cmake, "-S", ROOT, "-B", BUILD / "cpu", "-UNORMFUSE_CUDA"],
          env={"NORMFUSE_CUDA": "OFF"}, expect="CUDA: left out")


def documents():
    """The pages: their sentences, links and blocks of code, and the site that is built of them."""
    code, output, _ = run("environment of the site",
                          [ROOT / "cmake/venv.sh", BUILD / "venv-docs", ROOT / "docs/site/requirements.txt",
                                                      "mkdocs", "material"], 300, {"PIP_RETRIES": "1"})
    if code != 0:  # test_documents.py skips the site then
        with printing:
            print("\n".join(output.splitlines()[-3:]))
    pytest("test_documents.py", ["tests/test_documents.py", "-k", "not test_python"])


def wheel():
    """The Python package without PyTorch: arrays, and what is installed."""
    if sys.version_info < (3, 10):
        skip("Python package", "needs Python 3.10 or newer")
        return
    # Tests that are named after PyTorch and JAX run where these are installed.
    pytest("python: test_arrays.py", [PYTHON_TESTS / "test_arrays.py", "-k", "not torch and not jax"], 300, sampled())
    pytest("python: test_tiles.py", [PYTHON_TESTS / "test_tiles.py", "-k", "not torch"])
    pytest("python: test_wheel.py", [PYTHON_TESTS / "test_wheel.py"], 900,
           {"CMAKE_EXECUTABLE": shutil.which(args.cmake), "JOBS": args.jobs})


def with_pytorch(is_installed):
    """What needs PyTorch, in an environment of its own. Returns groups of checks: these mostly have one thread, or wait for
    compilers."""
    if sys.version_info < (3, 10):
        return []
    if not is_installed:
        return [python_of_pages]
    others = {"test_wheel.py", "test_arrays.py", "test_tiles.py"}.union(*TOGETHER)
    alone = {path.name for path in PYTHON_TESTS.glob("test_*.py")} - others
    # Their parts that need no PyTorch are checks of their own (wheel).
    arrays = functools.partial(python_files, "test_arrays.py", "test_tiles.py", title=" with PyTorch and JAX",
                               words=["-k", "torch or jax"])
    return [python_of_pages,
            *(functools.partial(python_files, *names) for names in [*TOGETHER, *((name,) for name in sorted(alone))]),
            arrays]


def environment_of_torch():
    """True if build/venv-torch has PyTorch; without it the pages' code is all that runs, as far as it can."""
    if sys.version_info < (3, 10):
        return False
    code, output, _ = run("python: torch environment", [ROOT / "cmake/venv.sh", BUILD / "venv-torch",
                                                        ROOT / "python/requirements-test.txt", "torch", "pytest"], 600,
                          # Without the network each package would otherwise wait for the extra index in vain.
                          {"PIP_RETRIES": "1"})
    if code != 0:
        skip("python: with PyTorch", "PyTorch could not be installed", output.splitlines()[-10:])
    return code == 0


def with_torch(name, words):
    """pytest with PyTorch, or with this Python where that could not be installed."""
    python = BUILD / "venv-torch/bin/python"
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // int(args.jobs)))}
    pytest(name, words, 900, {**threads, **sampled()}, python if python.exists() else sys.executable)


def python_files(*names, title="", words=()):
    """In one process."""
    with_torch(f"python: {', '.join(names)}{title}", [*(PYTHON_TESTS / name for name in names), *words])


def python_of_pages():
    with_torch("test_documents.py, Python", ["tests/test_documents.py", "-k", "test_python"])


def sampled():
    """The environment of python/tests: some cases of each test (python/tests/sampled.py), fewer draws, and programs of
    XLA that are not optimized, which compile in three quarters of the time."""
    return {} if args.full else {"NORMFUSE_TEST_SAMPLED": "1", "NORMFUSE_RANDOM_PROGRAMS": "60",
                                 "XLA_FLAGS": "--xla_backend_optimization_level=0"}


def program_of_build(name, *words):
    """A test program of the build: the arguments of test_program."""
    return {"test_operators": (name, [BUILD / "release" / name, "--every", some(4, 1)], 600),
            CUDA_PLANS: (name, [BUILD / "release" / name, "--problems", some(600, 2500)]),
            }.get(name, (name, [BUILD / "release" / name, *words]))


# Checks of a second or two by a script of tests/, and its words.
SCRIPTS = {"check_symbols.py": ["build/release/libnormfuse.so", "build/release/libnormfuse.a"],
           "check_abi.py": ["build/release/libnormfuse.so"], "mutants/run.py": ["--verify"], "check_functions.py": [],
           "check_folders.py": [], "check_sentences.py": []}


def script(name):
    test_program(name, [sys.executable, ROOT / "tests" / name, *SCRIPTS[name]])


def program():
    pytest("test_program.py", ["tests/test_program.py"], 600, {"NORMFUSE_PROGRAM": str(BUILD / "release/normfuse")})


def calls():
    """Fuzzing's inputs, and draws without a fuzzing engine."""
    for name in FUZZ_TARGETS:
        test_program(f"inputs of {name}", [BUILD / "release" / f"replay_{name}", ROOT / "tests/fuzz" / f"{name}.txt"])
    test_program("random calls", [BUILD / "release/replay_fuzz_calls", "--random", some(20000, 50000)])
    test_program("soak, 20,000 calls", [BUILD / "release/soak", "--calls", "20000"])


def small_checks():
    for name in PROGRAMS:
        if name != "test_operators":
            test_program(*program_of_build(name))
    calls()
    for name in SCRIPTS:
        script(name)
    header_alone()
    cxx()
    examples()
    shards()
    installed()
    static_alone()
    inexact_math()


def check_all():
    # The environment of PyTorch is downloaded beside the checks ahead of with_pytorch, which waits for it. Long checks
    # first, so that none of them runs alone at the end; with_pytorch returns what fills that.
    with concurrent.futures.ThreadPoolExecutor(1) as beside:
        environment = beside.submit(environment_of_torch)
        at_once([emulator, neon, nvrtc, big_endian, wheel, program,
                 lambda: test_program(*program_of_build("test_operators")), second_compiler, documents, cuda,
                 lambda: with_pytorch(environment.result()), small_checks])


# ---- make check-changed ---------------------------------------------------------------------------------------------

# Paths of a change, and the checks that look at these: a program of the build, a script or a file of tests/,
# python/tests, or a function above. Every row that fits counts; \1 is the row's group.
TOUCHES = [
    (r"src/(cpu/.*|[^/]*)|include/normfuse\.h|tests/(cases|ref)/.*",
     "test_passes test_operators test_arguments test_failures test_threads test_verify test_reference test_stack calls "
     "program test_arrays.py"),
    (r"include/.*", "header_alone cxx check_abi.py"),
    (r"src/cuda/.*|tests/cuda/(emulator/|fake_|refused\.h).*",
     "test_cuda_host test_cuda_calls test_cuda_plans test_compile emulator"),
    (r"src/bindings/torch.*", "test_torch_shim test_operators.py test_functional.py"),
    (r"src/bindings/onnxruntime.*", "test_onnxruntime_shim test_onnx.py"),
    (r"src/bindings/xla.*|python/normfuse/jax/.*", "test_jax.py test_jax_devices.py"),
    (r"cli/.*", "test_verify test_problem_line test_processes test_operators program"),
    (r"python/normfuse/[^/]*", "test_arrays.py test_words.py test_tiles.py"),
    (r"python/normfuse/onnx/.*", "test_onnx.py test_onnx_graphs.py"),
    (r"python/normfuse/torch/.*",
     "test_functional.py test_modules.py test_channel_norm.py test_operators.py test_tools.py test_vmap.py"),
    (r"python/normfuse/torch/(convert|_(fold|pending|registries|rewrite|rules|survey|text))\.py",
     "test_convert.py test_convert_biases.py test_convert_channel_norm.py test_convert_graphs.py test_convert_meaning.py "
     "test_convert_programs.py test_models.py test_rules.py"),
    (r"python/normfuse/torch/(install|_native)\.py", "test_install.py"),
    (r"python/normfuse/torch/(distributed|_sharding)\.py", "test_distributed.py"),
    (r"python/normfuse/torch/prepare\.py", "test_prepare.py"),
    (r"tests/\w+/(test_\w+)\.c", "\\1"),
    (r"tests/cuda/check_emulator\.py", "emulator"),
    (r"tests/(check_(?!commits)\w+\.py)", "\\1"),
    (r"python/tests/(test_\w+\.py)", "\\1"),
    (r"python/tests/(reference|device|sampled|conftest)\.py", "test_arrays.py test_functional.py test_operators.py"),
    (r"tests/fuzz/.*", "calls"),
    (r"tests/cpu/test_cpp\.cpp", "cxx"),
    (r"tests/test_program\.py", "program"),
    (r".*\.md|mkdocs\.yml|docs/.*|tests/test_documents\.py|bench/(plot\.py|results/.*)",
     "documents check_sentences.py"),
    (r"bench/.*\.py", "test_bench.py"),
    (r"examples/.*", "test_examples.py examples shards cxx"),
    (r"hub/.*", "test_hub.py"),
    (r"integrations/comfyui/.*", "test_comfyui.py"),
    (r"(.*/)?CMakeLists\.txt|cmake/.*|pyproject\.toml", "installed static_alone inexact_math wheel"),
    (r"(src|include|cli|python/normfuse|tests|docs)/.*", "mutants/run.py check_folders.py check_functions.py "
                                                       "check_sentences.py check_symbols.py"),
]


def changed_paths(since):
    """Paths that differ from the revision, as the working tree has them, and those that git does not know yet."""
    def git(*words):
        return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE,
                              text=True).stdout.split("\n")[:-1]
    return sorted({*git("diff", "--name-only", since), *git("ls-files", "--others", "--exclude-standard")})


def touched(paths):
    """The checks of these paths, in the order of the rows, and the paths that no row has."""
    names, unknown = {}, []
    for path in paths:
        rows = [(match, checks) for pattern, checks in TOUCHES for match in [re.fullmatch(pattern, path)] if match]
        for match, checks in rows:
            names.update(dict.fromkeys(match.expand(checks).split()))
        if not rows:
            unknown.append(path)
    order = " ".join(checks for _, checks in TOUCHES).split()
    return sorted(names, key=lambda name: order.index(name) if name in order else len(order)), unknown


def check_changed():
    paths = changed_paths(args.since)
    names, unknown = touched(paths)
    print(f"{len(paths)} paths differ from {args.since}: {', '.join(names) or 'no check'}")
    if unknown:
        print(f"make check alone looks at {', '.join(unknown)}")
    if names and any((PYTHON_TESTS / name).is_file() for name in names):
        environment_of_torch()
    at_once([*(functools.partial(check_by_name, name) for name in names), commits])


def commits():
    test_program("check_commits.py", [sys.executable, ROOT / "tests/check_commits.py", f"{args.since}..HEAD"])


def check_by_name(name):
    if name in SCRIPTS:
        script(name)
    elif (PYTHON_TESTS / name).is_file():
        python_files(name)
    elif name in PROGRAMS or name in {*CUDA_PROGRAMS, CUDA_PLANS}:
        if (BUILD / "release" / name).exists():
            test_program(*program_of_build(name))
        else:
            skip(name, "is not in this build")
    elif name in BY_NAME:
        BY_NAME[name]()
    else:
        skip(name, "runs in make check alone")


BY_NAME = {function.__name__: function for function in (
    calls, program, documents, header_alone, cxx, emulator, examples, shards, installed, static_alone, inexact_math,
    wheel)}


# ---- make check-torch-versions --------------------------------------------------------------------------------------

# Tests that depend on PyTorch's compiler and on its transforms, and so on its version.
OF_TORCH = ["test_convert_graphs.py", "test_convert_programs.py", "test_modules.py", "test_vmap.py"]


def torch_versions():
    """Each version of PyTorch that python/requirements-torch-*.txt names, in an environment of its own."""
    for requirements in sorted((ROOT / "python").glob("requirements-torch-*.txt")):
        version = requirements.stem.rsplit("-", 1)[1]
        venv = BUILD / f"venv-torch-{version}"
        code, output, _ = run(f"environment of PyTorch {version}", [ROOT / "cmake/venv.sh", venv, requirements], 3600,
                              {"PIP_RETRIES": "1"})
        if code != 0:
            skip(f"PyTorch {version}", "it could not be installed", output.splitlines()[-10:])
            continue
        for name in OF_TORCH:
            pytest(f"PyTorch {version}: {name}", [PYTHON_TESTS / name], 1800, python=venv / "bin/python")


# ---- make check-pythons ---------------------------------------------------------------------------------------------


def all_pythons():
    """Each Python of this machine, 3.10 and newer: the system's own and those on PATH, or what PYTHONS names."""
    names = os.environ.get("PYTHONS", "").split() or ["/usr/bin/python3", *(f"python3.{k}" for k in range(10, 20)),
                                                      sys.executable]
    found = {}
    for name in names:
        code, output, _ = run(f"version of {name}", [name, "-c", "import sys, venv, ensurepip; print(sys.base_prefix); "
                                                     "print(*sys.version_info[:3], sep='.')"], 20)
        lines = output.split()
        if code == 0 and tuple(map(int, lines[1].split(".")))[:2] >= (3, 10):
            found.setdefault(tuple(lines), name)
        elif os.environ.get("PYTHONS"):
            skip(f"Python {name}", f"is not there, is older than 3.10, or has no venv: {output.strip()[-100:]}")
    return {version: name for (_, version), name in found.items()}


def pythons():
    """What a first user of a system runs, with its Python and the pip that came with it: in a clone of the commit,
    without vectors and CUDA, which are the same whatever the Python."""
    plain = "OPTIONS=" + " ".join(f"-Ccmake.define.NORMFUSE_{name}=OFF"
                                  for name in ("CUDA", "ENABLE_AVX2", "ENABLE_AVX512"))
    for version, python in all_pythons().items():
        tree = BUILD / "pythons" / version
        shutil.rmtree(tree, ignore_errors=True)
        if not check(f"Python {version}: clone", ["git", "clone", "--quiet", ROOT, tree]):
            continue
        words = ["make", f"JOBS={args.jobs}", f"CMAKE={args.cmake}", f"PYTHON={shutil.which(python)}"]
        check(f"Python {version}: make wheel", [*words, plain, "wheel"], 900, None, tree, ".whl")
        check(f"Python {version}: pip install and info", ["sh", "-c", f"{python} -m venv build/user && "
              "build/user/bin/pip install --quiet --disable-pip-version-check build/wheel/*.whl && cd build && "
              "user/bin/python -m normfuse info"], 600, None, tree, "cuda        not built")
        check(f"Python {version}: make docs", [*words, "docs"], 600, None, tree, "site/index.html")
        check(f"Python {version}: make dist", [*words, "dist"], 600, None, tree, ".tar.gz")
        check(f"Python {version}: the start of make check", [*words, "venv"], 600, None, tree)
        check(f"Python {version}: run_checks.py", [tree / "build/venv/bin/python", "tests/run_checks.py", "--help"], 60,
              None, tree, "usage")


# ---- make check-release ---------------------------------------------------------------------------------------------

def release_all():
    """What a release hands out: made, and used as by those who get it. Six minutes."""
    def make(*words, timeout=900):
        return check("make " + " ".join(words), ["make", f"JOBS={args.jobs}", f"CMAKE={args.cmake}", *words], timeout)

    machine = os.uname().machine
    shutil.rmtree(BUILD / "wheel", ignore_errors=True)
    make("hub")  # and the wheels whose libraries it takes
    other = PLATFORMS["aarch64"]
    if machine != "aarch64" and not shutil.which(other[0]):
        skip("make wheel MACHINE=aarch64", f"{other[0]} is not installed (Debian: {other[2]})")
    make("conan")
    if shutil.which("dpkg-buildpackage") and shutil.which("dh"):
        make("deb", timeout=1800)
    else:
        skip("make deb", "dpkg-buildpackage and dh are not installed (Debian: dpkg-dev, debhelper)")
        make("dist")
    pytest("test_release.py", ["tests/test_release.py"], 1800, {"JOBS": args.jobs})


# ---- make check-sanitize --------------------------------------------------------------------------------------------

def sanitize_all():
    fast = args.fast
    limit = 400 if fast else 900
    cuda_programs = CUDA_PROGRAMS if has_cuda() else []
    # Guard pages see what each table reads, in test_passes. AVX2 stays: test_threads takes seven times as long without.
    options = ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DNORMFUSE_BUILD_SHARED=OFF",
               *(["-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -g1 -DNDEBUG"] if fast else []),
               f"-DNORMFUSE_ENABLE_AVX512={'OFF' if fast else 'ON'}"]

    def test(sanitizer, folder, name, env, prefix=()):
        words = {THIRD[0]: THIRD[1:], CUDA_PLANS: ["--problems", "200"]}.get(name, []) if fast else []
        return functools.partial(test_program, f"{sanitizer}: {name}", [*prefix, BUILD / folder / name, *words], limit,
                                 env, past_time_is_skip=True)

    def address():
        plans = [CUDA_PLANS] if has_cuda() else []
        programs = [*cuda_programs, *plans, "test_operators", *(name for name in PROGRAMS if name != "test_operators")]
        built = cmake_build("build with ASan and UBSan", "asan", [*options, "-DNORMFUSE_SANITIZE=address,undefined"],
                            [*programs, "replay_fuzz_calls"] if fast else ())
        env = {"UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "detect_stack_use_after_return=1"}
        # With frames on the heap the planner takes twice as long.
        plain = {**env, "ASAN_OPTIONS": "detect_stack_use_after_return=0"} if fast else env
        return [thread] + [test("ASan and UBSan", "asan", name, plain if name == CUDA_PLANS else env)
                           for name in programs if built] + [random_calls] * built

    def random_calls():
        """What the fuzzer does where there is clang: scratch and tensors of exactly their bytes."""
        test_program("ASan and UBSan: random calls",
                     [BUILD / "asan/replay_fuzz_calls", "--random", "5000" if fast else "50000", "7"], limit)

    def thread():
        programs = ["test_operators", "test_threads", *cuda_programs]
        if not cmake_build("build with TSan", "tsan", [*options, "-DNORMFUSE_SANITIZE=thread"],
                           programs + ([] if fast else ["soak"])):
            return []
        # TSan of older compilers cannot place its shadow when addresses are randomized over 32 bits.
        fixed = ["setarch", "-R"] if subprocess.run("setarch -R true", shell=True, stderr=subprocess.DEVNULL,
                                                    stdin=subprocess.DEVNULL).returncode == 0 else []
        if not fast:
            test_program("TSan: soak, 5,000 calls", [*fixed, BUILD / "tsan/soak", "--calls", "5000"], limit)
        return [test("TSan", "tsan", name, {"NORMFUSE_NUM_THREADS": "4"}, fixed) for name in programs]

    # clang takes minutes for the vector tables with a fuzzer's counters in them.
    quick = {"CMAKE_OPTIONS": "-DNORMFUSE_ENABLE_AVX2=OFF -DNORMFUSE_ENABLE_AVX512=OFF -DCMAKE_BUILD_TYPE=None",
             "CFLAGS": "-O1 -g1 -DNDEBUG"}
    at_once([address, lambda: fuzz(*((10, quick) if fast else (60, {})))])


def fuzz(seconds, flags):
    if not shutil.which("clang"):
        skip("fuzz", "clang is not installed")
        return
    source = BUILD / "fuzz.c"
    source.write_text("#include <stddef.h>\n#include <stdint.h>\n"
                      "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) { return data && n > 1u << 30; }\n")
    code, _, _ = run("libFuzzer", ["clang", "-fsanitize=fuzzer,address", source, "-o", BUILD / "fuzz-probe"])
    if code != 0:
        skip("fuzz", "clang has no libFuzzer (Debian: libclang-rt-14-dev)")
        return
    out = BUILD / "fuzz"
    if not check("build with libFuzzer", [ROOT / "tests/fuzz/build.sh"], 900,
                 {"OUT": str(out), "CMAKE": args.cmake, "JOBS": args.jobs, "PYTHON": sys.executable, **flags}):
        return
    for name in FUZZ_TARGETS:
        corpus = BUILD / "corpus" / name
        corpus.mkdir(parents=True, exist_ok=True)
        zipfile.ZipFile(out / f"{name}_seed_corpus.zip").extractall(corpus)
        dictionary = [f"-dict={out / name}.dict"] if (out / f"{name}.dict").exists() else []
        check(f"fuzz: {name}, {seconds} s", [out / name, corpus, *dictionary, f"-max_total_time={seconds}", "-seed=1",
                                             "-rss_limit_mb=2048", "-timeout=20", "-max_len=1000",
                                             f"-artifact_prefix={BUILD / 'corpus'}/{name}-"],
              timeout=seconds + 60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="?", default="check",
                        choices=["check", "sanitize", "platforms", "torch-versions", "pythons", "release"])
    parser.add_argument("--changed", action="store_true",
                        help="check: the tests of the files that differ from a revision")
    parser.add_argument("--since", default="main", metavar="REVISION", help="the revision of --changed")
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--fast", action="store_true", help="sanitize: what fits into five minutes")
    parser.add_argument("--full", action="store_true", help="check: every case of tests that otherwise run some")
    args = parser.parse_args()
    if args.changed and args.what != "check":
        parser.error("--changed goes with check")
    if "/" in args.cmake:
        args.cmake = str((ROOT / args.cmake).resolve())
    begin = time.monotonic()
    {"check": check_changed if args.changed else check_all, "sanitize": sanitize_all, "platforms": all_platforms,
     "torch-versions": torch_versions, "pythons": pythons, "release": release_all}[args.what]()
    print("\nThe slowest:")
    for seconds, name in sorted(times, reverse=True)[:10]:
        print(f"{seconds:6.0f} s  {name}")
    print(f"\n{time.monotonic() - begin:.0f} s; logs are in {LOGS.relative_to(ROOT)}/"
          + (f"; failed: {', '.join(failures)}" if failures else ""))
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    # A change may touch nothing that a check looks at.
    sys.exit(1 if totals[1] or not (totals[0] or args.changed) else 0)
