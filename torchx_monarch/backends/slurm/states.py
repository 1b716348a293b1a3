# SPDX-License-Identifier: BSD-3-Clause
"""Map Slurm's job states to those of apps, and describe them."""

from __future__ import annotations

from torchx_monarch.model.state import State

STATES = {
    "BOOT_FAIL": State.FAILED,
    "CANCELLED": State.CANCELLED,
    "COMPLETED": State.SUCCEEDED,
    "COMPLETING": State.RUNNING,
    "CONFIGURING": State.PENDING,
    "DEADLINE": State.FAILED,
    "FAILED": State.FAILED,
    "LAUNCH_FAILED": State.FAILED,
    "NODE_FAIL": State.FAILED,
    "OUT_OF_MEMORY": State.FAILED,
    "PENDING": State.PENDING,
    "PREEMPTED": State.FAILED,
    "RECONFIG_FAIL": State.FAILED,
    "REQUEUED": State.PENDING,
    "REQUEUE_FED": State.PENDING,
    "REQUEUE_HOLD": State.PENDING,
    "RESIZING": State.RUNNING,
    "RESV_DEL_HOLD": State.PENDING,
    "REVOKED": State.FAILED,
    "RUNNING": State.RUNNING,
    "SIGNALING": State.RUNNING,
    "SPECIAL_EXIT": State.PENDING,
    "STAGE_OUT": State.RUNNING,
    "STOPPED": State.RUNNING,
    "SUSPENDED": State.PENDING,
    "TIMEOUT": State.FAILED,
}
"""The app's state for each of Slurm's (squeue(1), section JOB STATE CODES)."""

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
    return STATES.get(word(state), State.UNKNOWN)


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
