# SPDX-License-Identifier: BSD-3-Clause
"""Map Slurm's job states to those of apps, and describe them."""

from __future__ import annotations

from torchx_monarch.model.state import State

STATES = {
    State.PENDING: "CONFIGURING PENDING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT SUSPENDED",
    State.RUNNING: "COMPLETING RESIZING RUNNING SIGNALING STAGE_OUT STOPPED",
    State.SUCCEEDED: "COMPLETED",
    State.CANCELLED: "CANCELLED",
    State.FAILED: "BOOT_FAIL DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED RECONFIG_FAIL REVOKED "
    "TIMEOUT",
}
"""Slurm's states for each of an app's (squeue(1), section JOB STATE CODES)."""

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


def to_state(state: str) -> State:
    """Return the app's state for one of Slurm's; UNKNOWN if there is no equivalent."""
    return next((ours for ours, names in STATES.items() if word(state) in names.split()), State.UNKNOWN)


def explanation(state: str, reason: str = "") -> str:
    """Describe a state in one line for the user; empty if the state needs no explanation.

    Args:
        reason: Slurm's reason why the job waits or ended; empty if there is none.
    """
    name = word(state)
    explained = _REASONS.get(name, "")
    if not explained and to_state(name) is State.PENDING and reason not in ("", "None", "(null)"):
        explained = f"waits for {reason}"
    return f"{name}: {explained}" if explained else ""
