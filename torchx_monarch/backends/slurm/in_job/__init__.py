# SPDX-License-Identifier: BSD-3-Clause
"""What runs in a Slurm job: the batch step on its first node, and one task on each node. Standard library only.

entrypoint  the script that starts the batch step and the tasks
batch_step  the batch step: run a step for each role, retry, stop, record the result
commands    Slurm's commands that the batch step runs on its own job
task_start  start the replica's process before the imports that supervise it
task        one node's task: run the replica, write its logs and its record
"""
