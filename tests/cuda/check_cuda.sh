#!/bin/bash
# SPDX-License-Identifier: MIT
#
# check_cuda.sh [--sanitize] BUILD_FOLDER - every check that needs a GPU, from the programs in BUILD_FOLDER; no compiler
# and no CMake. The cases run in a process for each core, since the double reference takes most of the time, and test_cuda
# alone after them. Nearly every case compiles a kernel, 27 a second on 16 cores: EVERY=4 takes every fourth case.
# --sanitize: compute-sanitizer's tools over a few cases of each kind of kernel instead. No program runs longer than LIMIT
# seconds.
# Exit status: 0 all passed, 1 something failed, 3 there is no GPU. Logs: BUILD_FOLDER/check-cuda/.
set -u
cd "$(dirname "$0")/../.." || exit 2
sanitize=
if [ "${1:-}" = --sanitize ]; then
    sanitize=1
    shift
fi
if [ $# -ne 1 ] || [ ! -x "$1/test_operators" ]; then
    echo "usage: tests/cuda/check_cuda.sh [--sanitize] BUILD_FOLDER (the one with test_operators and test_cuda)" >&2
    exit 2
fi
build=$1
limit=${LIMIT:-900}
jobs=$(env -u OMP_NUM_THREADS nproc) # where that is set, nproc prints it
logs=$build/check-cuda
rm -rf "$logs"
mkdir -p "$logs"
if [ ! -x "$build/test_cuda" ]; then
    echo "no check of CUDA: $build was built without CUDA" >&2
    exit 3
fi
if ! "$build/test_cuda" --probe; then
    echo "no check of CUDA: this machine has no usable GPU" >&2
    exit 3
fi

passed=0 failed=0 skipped=0 failures=
begin=$(date +%s)

# collect NAME LOG STATUS: adds a program's closing line up. Without one, or with an exit status that contradicts it, it
# failed.
collect() {
    local name=$1 log=$2 status=$3 p=0 f=0 s=0 closing
    closing=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped$' "$log" | tail -n 1)
    if [ -n "$closing" ]; then
        read -r p f s <<<"$(echo "$closing" | tr -cd '0-9 ' | tr -s ' ')"
    fi
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ] || [ -z "$closing" ]; then
        f=$((f + 1))
        echo "FAIL $name: exit status $status, closing line '${closing:-none}':"
        tail -n 15 "$log" | cut -c 1-300
    elif [ "$f" -gt 0 ]; then
        grep -E '^FAIL' "$log" | head -n 12 | cut -c 1-300
    fi
    grep -E '^(skipped|SKIP)' "$log" | head -n 8 | cut -c 1-200
    [ "$f" -gt 0 ] && failures="$failures $name"
    echo "$([ "$f" -gt 0 ] && echo FAIL || echo 'ok  ') $name: $p passed, $f failed, $s skipped  ($log)"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
}

