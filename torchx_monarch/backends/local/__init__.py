# SPDX-License-Identifier: BSD-3-Clause
"""Run jobs on this machine that outlive the command, the shell and the terminal that started them.

    backend          the backend (submit side): start an app, read its folder, ask its supervisor to stop it
    submit           write an app's folder and start its supervisor
    render           AppDef -> request: macros, environments, GPUs
    request          what the supervisor runs (request.json)
    gpus             assign GPUs to replicas
    folder           make and remove an app's folder as a whole; remove old apps
    status           the record of a running or ended app (status.json)
    state            the current state of an app: the record, and whether its supervisor holds the app's lock
    supervisor       the process that owns an app
    supervisor_loop  the supervisor's event loop: start, watch, retry, stop, end

The package ``torchx_monarch.supervisor`` keeps the processes of replicas and their log files. The modules of the app's
supervisor (from ``supervisor`` down), and the modules that they share with the submit side, import the standard library
only.
"""
