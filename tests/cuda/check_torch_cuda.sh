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
check=check-torch-cuda library=PyTorch modules="pytest, hypothesis, expecttest, ml_dtypes"
needs="import torch" gpu="import sys, torch; print('torch', torch.__version__); sys.exit(not torch.cuda.is_available())"
. "$(dirname "$0")/python_checks.sh"

export TORCHINDUCTOR_COMPILE_THREADS=2 JAX_PLATFORMS=cpu # JAX is there for its arrays on the CPU
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

for shard in 0 1 2 3; do # each of its tests compiles many kernels
    NORMFUSE_TEST_SHARD=$shard/4 run "functional-$shard" test_functional.py "$@" &
done
for name in arrays operators modules convert convert_meaning convert_biases rules tools models install distributed vmap \
    hub channel_norm channel_norm_draws convert_channel_norm; do
    run "$name" "test_$name.py" "$@" &
done
wait
run cuda test_cuda.py "$@" # alone: it looks at the device's memory
report
