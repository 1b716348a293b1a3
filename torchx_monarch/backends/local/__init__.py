# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run jobs on this machine that outlive the command, the shell and the terminal that started them.

    scheduler        the TorchX scheduler (submit side): write the app's folder, start its supervisor, read the folder
    submit           write an app's folder and start its supervisor
    render           AppDef -> request: macros, environments, GPUs
    request          what the supervisor runs (request.json)
    appdef           AppDef <-> JSON (app.json)
    gpus             assign GPUs to replicas
    state_files      paths below the state directory, and atomic writes
    folder           make and remove an app's folder as a whole
    prune            remove old apps
    status           the record of a running or ended app (status.json)
    state            the current state of an app: the record, checked against the processes
    logs             read logs: follow, since, until, regex
    supervise        the script that the supervisor's interpreter runs
    supervisor       the two processes that own an app: keeper and supervisor
    supervisor_loop  the supervisor's event loop: start, watch, retry, stop, end
    graceful_stop    stop a set of replicas: let them end, SIGTERM, SIGKILL
    stopped_hosts    detect hosts that are stopped (SIGSTOP)
    replica          one replica: its process, its logs, its record
    spawn            start one process in a clean state
    log_writer       copy pipes to log files
    owners           which processes own an app, on which machine, and whether they are alive

The supervisor's modules (from ``supervise`` down) and those that they share with the submit side import the standard
library only.
"""
