# SPDX-License-Identifier: MIT
{
  description = "normfuse: normalization layers with fused activations and additions";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs =
    { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
