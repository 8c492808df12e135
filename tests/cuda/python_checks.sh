# SPDX-License-Identifier: MIT
#
# python_checks.sh - the shared part of check_torch_cuda.sh and check_jax_cuda.sh, which set these and source it with
# their own arguments: check, the name of the logs' folder; library, what is tested; needs, a statement of Python that
# fails where the library is missing; gpu, one that fails where the library sees no GPU; modules, what else is imported.
# Afterwards `run NAME FILE [WORDS]` runs a file of python/tests in a process, no longer than LIMIT seconds, and `report`
# adds up what the processes said and exits.
set -u
cd "$(dirname "$0")/../.." || exit 2
if [ $# -lt 1 ] || [ ! -f "$1/libnormfuse.so" ]; then
    echo "usage: $0 BUILD_FOLDER [WORDS FOR PYTEST] (the folder with libnormfuse.so)" >&2
    exit 2
fi
build=$(cd "$1" && pwd)
shift
python=${PYTHON:-python3}
limit=${LIMIT:-600}
device=${NORMFUSE_TEST_DEVICE:-cuda}
logs=$build/$check
rm -rf "$logs"
mkdir -p "$logs"

no() {
    echo "no check of $library on CUDA: $1" >&2
    exit "$2"
}
export XLA_PYTHON_CLIENT_PREALLOCATE=false # processes share a GPU
last_line() { tail -n 1 "$logs/import.txt" | cut -c 1-300; }
"$python" -c "$needs" 2>"$logs/import.txt" || no "$python has no usable $library: $(last_line)" 3
if [ "$device" = cuda ]; then
    "$python" -c "$gpu" >"$logs/import.txt" 2>&1 || no "$library sees no GPU: $(last_line)" 3
fi
"$python" -c "import $modules" 2>"$logs/import.txt" ||
    no "$(last_line) (python/requirements-test.txt has the versions)" 2

export NORMFUSE_TEST_DEVICE=$device NORMFUSE_LIBRARY=$build/libnormfuse.so
export PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
[ -z "${OMP_NUM_THREADS:-}" ] && export OMP_NUM_THREADS=2 # a process for each file: the cores are theirs to share

begin=$(date +%s)
run() {
    timeout -k 5 "$limit" "$python" -m pytest -v -rfEs -p no:cacheprovider --tb=short -o faulthandler_timeout=150 \
        -o junit_family=xunit2 --junitxml="$logs/$1.xml" "python/tests/$2" "${@:3}" >"$logs/$1.txt" 2>&1
    echo $? >"$logs/$1.status"
}

# Adds up what the processes report; one that was stopped, or died, by what it had printed.
report() {
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
                text = outcome.text or outcome.get("message", "")
                failures.append((f"{name}: {case.get('name')}", text.splitlines()))
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
    lines.append(f"{'FAIL' if counts['failed'] else 'ok  '} {name}: {counts['passed']} passed, "
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
        done >"$OUT/$check.txt"
    fi
    exit $status
}
