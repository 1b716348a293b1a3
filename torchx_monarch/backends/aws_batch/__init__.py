# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as jobs of AWS Batch, with the run options of the scheduler that TorchX had until August 2026.

- ``options``: the run options.
- ``check``: refuses apps that AWS Batch cannot run as specified, or warns of them.
- ``command``: a role's command with its macros, some of which only the node itself can replace.
- ``container``: the container properties of a role.
- ``request``: the job definition and the job of an app.
- ``definition``: reads containers and roles back from a job definition.
- ``native``: requests to AWS and the meaning of its errors.
- ``jobs``: submits, finds, ends and removes jobs.
- ``reasons``: why a job or a node failed, in words.
- ``cloud_checks``: checks credentials and queue for ``torchx monarch doctor``.
- ``snapshot``: converts a job and its nodes to the snapshot of an app.
- ``logs``: the log of one node in CloudWatch.
- ``backend``: the backend that ``monarch_aws_batch`` uses.

This project runs nothing beside the job and keeps no state of it elsewhere: Batch restarts failed jobs and holds the
whole state of an app.
"""
