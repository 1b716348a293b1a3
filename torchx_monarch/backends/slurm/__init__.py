# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on Slurm: one job component for each role, one task on each of its nodes.

    scheduler   the TorchX scheduler (submit side): submit, look, cancel, from any machine that has Slurm's commands
    options     its run options
    render      AppDef -> request
    request     what is submitted, and what the job finds in its folder (request.json)
    folder      the folder of a job, and how it is found by the job's id
    commands    Slurm's commands: sbatch, scontrol, squeue, sacct, scancel
    states      what Slurm's states mean
    truth       what is known of a job: from Slurm, and from what the job has written itself
    prune       which folders of old jobs are removed
    start       the file that the interpreters of the two below are started with
    job         the batch step: runs a step for each role, retries, stops, records
    begin       how a task begins: the replica's process, before what looks after it
    task        one node's task: the replica, its logs, its record
    macros      what only a task can fill in

``start`` and what stands below it run inside the job and import the standard library only.
"""
