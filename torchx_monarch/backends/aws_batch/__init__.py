# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as jobs of AWS Batch: a rewrite, with corrections, of the scheduler that TorchX had until August 2026.

- ``options``: the run options.
- ``command``: a role's command with its macros, some of which only the node itself can replace.
- ``check``: refuses apps that AWS Batch cannot run as specified, or warns of them.
- ``container``: the container properties of a role.
- ``request``: the job definition and the job of an app.
- ``client``: requests to AWS and the meaning of its errors.
- ``status``: computes the states of nodes and apps.
- ``logs``: the log of one node in CloudWatch.
- ``scheduler``: the TorchX scheduler that ``monarch_aws_batch`` wraps.

This project runs nothing beside the job and keeps no state of it elsewhere: Batch restarts failed jobs and holds the
whole state of an app.
"""
