# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as containers of one Docker daemon: TorchX's ``local_docker`` with its defects fixed."""
