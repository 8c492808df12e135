# SPDX-License-Identifier: MIT
"""Runs every check of `make check` or `make check-sanitize`, adds up what they counted, and closes with the line
`N passed, N failed, N skipped`. Needs nothing but the standard library. Logs: build/logs/."""
import argparse
import fnmatch
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
CLOSING = re.compile(r"^(\d+) passed, (\d+) failed, (\d+) skipped$")
PROGRAMS = ["test_passes", "test_problem_line", "test_arguments", "test_failures", "test_threads", "test_reference",
            "test_verify", "test_operators", "test_torch_shim"]
# There only where the build found nvcc.
CUDA_PROGRAM = "test_cuda_host"
FUZZ_TARGETS = ["fuzz_calls", "fuzz_npy", "fuzz_problem_line"]
HEADER_FLAGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror", "-fsyntax-only"]

totals = [0, 0, 0]
failures = []


def count(name, passed, failed, skipped, note=""):
    passed, failed, skipped = int(passed), int(failed), int(skipped)
    for k, n in enumerate((passed, failed, skipped)):
        totals[k] += n
    if failed:
        failures.append(name)
    print(f"{'FAIL' if failed else 'skip' if skipped and not passed else 'ok':4}  {name}: "
          f"{passed} passed, {failed} failed, {skipped} skipped{'  (' + note + ')' if note else ''}", flush=True)


def skip(name, reason):
    count(name, 0, 0, 1, reason)