finish() {
    echo "$(($(date +%s) - begin)) s${failures:+; failed:$failures}"
    echo "$passed passed, $failed failed, $skipped skipped"
    [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
    exit
}

if [ -n "$sanitize" ]; then
    tool=${COMPUTE_SANITIZER:-$(command -v compute-sanitizer ||
        ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -n 1)}
    if [ -z "$tool" ]; then
        echo "skipped: memcheck, racecheck, initcheck, synccheck: compute-sanitizer was not found (COMPUTE_SANITIZER=)"
        echo "0 passed, 0 failed, 4 skipped"
        exit 0
    fi
    kinds="memcheck racecheck initcheck synccheck"
    # Kernels that two tools do not follow are left out for them, by the kernel that a line runs; trials are in
    # docs/history/cuda-records.md (0011). synccheck takes the barriers of one block of a cluster of 16 for another's:
    # it reports "Missing wait" of a textbook exchange by st.async, too, in clusters of 16 and not of 8.
    grep -vE '^#|^$' tests/cuda/sanitize_cases.txt >"$logs/memcheck-cases.txt"
    cp "$logs/memcheck-cases.txt" "$logs/initcheck-cases.txt"
    : >"$logs/racecheck-cases.txt"
    : >"$logs/synccheck-cases.txt"
    while read -r line; do
        ran=$(NORMFUSE_VERBOSE=dispatch "$build/test_operators" --case "$line device=cuda" 2>&1)
        grep -q ' cluster=16 ' <<<"$ran" || echo "$line" >>"$logs/synccheck-cases.txt"
        grep -qE ' columns_(grid|batch)_' <<<"$ran" || echo "$line" >>"$logs/racecheck-cases.txt"
    done <"$logs/memcheck-cases.txt"
    for kind in $kinds; do
        # A tool that cannot start with this driver is left out by name.
        if ! timeout 60 "$tool" --tool "$kind" --error-exitcode 9 "$build/test_cuda" --probe \
            >"$logs/$kind-start.txt" 2>&1; then
            echo "skipped: $kind does not start here: $(grep -v '^$' "$logs/$kind-start.txt" | tail -n 1 | cut -c 1-200)"
            skipped=$((skipped + 1))
            continue
        fi
        options=
        [ "$kind" = memcheck ] && options="--padding 32"
        (timeout "$limit" "$tool" --tool "$kind" $options --error-exitcode 9 --print-limit 20 "$build/test_operators" \
            --with device=cuda "$logs/$kind-cases.txt" >"$logs/$kind.txt" 2>&1
         echo $? >"$logs/$kind.status") &
    done
    wait
    # left_out KIND WHY
    left_out() {
        local lines=$(($(wc -l <"$logs/memcheck-cases.txt") - $(wc -l <"$logs/$1-cases.txt")))
        if [ "$lines" -gt 0 ]; then
            echo "skipped: $1: $lines lines with $2"
            skipped=$((skipped + lines))
        fi
    }
    left_out racecheck "rings that bulk copies fill, whose barriers it does not follow"
    left_out synccheck "clusters of 16 blocks, whose barriers it confuses"
    for kind in $kinds; do
        [ -f "$logs/$kind.status" ] || continue
        status=$(cat "$logs/$kind.status")
        summary=$(grep -E 'ERROR SUMMARY|RACECHECK SUMMARY' "$logs/$kind.txt" | tail -n 1)
        echo "$kind: ${summary:-no summary}"
        if [ "$status" -eq 0 ] && ! echo "$summary" | grep -qE '(: 0 errors|: 0 hazards)'; then
            status=99
        fi
        if [ "$status" -ne 0 ]; then
            grep -E '^=========' "$logs/$kind.txt" | head -n 30 | cut -c 1-200
        fi
        collect "$kind" "$logs/$kind.txt" "$status"
    done
    finish
fi

# ---- case files and random cases ----------------------------------------------------------------------------------

NORMFUSE_VERBOSE=dispatch timeout "$limit" "$build/test_operators" --jobs "$jobs" --every "${EVERY:-1}" \
    --with "device=cuda +twice" tests/cases/*.txt --random 1500 \
    --with "device=cuda +graph" tests/cases/options.txt \
    --with "device=cuda +no_sync" tests/cases/options.txt --seed 77 --random 500 >"$logs/cases.txt" 2>"$logs/cases.errors"
status=$?
grep -E '^(greatest|longest)| passed, .* s$' "$logs/cases.txt" | cut -c 1-200
collect cases "$logs/cases.txt" "$status"
sed -n 's/^normfuse: dispatch: .*: //p' "$logs/cases.errors" | grep -oE '[a-z]+[a-z0-9_]*' | sort -u >"$logs/kernels.ran"

# Each schedule takes what it does not refuse.
for schedule in single held stream; do
    timeout "$limit" "$build/test_operators" --jobs "$jobs" --schedule "$schedule" --with "device=cuda +twice" \
        --seed 7 --drawn 320 >"$logs/$schedule.txt" 2>&1
    status=$?
    collect "$schedule alone" "$logs/$schedule.txt" "$status"
done

# The H100 and the H200 have the same bits, whichever of them printed the file: `test_operators --with device=cuda --hashes
# --seed 2468 --random 200`.
if "$build/test_cuda" --probe | grep -qE 'H(100|200).*, 132 multiprocessors'; then
    timeout "$limit" "$build/test_operators" --with device=cuda --hashes --seed 2468 --random 200 >"$logs/hashes.all"
    status=$?
    different=$(grep -E '^[0-9a-f]{16}  ' "$logs/hashes.all" | diff - tests/cuda/hashes-hopper.txt | grep '^<')
    sed 's/^</FAIL other bits:/' <<<"$different" | grep FAIL >"$logs/hashes.txt"
    count=$(grep -c . "$logs/hashes.txt")
    echo "$(($(wc -l <tests/cuda/hashes-hopper.txt) - count)) passed, $count failed, 0 skipped" >>"$logs/hashes.txt"
else
    status=0
    echo "skipped: bits of an H100 or H200 with 132 multiprocessors: this is another GPU" >"$logs/hashes.txt"
    echo "0 passed, 0 failed, 1 skipped" >>"$logs/hashes.txt"
fi
collect hashes "$logs/hashes.txt" "$status"

# Every kernel has run, or is named.
kernels=$(sed -n 's/^\([a-z][a-z0-9_]*\) .*/\1/p' tests/cuda/limits.txt)
never=$(comm -23 <(sort -u <<<"$kernels") <(sort -u "$logs/kernels.ran"))
for kernel in $never; do
    echo "skipped: $kernel: no case runs it on this GPU" >>"$logs/kernels.txt"
done
echo "$(($(wc -w <<<"$kernels") - $(wc -w <<<"$never"))) passed, 0 failed, $(wc -w <<<"$never") skipped" >>"$logs/kernels.txt"
collect kernels "$logs/kernels.txt" 0

# ---- what a program must do itself ----------------------------------------------------------------------------------

timeout "$limit" "$build/test_cuda" >"$logs/test_cuda.txt" 2>&1
status=$?
grep -E '^#' "$logs/test_cuda.txt" | cut -c 1-200
collect test_cuda "$logs/test_cuda.txt" "$status"
finish
