# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on a Kubernetes cluster, with core Kubernetes alone (mode ``job``) or through Volcano (mode ``volcano``).

- ``options``: the run options.
- ``names``: the names, labels and annotations of an app's objects.
- ``tolerations``: parses taints that pods tolerate.
- ``request``: the request for one app, and the URL paths of its objects.
- ``pods``: renders the pod template of a role.
- ``jobs``: renders mode ``job``: an Indexed Job for each role, a headless Service, a Secret.
- ``volcano``: renders mode ``volcano``: TorchX's Volcano job with corrections.
- ``submit``: creates the objects of a request.
- ``native``: requests to the API server and the meaning of its errors.
- ``checks``: checks the cluster and the user's rights.
- ``objects``: reads the objects and pods of apps.
- ``attempts``: reads one start of a replica from its pod.
- ``snapshot``: converts the objects of an app to a snapshot.
- ``logs``: the log of one replica, through all of its pods.
- ``stop``: ends the pods of an app and keeps their logs; removes apps.
- ``backend``: the backend.

This project runs nothing in the cluster but the pods: Kubernetes' controllers restart failed pods, and the API server
holds the whole state of an app.
"""
