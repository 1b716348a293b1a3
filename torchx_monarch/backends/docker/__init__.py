# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps as containers of one Docker daemon: TorchX's ``local_docker``, with what is wrong there mended.

- ``request``: what is changed in the containers that TorchX would make.
- ``facts``: what a container's state means, and what the state of an app follows from it.
- ``found``: an app, from the containers of it that there are.
- ``daemon``: the connection, and what a person is told when there is none.
- ``ends``: what hosts have noted that are not to be started again.
- ``together``: the same done to many containers at a time.
- ``network``: what the containers are on.
- ``logs``: the lines of one container.
- ``reports``: what a host has left in its container.
- ``scheduler``: the TorchX scheduler.

Nothing of ours runs beside the containers: dockerd starts failed ones again, and keeps all that is known of an app.
"""
