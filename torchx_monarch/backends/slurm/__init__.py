# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run jobs on Slurm: one job component per role, one task per node.

    scheduler   the TorchX scheduler (submit side): submit, describe and cancel from any machine with Slurm's commands
    options     the run options
    render      AppDef -> request
    request     the request: what is submitted, and what the job reads from its folder (request.json)
    folder      the folder of a job, and how to find it by the job's id
    array       job arrays: parse their indices, name their tasks for Slurm
    commands    run Slurm's commands (sbatch, scontrol, squeue, sacct, sinfo, scancel) and parse their output
    states      map Slurm's job states to TorchX's
    records     the JSON files of a job's folder as data classes
    job_status  the snapshot of a job or an array task, from Slurm and from the files that the job has written
    snapshot    the snapshot of an app: a job, an array or an array task
    cancel      cancel an app
    prune       remove the folders of old jobs
    entrypoint  the script that starts the batch step and the tasks
    batch_step  the batch step: run a step for each role, retry, stop, record the result
    task_start  start the replica's process before the imports that supervise it
    task        one node's task: run the replica, write its logs and its record
    macros      fill in TorchX's macros and the nodes of the replicas 0

``entrypoint`` and the modules below it run inside the job and import the standard library only.
"""
