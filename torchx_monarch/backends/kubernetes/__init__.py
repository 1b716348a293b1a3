# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Apps on a Kubernetes cluster, with nothing installed there (mode ``job``) or through Volcano (mode ``volcano``).

- ``options``: the run options.
- ``names``: what objects are called, and the labels and annotations by which they are found.
- ``pods``: from a role to the template of its pods.
- ``request``: what is submitted.
- ``jobs``: mode ``job``: an Indexed Job for each role, a headless Service, a Secret.
- ``volcano``: mode ``volcano``: TorchX's Volcano job, with what is wrong there mended.
- ``api``: requests to the API server, and what its answers mean.
- ``facts``: what pods and jobs say, and what the state of an app follows from.
- ``logs``: the lines of one replica, through all of its pods.
- ``ending``: how the pods of an app are ended so that their logs stay.
- ``scheduler``: the TorchX scheduler.

Nothing of ours runs in the cluster beside the pods: the controllers of Kubernetes start failed ones again, and all that
is known of an app is with the API server.
"""
