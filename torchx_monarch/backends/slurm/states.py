# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Map Slurm's job states to TorchX's and describe them."""

from __future__ import annotations

from torchx.specs import AppState

STATES = {
    "BOOT_FAIL": AppState.FAILED,
    "CANCELLED": AppState.CANCELLED,
    "COMPLETED": AppState.SUCCEEDED,
    "COMPLETING": AppState.RUNNING,
    "CONFIGURING": AppState.PENDING,
    "DEADLINE": AppState.FAILED,
    "FAILED": AppState.FAILED,
    "LAUNCH_FAILED": AppState.FAILED,
    "NODE_FAIL": AppState.FAILED,
    "OUT_OF_MEMORY": AppState.FAILED,
    "PENDING": AppState.PENDING,
    "PREEMPTED": AppState.FAILED,
    "RECONFIG_FAIL": AppState.FAILED,
    "REQUEUED": AppState.PENDING,
    "REQUEUE_FED": AppState.PENDING,
    "REQUEUE_HOLD": AppState.PENDING,
    "RESIZING": AppState.RUNNING,
    "RESV_DEL_HOLD": AppState.PENDING,
    "REVOKED": AppState.FAILED,
    "RUNNING": AppState.RUNNING,
    "SIGNALING": AppState.RUNNING,
    "SPECIAL_EXIT": AppState.PENDING,
    "STAGE_OUT": AppState.RUNNING,
    "STOPPED": AppState.RUNNING,
    "SUSPENDED": AppState.PENDING,
    "TIMEOUT": AppState.FAILED,
}
"""TorchX's state for each of Slurm's (squeue(1), section JOB STATE CODES)."""

_REASONS = {
    "BOOT_FAIL": "a node could not be booted",
    "CANCELLED": "by scancel, or by an administrator",
    "DEADLINE": "it could not end before its deadline",
    "LAUNCH_FAILED": "Slurm could not launch it",
    "NODE_FAIL": "a node that it ran on was lost",
    "OUT_OF_MEMORY": "a process needed more memory than the job had asked for",
    "PREEMPTED": "a job of higher priority took its nodes",
    "REVOKED": "a sibling of it runs on another cluster",
    "SUSPENDED": "suspended by the administrator",
    "TIMEOUT": "it ran into its time limit",
}


def word(state: str) -> str:
    """Return the bare state: ``CANCELLED`` for ``CANCELLED by 1000`` or ``CANCELLED+``; empty for an empty string."""
    words = state.split()
    return words[0].rstrip("+") if words else ""


def app_state(state: str) -> AppState:
    """Return TorchX's state for one of Slurm's; UNKNOWN if there is no equivalent."""
    return STATES.get(word(state), AppState.UNKNOWN)


def explanation(state: str, reason: str = "") -> str:
    """Describe a state in one line for the user; empty if the state needs no explanation.

    Args:
        state: Slurm's state.
        reason: Slurm's reason why the job waits or ended; empty if there is none.
    """
    name = word(state)
    given = "" if reason in ("", "None", "(null)") else reason
    said = _REASONS.get(name, "")
    if app_state(name) is AppState.PENDING:
        return f"{name}: waits for {given}" if given and not said else f"{name}: {said}" if said else ""
    return f"{name}: {said}" if said else ""
