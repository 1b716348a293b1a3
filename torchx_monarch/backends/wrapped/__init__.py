# SPDX-License-Identifier: BSD-3-Clause
"""Run apps through any other TorchX scheduler, which ``schedulers.wrap`` makes one of this package's."""
