# SPDX-License-Identifier: BSD-3-Clause
"""Run jobs on this machine that outlive the command, the shell and the terminal that started them.

    backend          the backend (submit side): start an app, read its folder, ask its supervisor to stop it
    submit           write an app's folder and start its supervisor
    render           AppDef -> request: macros, environments, GPUs
    request          what the supervisor runs (request.json)
    gpus             assign GPUs to replicas
    folder           make and remove an app's folder as a whole
    prune            remove old apps
    status           the record of a running or ended app (status.json)
    state            the current state of an app: the record, checked against the processes
    supervise        the script that the supervisor's interpreter runs
    supervisor       the two processes that own an app: keeper and supervisor
    supervisor_loop  the supervisor's event loop: start, watch, retry, stop, end
    owners           which processes own an app, on which machine, and whether they are alive

The package ``torchx_monarch.supervisor`` keeps the processes of replicas and their log files. The modules of the app's
supervisor (from ``supervise`` down), and the modules that they share with the submit side, import the standard library
only.
"""
