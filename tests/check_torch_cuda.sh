#!/bin/bash
# SPDX-License-Identifier: MIT
#
# check_torch_cuda.sh BUILD_FOLDER - the tests of the Python packages on a GPU, with the libnormfuse.so in BUILD_FOLDER:
# those of `make check` with their tensors on CUDA, and what only a GPU can show (test_cuda.py; test_distributed.py over
# NCCL where there are two GPUs, over gloo with one). PYTHON names a Python with PyTorch for CUDA, pytest, hypothesis,
# expecttest and ml_dtypes. Files run at once, test_cuda.py after them, each in a process and no longer than LIMIT
# seconds. Needs neither compiler nor CMake, but PyTorch itself compiles kernels. Words after the folder go to pytest
# (-k graph). Exit status: 0 all passed, 1 something failed, 3 there is no GPU. Logs: BUILD_FOLDER/check-torch-cuda/, and
# as one file in the folder OUT where that is set.
set -u
cd "$(dirname "$0")/.." || exit 2
if [ $# -lt 1 ] || [ ! -f "$1/libnormfuse.so" ]; then
    echo "usage: tests/check_torch_cuda.sh BUILD_FOLDER [WORDS FOR PYTEST] (the folder with libnormfuse.so)" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3}
limit=${LIMIT:-290}
device=${NORMFUSE_TEST_DEVICE:-cuda}
logs=$build/check-torch-cuda
rm -rf "$logs"
mkdir -p "$logs"

if ! "$python" -c 'import torch' 2>"$logs/import.txt"; then
    echo "no check of PyTorch on CUDA: $python has no usable torch: $(tail -n 1 "$logs/import.txt")" >&2
    exit 3
fi
if [ "$device" = cuda ] && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no check of PyTorch on CUDA: $("$python" -c 'import torch; print("torch", torch.__version__)') sees no GPU" >&2
    exit 3
fi
if ! "$python" -c 'import pytest, hypothesis, expecttest, ml_dtypes' 2>"$logs/import.txt"; then
    echo "no check of PyTorch on CUDA: $(tail -n 1 "$logs/import.txt") (python/requirements-test.txt has the versions)" >&2
    exit 2
fi

export NORMFUSE_TEST_DEVICE=$device NORMFUSE_LIBRARY=$build/libnormfuse.so
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
# A process for each file: the cores are theirs to share, and JAX is there for its arrays on the CPU.
export TORCHINDUCTOR_COMPILE_THREADS=2 JAX_PLATFORMS=cpu XLA_PYTHON_CLIENT_PREALLOCATE=false
[ -z "${OMP_NUM_THREADS:-}" ] && export OMP_NUM_THREADS=2
"$python" - <<'END'
import torch
from normfuse.torch import _operators
import normfuse
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
print(f"normfuse {normfuse.__version__}, torch {torch.__version__}, binding {': '.join(_operators.binding())}; "
      f"NCCL {'.'.join(map(str, torch.cuda.nccl.version())) if nccl else 'is not here'}; "
      f"{len(gpus)} GPUs: {', '.join(gpus)}", flush=True)
END

begin=$(date +%s)
run() {
    timeout -k 5 "$limit" "$python" -m pytest -v -rfEs -p no:cacheprovider --tb=short -o faulthandler_timeout=150 \
        -o junit_family=xunit2 --junitxml="$logs/$1.xml" "python/tests/test_$1.py" "${@:2}" >"$logs/$1.txt" 2>&1
    echo $? >"$logs/$1.status"
}
for name in arrays functional operators modules convert convert_meaning convert_biases rules tools models install distributed vmap; do
    run "$name" "$@" &
done
wait
run cuda "$@" # alone: it looks at the device's memory
if JAX_PLATFORMS=cuda "$python" -c 'import jax; jax.devices("cuda")' 2>"$logs/jax-import.txt"; then
    JAX_PLATFORMS=cuda run jax "$@"
else
    echo "skipped: test_jax.py: no JAX on CUDA: $(tail -n 1 "$logs/jax-import.txt" | cut -c 1-200)"
fi

# Adds up what the processes report; one that was stopped, or died, by what it had printed.
"$python" - "$logs" "$(($(date +%s) - begin))" <<'END'
import collections, pathlib, re, sys, xml.etree.ElementTree
logs = pathlib.Path(sys.argv[1])
totals, failures, lines = collections.Counter(), [], []
for status in sorted(logs.glob("*.status")):
    name, code = status.stem, int(status.read_text())
    log = (logs / f"{name}.txt").read_text(errors="replace")
    counts, skips, report = collections.Counter(), collections.Counter(), logs / f"{name}.xml"
    before = len(failures)
    if report.exists():
        suites = list(xml.etree.ElementTree.parse(report).iter("testsuite"))
        for case in (case for suite in suites for case in suite.iter("testcase")):
            outcome = next((o for o in case if o.tag in ("failure", "error", "skipped")), None)
            if outcome is None:
                counts["passed"] += 1
            elif outcome.tag == "skipped":
                counts["skipped"] += 1
                message = outcome.get("message", "")
                skips[outcome.text or "" if message == "collection skipped" else message] += 1
            else:
                counts["failed"] += 1
                failures.append((f"{name}: {case.get('name')}", (outcome.text or outcome.get("message", "")).splitlines()))
        note = f"{sum(float(suite.get('time', 0)) for suite in suites):.0f} s"
    else:
        for test, outcome in re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)", log, re.M):
            counts[{"PASSED": "passed", "SKIPPED": "skipped"}.get(outcome, "failed")] += 1
            if outcome in ("FAILED", "ERROR"):
                failures.append((test, ["(its process did not come to report it)"]))
        note = "ran past its time" if code in (124, 137) else f"died with status {code}"
    if code == 5:
        code = 0  # the words for pytest chose no test of this file, or all of it is skipped
    if code != 0 and len(failures) == before:
        counts["failed"] += 1
        failures.append((f"{name}: {note}, exit status {code}", log.splitlines()))
    totals += counts
    lines.append(f"{'FAIL' if counts['failed'] else 'ok  '} test_{name}.py: {counts['passed']} passed, "
                 f"{counts['failed']} failed, {counts['skipped']} skipped ({note})")
    lines += [f"       skipped {count}: {reason[:180]}" for reason, count in skips.items()]
for name, text in failures:
    print(f"FAIL {name}")
    print("\n".join("    " + line[:200] for line in (text if len(text) <= 90 else text[:45] + ["..."] + text[-45:])))
print("\n".join(lines))
for name, _ in failures:
    print(f"failed: {name[:160]}")
print(f"{sys.argv[2]} s; logs: {logs}")
print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
sys.exit(1 if totals["failed"] or not totals["passed"] else 0)
END
status=$?
if [ -n "${OUT:-}" ]; then
    for log in "$logs"/*.txt; do
        echo "==== $log"
        cat "$log"
    done >"$OUT/check-torch-cuda.txt"
fi
exit $status
