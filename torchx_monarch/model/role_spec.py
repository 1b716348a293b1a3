# SPDX-License-Identifier: BSD-3-Clause
"""What a backend must know of a role beside its command: what it runs, where it meets, how it ends and restarts.

``command.rewrite`` derives the specs of an app's roles when it wraps their commands. Backends store them with the app.
A role is a ``torchx.specs.Role``, which this package does not import.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torchx_monarch.model.spelling import did_you_mean
from torchx_monarch.model.world import CommandError

MAX_REPLICAS = 1 << 16
"""The largest number of replicas of a role: a backend writes some lines for each of them."""

METADATA_KEY = "monarch"
"""The key of a role's metadata under which are the settings that a ``Role`` has no field for."""

SIDECAR, WRAP = "sidecar", "wrap"
SPARES, MIN_GROUPS, LIGHTHOUSE_PORT = "spares", "min_groups", "lighthouse_port"
_SETTINGS = (SIDECAR, WRAP, SPARES, MIN_GROUPS, LIGHTHOUSE_PORT)

LOOPBACK = "127.0.0.1"
"""Where a lighthouse listens whose port is in the metadata of its role, unless hosts are on several machines."""


def mark_sidecar(role: Any) -> None:
    """Mark a role as a sidecar, in place; keep a mark that the user has set."""
    role.metadata[METADATA_KEY] = {SIDECAR: True, **_settings(role)}


def is_sidecar(role: Any) -> bool:
    """Return whether a role is marked as a sidecar, which is ended when all others have succeeded."""
    return read_bool(role, SIDECAR) or False


def read_bool(role: Any, name: str) -> bool | None:
    """Return a setting in a role's metadata that is true or false; None if it is not there."""
    value = _settings(role).get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(role, f"has {name!r}: {value!r}; use True or False")
    return value


def read_number(role: Any, name: str) -> int | None:
    """Return a number in a role's metadata, such as that of its spare hosts; None if it is not there."""
    number = _settings(role).get(name)
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        raise _wrong(role, f"has {name!r}: {number!r}; use 0 or more")
    return number


def _settings(role: Any) -> Mapping[str, Any]:
    """Return the settings in a role's metadata; raise CommandError if one of them does not exist."""
    settings = role.metadata.get(METADATA_KEY, {})
    if not isinstance(settings, Mapping):
        raise _wrong(role, f"is {settings!r}; it is a dictionary, such as {{{SIDECAR!r}: True}}")
    for name in settings:
        if name not in _SETTINGS:
            known = did_you_mean(str(name), _SETTINGS) or f" Use {', '.join(_SETTINGS)}."
            raise _wrong(role, f"has the unknown setting {name!r}.{known}")
    return settings


def _wrong(role: Any, reason: str) -> CommandError:
    return CommandError(f"role {role.name!r}: its metadata {METADATA_KEY!r} {reason}")


class RetryPolicy(str, enum.Enum):
    """What restarts when a replica fails, within ``max_retries``: it alone, its role or the app.

    The names are those of ``torchx.specs.RetryPolicy``.
    """

    REPLICA = "REPLICA"
    ROLE = "ROLE"
    APPLICATION = "APPLICATION"


class WorkloadKind(str, enum.Enum):
    """What the host processes of a role run.

    Attributes:
        NONE: nothing: the role's command runs as it is, and its replicas have no host process.
        COMMAND: the role's command, which starts no ranks: one process for each replica.
        RANKS: the ranks of a torchrun or Python command.
        ALLOCATION: runs that clients submit to a live allocation.
    """

    NONE = ""
    COMMAND = "command"
    RANKS = "ranks"
    ALLOCATION = "allocation"


