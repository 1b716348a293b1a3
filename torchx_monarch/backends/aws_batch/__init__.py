# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as jobs of AWS Batch, with the run options of the scheduler that TorchX had until August 2026.

This project runs nothing beside the job and keeps no state of it elsewhere: Batch restarts failed jobs and holds the
whole state of an app. docs/architecture/backends.md says more.
"""
