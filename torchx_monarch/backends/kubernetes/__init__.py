# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on a Kubernetes cluster, with core Kubernetes alone (mode ``job``) or through Volcano (mode ``volcano``).

- ``options``: the run options.
- ``names``: the names, labels and annotations of an app's objects.
- ``pods``: the pod template of a role.
- ``request``: the request for one app, and the URL paths of its objects.
- ``jobs``: mode ``job``: an Indexed Job for each role, a headless Service, a Secret.
- ``volcano``: mode ``volcano``: TorchX's Volcano job with corrections.
- ``api``: requests to the API server and the meaning of its errors.
- ``snapshot``: reads the objects and pods of an app.
- ``status``: computes the states of replicas, roles and apps.
- ``logs``: the log of one replica, through all of its pods.
- ``cancel``: ends the pods of an app and keeps their logs.
- ``scheduler``: the TorchX scheduler.

This project runs nothing in the cluster but the pods: Kubernetes' controllers restart failed pods, and the API server
holds the whole state of an app.
"""