@dataclass(frozen=True)
class RoleSpec:
    """What a backend must know of a role beside its command.

    Attributes:
        min_replicas: how many of them the role needs, replica 0 among them; None for all.
        sidecar: whether the app ends without waiting for the role.
        max_retries: how often the scope of ``retry_policy`` is restarted.
        rendezvous: address of its replica 0, as in ``HostSpec.rendezvous``; empty if its hosts share one machine, or it
            has none.
        ends_together: whether its hosts end and restart with those of the other roles (``controller.roles``).
        spares: how many replicas are spare hosts, which run ranks only in the place of others.
        min_groups: how many roles with this number must be able to go on; 0 if the app needs the role itself.
        on_end: the command to run when the job has ended, of the first role; empty for none.
        lighthouse_port: the port of torchft's lighthouse, if that is what the role runs; 0 if not.
        unwrapped: why its replicas have no host process; empty if they have one.
        allocation: the handle of the live allocation whose hosts run its ranks; empty for hosts of its own.
        allocation_logs: the folder with the logs of these hosts; empty if this machine does not have it.
    """

    name: str
    replicas: int = 1
    min_replicas: int | None = None
    sidecar: bool = False
    max_retries: int = 0
    retry_policy: RetryPolicy = RetryPolicy.APPLICATION
    workload: WorkloadKind = WorkloadKind.NONE
    rendezvous: str = ""
    ends_together: bool = False
    spares: int = 0
    min_groups: int = 0
    lighthouse_port: int = 0
    on_end: str = ""
    unwrapped: str = ""
    allocation: str = ""
    allocation_logs: str = ""

    @classmethod
    def from_role(cls, role: Any, **attributes: Any) -> RoleSpec:
        """Return the spec of a role, with the attributes that its fields do not give."""
        return cls(
            name=role.name,
            replicas=role.num_replicas,
            min_replicas=role.min_replicas,
            sidecar=is_sidecar(role),
            max_retries=role.max_retries,
            retry_policy=RetryPolicy(str(role.retry_policy.value)),
            min_groups=read_number(role, MIN_GROUPS) or 0,
            lighthouse_port=read_number(role, LIGHTHOUSE_PORT) or 0,
            **attributes,
        )

    def alone(self) -> RoleSpec:
        """Return the spec for a supervisor of one replica: what its failure means is decided over all replicas."""
        return replace(self, replicas=1, min_replicas=None, sidecar=False, min_groups=0)

    @property
    def runs_hosts(self) -> bool:
        return self.workload is not WorkloadKind.NONE

    @property
    def restarts_alone(self) -> bool:
        """Whether a replica that fails restarts while the others go on."""
        is_needless = self.workload is WorkloadKind.COMMAND and self.is_elastic
        return is_needless or (self.retry_policy is RetryPolicy.REPLICA and self.replicas > 1)

    @property
    def runs_ranks(self) -> bool:
        """Whether its host processes run ranks: one of them succeeds only when all of the role do."""
        return self.workload in (WorkloadKind.RANKS, WorkloadKind.ALLOCATION)

    @property
    def has_ranks(self) -> bool:
        """Whether it has ranks, on hosts of its own or on those of an allocation."""
        return self.runs_ranks or bool(self.allocation)

    def describe_start(self) -> str:
        """Describe in one line what the backend starts for each replica."""
        starts = {
            WorkloadKind.COMMAND: "a host process, which starts the command",
            WorkloadKind.RANKS: "a host process, which starts the ranks",
            WorkloadKind.ALLOCATION: "a host process, which waits for runs",
        }
        start = starts.get(self.workload, f"the command, without a host process: {self.unwrapped}")
        return f"role {self.name}: each replica starts {start}"

    @property
    def is_elastic(self) -> bool:
        """Whether the role tolerates any failed replica."""
        return self.min_replicas is not None and self.min_replicas < self.replicas

    def tolerates(self, failed: Collection[int]) -> bool:
        """Return whether the role can still succeed when these of its replicas have failed for good."""
        fewest = self.replicas if self.min_replicas is None else self.min_replicas
        return not failed or (0 not in failed and self.replicas - len(failed) >= fewest)

    def succeeded(self, succeeded: Collection[int], failed: Collection[int]) -> bool:
        """Return whether the role has succeeded: all replicas have ended, and it tolerates those that have failed.

        It does not wait for spare hosts, which may never have been able to start.
        """
        awaited = self.replicas - (self.spares if 0 in succeeded else 0)
        return len(succeeded) + len(failed) >= awaited and self.tolerates(failed)
