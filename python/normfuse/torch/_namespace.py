# SPDX-License-Identifier: MIT
"""The namespace of the operators: torch.ops.<NAMESPACE>. A build for the Kernel Hub has a name of its own
(hub/build.py), so that several builds live in one process."""

NAMESPACE = "normfuse"
