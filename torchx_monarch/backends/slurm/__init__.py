# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as jobs of Slurm: one job component per role, one task per node (on the base ``backends.batch``).

backend     submit, read and end jobs
options     the run options, and the checks for `torchx monarch doctor`
render      AppDef -> request: the options of sbatch and srun, containers of pyxis
request     the request as the job reads it
commands    run Slurm's commands, parse their output, and map its job states to those of apps
batch_step  what runs on a job's first node: start the steps, end the rest of a decided app, requeue
"""