def run(name, command, timeout=300, env=None, cwd=ROOT):
    """(exit code, output, seconds); a command that runs past its time has the exit code None."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / (re.sub(r"[^A-Za-z0-9]+", "-", name) + ".txt")
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
    output = output.decode("utf-8", "replace")
    log.write_text(f"$ {' '.join(str(word) for word in command)}\n{output}\nexit code {code}\n")
    return code, output, time.monotonic() - start


def check(name, command, timeout=300, env=None, cwd=ROOT, expect=None):
    """One check: the command succeeds, and prints `expect` if given. True if so."""
    code, output, seconds = run(name, command, timeout, env, cwd)
    good = code == 0 and (expect is None or expect in output)
    if not good:
        print("\n".join(output.splitlines()[-40:]))
    count(name, good, not good, 0,
          "ran past its time" if code is None else f"exit code {code}" if code else
          f"did not print {expect!r}" if not good else f"{seconds:.0f} s")
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
        print("\n".join(lines[-40:]))
        count(name, 0, 1, 0, f"ran past {timeout} s" if code is None else f"no closing line, exit code {code}")
        return
    passed, failed, skipped = (int(n) for n in closing.groups())
    note = f"{seconds:.0f} s"
    if failed:
        print("\n".join(shown[:40] or lines[-40:]))
    elif shown:
        print("\n".join("      " + line for line in shown[:20]))
    if code != 0 and not failed:
        print("\n".join(lines[-40:]))
        failed, note = 1, f"exit code {code} after its closing line"
    if passed + failed + skipped == 0:
        failed, note = 1, "counted nothing"
    count(name, passed, failed, skipped, note)


def pytest(name, words, timeout=300, env=None, python=sys.executable):
    report = BUILD / "pytest.xml"
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
    if failed:
        print("\n".join(output.splitlines()[-60:]))
    elif skipped:
        print("\n".join("      " + line for line in output.splitlines() if line.startswith("SKIPPED")))
    count(name, passed, failed, skipped, "ran past its time" if code is None else f"{seconds:.0f} s")


def cmake_build(name, folder, options, env=None, timeout=600):
    """Configures and builds into build/<folder>. True if that worked; counted as one check."""
    start = time.monotonic()
    binary = BUILD / folder
    # The CUDA kernels are the same in every build: those of build/release are not compiled again.
    options = [f"-DNORMFUSE_CUDA_FATBIN_DIR={BUILD / 'release/cuda'}", *options]
    code, output, _ = run(name + " configure", [args.cmake, "-S", ROOT, "-B", binary, *options], 120, env)
    if code == 0:
        code, output, _ = run(name, [args.cmake, "--build", binary, "-j", args.jobs], timeout, env)
    if code != 0:
        print("\n".join(output.splitlines()[-40:]))
    count(name, code == 0, code != 0, 0, f"{time.monotonic() - start:.0f} s" if code == 0 else f"exit code {code}")
    return code == 0


def compiler():
    return os.environ.get("CC") or "cc"


def cxx_compiler():
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and shutil.which(name):
            return name
    return None


# ---- make check -----------------------------------------------------------------------------------------------------

def header_alone():
    source = BUILD / "header.c"
    source.write_text("#include <normfuse.h>\n")
    include = f"-I{ROOT / 'include'}"
    check("header alone, C11", [compiler(), "-std=c11", *HEADER_FLAGS, include, source])
    cxx = cxx_compiler()
    if cxx:
        check("header alone, C++17", [cxx, "-std=c++17", *HEADER_FLAGS, "-x", "c++", include, source])
    else:
        skip("header alone, C++17", "no C++ compiler is installed")


def installed():
    """Installs into build/stage, moves that, and builds programs against it as users would."""
    for folder in ("stage", "moved", "consumers"):
        shutil.rmtree(BUILD / folder, ignore_errors=True)
    if not check("install", [args.cmake, "--install", BUILD / "release", "--prefix", BUILD / "stage"]):
        return
    wanted = ["include/normfuse.h", "bin/normfuse", "*/libnormfuse.so", "*/libnormfuse.a", "*/pkgconfig/normfuse.pc",
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
        for name in ("consumer_c", "consumer_static") + (("consumer_cxx",) if cxx_compiler() else ()):
            check(f"consumer: find_package, {name}", [out / "find_package" / name], expect=version)
        check("consumer: find_package, unloaded and loaded again", [out / "find_package/unload", *sorted(
            (out / "find_package").glob("libplugin_*.so"))], timeout=20, expect="unloaded")
    if not cxx_compiler():
        skip("consumer: find_package, consumer_cxx", "no C++ compiler is installed")

    check("consumer: add_subdirectory, configure", [args.cmake, "-S", ROOT / "tests/consumers/add_subdirectory",
                                                    "-B", out / "add_subdirectory", f"-DNORMFUSE_SOURCE={ROOT}"])

    if shutil.which("pkg-config"):
        env = {"PKG_CONFIG_PATH": str(pc.parent)}
        words = subprocess.run(["pkg-config", "--cflags", "--libs", "normfuse"], env={**os.environ, **env},
                               stdout=subprocess.PIPE, text=True).stdout.split()
        if check("consumer: pkg-config, build", [compiler(), "-std=c11", source, "-o", out / "pkg_config", *words,
                                                 f"-Wl,-rpath,{libdir}"]):
            check("consumer: pkg-config, run", [out / "pkg_config"], expect=version)
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


def second_compiler():
    """The other of gcc and clang: no warnings, and the same bits from its tables."""
    code, output, _ = run("compiler", [compiler(), "--version"], 20)
    other = "gcc" if "clang" in output else "clang"
    if not shutil.which(other):
        skip(f"build with {other}", f"{other} is not installed")
        return
    if cmake_build(f"build with {other}, warnings are errors", other,
                   ["-DNORMFUSE_WERROR=ON", f"-DCMAKE_C_COMPILER={other}"]):
        test_program(f"{other}: test_passes", [BUILD / other / "test_passes"])


def neon():
    """The NEON tables, on an emulated aarch64."""
    if os.uname().machine == "aarch64":
        return
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if not shutil.which("aarch64-linux-gnu-gcc"):
        skip("NEON", "aarch64-linux-gnu-gcc is not installed")
    elif not emulator:
        skip("NEON", "qemu-aarch64-static is not installed")
    elif "/" not in subprocess.run(["aarch64-linux-gnu-gcc", "-print-file-name=libc.a"], stdout=subprocess.PIPE,
                                   text=True).stdout:
        skip("NEON", "aarch64-linux-gnu-gcc has no C library (Debian: libc6-dev-arm64-cross)")
    elif cmake_build("NEON: cross build, warnings are errors", "neon", [
            f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'cmake/aarch64-linux-gnu.cmake'}", "-DNORMFUSE_WERROR=ON",
            "-DNORMFUSE_BUILD_SHARED=OFF", "-DNORMFUSE_BUILD_CLI=OFF"]):
        # All operator cases would take an emulator a quarter of an hour; those of options.txt reach every pass.
        for words, timeout in ((["test_passes"], 120), (["test_threads"], 60),
                               (["test_operators", ROOT / "tests/cases/options.txt"], 120)):
            test_program(f"NEON: {words[0]}", [emulator, BUILD / "neon" / words[0], *words[1:]], timeout,
                         {"NORMFUSE_NUM_THREADS": "2"}, past_time_is_skip=True)


def cuda():
    """The host side of the CUDA backend, without a GPU, and what its kernels use of one."""
    if not (BUILD / "release" / CUDA_PROGRAM).exists():
        skip("CUDA", "built without nvcc")
        return
    test_program(CUDA_PROGRAM, [BUILD / "release" / CUDA_PROGRAM])
    test_program("test_cuda", [BUILD / "release" / "test_cuda"])  # the rest of make check-cuda takes minutes
    test_program("check_kernel_resources.py", [sys.executable, ROOT / "tests/check_kernel_resources.py",
                                               BUILD / "release/cuda"])
    if cmake_build("build without CUDA", "cpu", ["-DNORMFUSE_CUDA=OFF", "-DNORMFUSE_WERROR=ON",
                                                 "-DNORMFUSE_BUILD_CLI=OFF"]):
        test_program("without CUDA: test_arguments", [BUILD / "cpu/test_arguments"])


def python_package():
    """The Python package: arrays and the wheel here, what needs PyTorch in an environment of its own."""
    if sys.version_info < (3, 10):
        skip("Python package", "needs Python 3.10 or newer")
        return
    tests = ROOT / "python/tests"
    cmake = {"CMAKE_EXECUTABLE": shutil.which(args.cmake), "JOBS": args.jobs}
    # Those that are named after PyTorch and JAX run below, where these are installed.
    pytest("python: test_arrays.py", [tests / "test_arrays.py", "-k", "not torch and not jax"])
    pytest("python: test_wheel.py", [tests / "test_wheel.py"], 600, cmake)

    venv = BUILD / "venv-torch"
    code, output, seconds = run("python: torch environment", [ROOT / "cmake/venv.sh", venv,
                                                              ROOT / "python/requirements-test.txt", "torch", "pytest"], 600,
                                # Without the network each package would otherwise wait for the extra index in vain.
                                {"PIP_RETRIES": "1"})
    if code != 0:
        print("\n".join(output.splitlines()[-10:]))
        skip("python: with PyTorch", "PyTorch could not be installed")
        return
    python = venv / "bin/python"
    pytest("python: test_arrays.py with PyTorch and JAX", [tests / "test_arrays.py", "-k", "torch or jax"],
           python=python)
    for program in sorted(tests.glob("test_*.py")):
        if program.name not in ("test_arrays.py", "test_wheel.py"):
            pytest(f"python: {program.name}", [program], 600, python=python)


def check_all():
    for name in PROGRAMS:
        test_program(name, [BUILD / "release" / name])
    for name in FUZZ_TARGETS:
        test_program(f"inputs of {name}", [BUILD / "release" / f"replay_{name}", ROOT / "tests/fuzz" / f"{name}.txt"])
    test_program("random calls", [BUILD / "release/replay_fuzz_calls", "--random", "50000"])
    test_program("soak, 20,000 calls", [BUILD / "release/soak", "--calls", "20000"])
    cuda()
    pytest("test_program.py", ["tests/test_program.py"], env={"NORMFUSE_PROGRAM": str(BUILD / "release/normfuse")})
    test_program("check_symbols.py", [sys.executable, ROOT / "tests/check_symbols.py",
                                      BUILD / "release/libnormfuse.so", BUILD / "release/libnormfuse.a"])
    header_alone()
    examples()
    installed()
    python_package()
    second_compiler()
    neon()


# ---- make check-sanitize --------------------------------------------------------------------------------------------

def sanitize_all():
    fast = args.fast
    limit = 150 if fast else 900
    # The operator cases of one file reach every pass and every way of scheduling.
    words = {"test_operators": [ROOT / "tests/cases/options.txt"]} if fast else {}
    programs = PROGRAMS + ([CUDA_PROGRAM] if (BUILD / "release" / CUDA_PROGRAM).exists() else [])
    if cmake_build("build with ASan and UBSan", "asan", ["-DCMAKE_BUILD_TYPE=RelWithDebInfo",
                                                         "-DNORMFUSE_SANITIZE=address,undefined",
                                                         "-DNORMFUSE_BUILD_SHARED=OFF"]):
        for name in programs:
            test_program(f"ASan and UBSan: {name}", [BUILD / "asan" / name, *words.get(name, [])], limit,
                         {"UBSAN_OPTIONS": "print_stacktrace=1", "ASAN_OPTIONS": "detect_stack_use_after_return=1"},
                         past_time_is_skip=True)
    if cmake_build("build with TSan", "tsan", ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DNORMFUSE_SANITIZE=thread",
                                               "-DNORMFUSE_BUILD_SHARED=OFF"]):
        # TSan of older compilers cannot place its shadow when addresses are randomized over 32 bits.
        fixed = ["setarch", "-R"] if subprocess.run("setarch -R true", shell=True, stderr=subprocess.DEVNULL,
                                                    stdin=subprocess.DEVNULL).returncode == 0 else []
        for name in ("test_threads", "test_operators", *programs[len(PROGRAMS):]):
            test_program(f"TSan: {name}", [*fixed, BUILD / "tsan" / name, *words.get(name, [])], limit,
                         {"NORMFUSE_NUM_THREADS": "4"}, past_time_is_skip=True)
        test_program("TSan: soak, 5,000 calls", [*fixed, BUILD / "tsan/soak", "--calls", "5000"], limit)
    fuzz(10 if fast else 60)


def fuzz(seconds):
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
                 {"OUT": str(out), "CMAKE": args.cmake, "JOBS": args.jobs, "PYTHON": sys.executable}):
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
    parser.add_argument("what", choices=["check", "sanitize"])
    parser.add_argument("--cmake", default="cmake")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--fast", action="store_true", help="sanitize: what fits into five minutes")
    args = parser.parse_args()
    if "/" in args.cmake:
        args.cmake = str((ROOT / args.cmake).resolve())
    begin = time.monotonic()
    (check_all if args.what == "check" else sanitize_all)()
    print(f"\n{time.monotonic() - begin:.0f} s; logs are in {LOGS.relative_to(ROOT)}/"
          + (f"; failed: {', '.join(failures)}" if failures else ""))
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    sys.exit(1 if totals[1] or not totals[0] else 0)
