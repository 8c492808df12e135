#!/bin/bash -eu
# SPDX-License-Identifier: MIT
#
# Builds the fuzz targets into $OUT as OSS-Fuzz does: https://google.github.io/oss-fuzz/getting-started/new-project-guide/
# $SRC/normfuse is the source, or the tree that holds this script. Without OSS-Fuzz:
#
#   OUT=build/fuzz tests/fuzz/build.sh && build/fuzz/fuzz_calls build/fuzz/corpus
#
# STATIC=1 links all but the C library into the targets, so that they run on machines without clang.
root=$(cd "$(dirname "$0")/../.." && pwd)
[ -d "${SRC:-}/normfuse" ] && root=$SRC/normfuse
mkdir -p "${OUT:=$root/build/fuzz}"
OUT=$(cd "$OUT" && pwd)
sanitizers=
if [ -z "${LIB_FUZZING_ENGINE:-}" ]; then
    LIB_FUZZING_ENGINE=-fsanitize=fuzzer
    CC=clang CXX=clang++ CFLAGS="-fsanitize=fuzzer-no-link ${CFLAGS:-}"
    sanitizers=address,undefined
fi
${CMAKE:-cmake} -S "$root" -B "${WORK:-$OUT}/cmake" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
    -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" -DCMAKE_C_FLAGS="${CFLAGS:-}" -DCMAKE_CXX_FLAGS="${CXXFLAGS:-}" \
    -DCMAKE_EXE_LINKER_FLAGS="${STATIC:+-static-libstdc++ -static-libgcc -s}" \
    -DNORMFUSE_SANITIZE="$sanitizers" -DNORMFUSE_BUILD_FUZZ=ON -DNORMFUSE_FUZZING_ENGINE="$LIB_FUZZING_ENGINE" \
    -DNORMFUSE_BUILD_TESTS=OFF -DNORMFUSE_BUILD_CLI=OFF -DNORMFUSE_BUILD_SHARED=OFF -DNORMFUSE_INSTALL=OFF \
    -DNORMFUSE_CUDA=OFF ${CMAKE_OPTIONS:-}
${CMAKE:-cmake} --build "${WORK:-$OUT}/cmake" -j "${JOBS:-$(nproc)}"
cp "${WORK:-$OUT}"/cmake/fuzz_{calls,npy,problem_line} "$root"/tests/fuzz/*.dict "$OUT/"
"${PYTHON:-python3}" "$root/tests/fuzz/corpus.py" "$OUT"
