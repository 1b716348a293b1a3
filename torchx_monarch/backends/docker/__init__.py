# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as containers of one Docker daemon: TorchX's ``local_docker`` with its defects fixed.

- ``options``: the run options.
- ``request``: adapt the containers that TorchX would create.
- ``native``: make requests to the daemon, and report connection errors.
- ``bridge_network``: create and remove the containers' network.
- ``checks``: check the daemon for ``torchx monarch doctor``.
- ``snapshot``: derive the replicas of an app from its containers.
- ``host_results``: read the results of hosts that must not be restarted.
- ``host_files``: read the error files and events that hosts wrote in their containers.
- ``logs``: read or follow the log of one container.
- ``backend``: the backend.

No process of this package runs beside the containers: dockerd restarts failed containers and stores the app's state.
"""
