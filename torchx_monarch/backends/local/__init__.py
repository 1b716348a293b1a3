# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Jobs on this machine that outlive the command, the shell and the terminal that started them.

    scheduler   the TorchX scheduler (submit side): write the app's folder, start its supervisor, read the folder back
    submit      an app's folder and its supervisor's start
    render      AppDef -> request: macros, environments, GPUs
    request     what the supervisor is asked to run (request.json)
    appdef      AppDef <-> JSON (app.json)
    gpus        which replica sees which GPU
    store       where everything lies, and how it is written so that no reader ever sees half of it
    folder      making and removing an app's folder as a whole
    prune       which old apps are removed
    status      what is known about a running or ended app (status.json)
    state       the truth about an app: the status file, checked against the processes
    logs        reading logs: follow, since, until, regex
    supervise   the file that the supervisor's interpreter is started with
    supervisor  the two processes that watch over an app: keeper and supervisor
    loop        the supervisor's event loop: start, watch, retry, stop, end
    winddown    stopping a set of replicas: let them end, SIGTERM, SIGKILL
    replica     one replica: its process, its logs, its record
    spawn       starting one process with a clean slate
    pump        pipes to log files
    watchers    who watches over an app, on which machine, and whether they live

The supervisor's side (from ``supervise`` down) and what it shares with the submit side import the standard library
only.
"""
