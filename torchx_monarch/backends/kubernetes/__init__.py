# SPDX-License-Identifier: BSD-3-Clause
"""Run apps as Jobs of a Kubernetes cluster."""
