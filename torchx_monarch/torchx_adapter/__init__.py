# SPDX-License-Identifier: BSD-3-Clause
"""The adapter to TorchX: all uses of TorchX's private names."""
