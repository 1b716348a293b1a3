# SPDX-License-Identifier: BSD-3-Clause
"""Connections between the processes of a job: addresses, TLS, the listener, messages and leases."""
