# SPDX-License-Identifier: BSD-3-Clause
"""Run jobs on Slurm: one job component per role, one task per node.

backend    the backend (submit side): submit, read and cancel from any machine with Slurm's commands
options    the run options
render     AppDef -> request
request    the request: what is submitted, and what the job reads from its folder (request.json)
container  run steps in containers of pyxis
macros     fill in TorchX's macros and the nodes of the replicas 0
folder     the folder of a job, and how to find it by the job's id
records    the JSON files of a job's folder as data classes
native     run Slurm's commands (sbatch, scontrol, squeue, sacct, sinfo, scancel) and parse their output
checks     check commands, slurmctld and partition for `torchx monarch doctor`
states     map Slurm's job states to those of apps
job_state  the state of a job, from Slurm and from the files that the job has written
snapshot   the snapshot of an app
cancel     cancel an app
prune      remove the folders of old jobs
in_job     what runs in the job: the batch step and the tasks
"""
