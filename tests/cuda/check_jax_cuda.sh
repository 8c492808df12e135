#!/bin/bash
# SPDX-License-Identifier: MIT
#
# check_jax_cuda.sh BUILD_FOLDER - the tests of normfuse.jax on a GPU, with the libnormfuse.so in BUILD_FOLDER: test_jax.py
# with its arrays on CUDA, as XLA runs it by default, without CUDA graphs, and with a graph of every call;
# test_jax_graphs.py; and test_jax_devices.py. PYTHON names a Python with JAX for CUDA, Flax and pytest. XLA compiles for each test, so a file's
# tests are shared by SHARDS processes (6). Words after the folder go to pytest (-k vmap). NORMFUSE_TEST_DEVICE=cpu is a dry
# run. Exit status and logs, in BUILD_FOLDER/check-jax-cuda/: those of check_torch_cuda.sh.
check=check-jax-cuda library=JAX modules="pytest, flax.linen, flax.nnx"
needs="import jax" gpu="import jax; print('jax', jax.__version__); jax.devices('cuda')"
. "$(dirname "$0")/python_checks.sh"

shards=${SHARDS:-6}
"$python" - <<'END'
import os
os.environ["JAX_PLATFORMS"] = os.environ["NORMFUSE_TEST_DEVICE"]
import flax, jax, normfuse
print(f"normfuse {normfuse.__version__}, jax {jax.__version__}, flax {flax.__version__}; "
      f"{', '.join(device.device_kind for device in jax.devices())}", flush=True)
END
buffers=--xla_gpu_enable_command_buffer
for shard in $(seq 0 $((shards - 1))); do
    export NORMFUSE_TEST_SHARD=$shard/$shards
    run "jax-$shard" test_jax.py "$@" &
    [ "$device" = cpu ] && continue
    XLA_FLAGS="$buffers=" run "jax-no-graphs-$shard" test_jax.py "$@" &
    XLA_FLAGS="$buffers=FUSION,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1" run "jax-graphs-$shard" test_jax.py "$@" &
done
unset NORMFUSE_TEST_SHARD
run jax_graphs test_jax_graphs.py "$@" &
run jax_devices test_jax_devices.py "$@" &
wait
report
