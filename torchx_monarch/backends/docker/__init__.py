# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as containers of one Docker daemon: TorchX's ``local_docker`` with its defects fixed.

- ``request``: adapt the containers that TorchX would create.
- ``status``: derive the state of a replica from its container, and the state of an app from its replicas.
- ``snapshot``: assemble an app from its existing containers.
- ``daemon``: connect to the daemon and report connection errors.
- ``final_states``: read the results of hosts that must not be restarted.
- ``map_concurrently``: apply a function to many containers in parallel.
- ``bridge_network``: create and remove the containers' network.
- ``logs``: read or follow the log of one container.
- ``container_files``: read the error file and events that a host wrote in its container.
- ``scheduler``: the TorchX scheduler.

No process of this package runs beside the containers: dockerd restarts failed containers and stores the app's state.
"""
