# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on Slurm: one job component for each role, one task on each of its nodes.

    scheduler   the TorchX scheduler (submit side): submit, look, cancel, from any machine that has Slurm's commands
    options     its run options
    render      AppDef -> request
    request     what is submitted, and what the job finds in its folder (request.json)
    folder      the folder of a job, and how it is found by the job's id
    array       job arrays: their indices, and what Slurm calls one of their tasks
    commands    Slurm's commands: sbatch, scontrol, squeue, sacct, scancel
    states      what Slurm's states mean
    truth       what is known of a job, or of one array task: from Slurm, and from what it has written itself
    apps        what is known of an app: a job, an array or one of its tasks
    ending      how the wish to end one reaches it
    prune       which folders of old jobs are removed
    start       the file that the interpreters of the two below are started with
    job         the batch step: runs a step for each role, retries, stops, records
    begin       how a task begins: the replica's process, before what looks after it
    task        one node's task: the replica, its logs, its record
    macros      what only a task can fill in

``start`` and what stands below it run inside the job and import the standard library only.
"""
