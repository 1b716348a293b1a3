# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as jobs of AWS Batch, with the run options of the scheduler that TorchX had until August 2026."""
