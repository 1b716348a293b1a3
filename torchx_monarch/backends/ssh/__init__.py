# SPDX-License-Identifier: BSD-3-Clause
"""Run apps on machines that are reached over ssh, each replica under a supervisor on its machine.

    Runner ── backend ── connections ══ ssh ══ in_job.entry ── folder of the replica
                                                                   supervisor ── host

A replica is an app of its machine's own, as monarch_local runs it (``backends.local``): one folder and one supervisor,
which restarts it and keeps its logs. ``snapshot`` puts the replicas of all machines together.
"""
