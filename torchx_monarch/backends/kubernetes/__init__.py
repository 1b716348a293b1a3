# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on a Kubernetes cluster, with core Kubernetes alone (mode ``job``) or through Volcano (mode ``volcano``).

This project runs nothing in the cluster but the pods: Kubernetes' controllers restart failed pods, and the API server
holds the whole state of an app. docs/architecture/backends.md says more.
"""
