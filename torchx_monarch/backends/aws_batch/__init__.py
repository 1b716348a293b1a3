# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps as jobs of AWS Batch: the scheduler that TorchX had until August 2026, anew, with what was wrong there mended.

- ``options``: the run options.
- ``command``: a role's command with its macros, of which only the node itself knows some.
- ``container``: one role as the properties of a container.
- ``request``: an app as a job definition and a job.
- ``client``: talking to AWS, and what its refusals mean.
- ``facts``: what Batch says of a job and its nodes, and what that means for the app.
- ``logs``: the lines of one node in CloudWatch.
- ``scheduler``: the TorchX schedulers, the plain one and the one that ``monarch_aws_batch`` wraps.

Nothing of ours runs beside the job, and nothing is kept here: Batch starts failed jobs again and knows all of an app.
"""
