# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decide how a role has ended from the ends of its replicas, and how an app has ended from the ends of its roles.

The rules, the same on all backends:

- An app has succeeded when every role has (``LocalScheduler.describe`` of torchx.schedulers.local_scheduler: RUNNING
  while a replica of any role lives, FAILED if one has failed, else SUCCEEDED). The app does not wait for sidecars
  (``torchx_monarch.model.sidecars``): they are ended when all other roles have succeeded.
- A role has failed when one of its replicas has failed for good, with no retries left. A role with ``min_replicas``
  tolerates failed replicas, other than replica 0, while enough others run or have succeeded.
- An app has failed when a role has failed. A sidecar's failure counts until all other roles have succeeded.

Standard library only: the supervisor and Slurm's batch step import this module.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from torchx_monarch.model.sidecars import is_sidecar

if TYPE_CHECKING:
    from torchx.specs import Role


@dataclass(frozen=True)
class RolePolicy:
    """The properties of a role that decide how it and its app end.

    Attributes:
        replicas: number of replicas.
        min_replicas: how many of them the role needs, replica 0 among them; None for all.
        sidecar: whether the app ends without waiting for the role.
    """

    replicas: int
    min_replicas: int | None = None
    sidecar: bool = False

    @classmethod
    def of(cls, role: Role) -> RolePolicy:
        """Return the policy of a TorchX role."""
        return cls(role.num_replicas, role.min_replicas, is_sidecar(role))

    @property
    def elastic(self) -> bool:
        """Whether the role tolerates any failed replica."""
        return self.min_replicas is not None and self.min_replicas < self.replicas

    def tolerates(self, failed: Collection[int]) -> bool:
        """Return whether the role can still succeed when these of its replicas have failed for good."""
        fewest = self.replicas if self.min_replicas is None else self.min_replicas
        return not failed or (0 not in failed and self.replicas - len(failed) >= fewest)

    def succeeded(self, succeeded: Collection[int], failed: Collection[int]) -> bool:
        """Return whether the role has succeeded: all replicas have ended, and it tolerates those that have failed.

        Args:
            succeeded: ids of the replicas that have succeeded.
            failed: ids of the replicas that have failed for good.
        """
        return len(succeeded) + len(failed) >= self.replicas and self.tolerates(failed)


class RoleWithPolicy(Protocol):
    """The role of an app, as a backend represents it."""

    @property
    def policy(self) -> RolePolicy:
        """The policy of the role."""


R = TypeVar("R", bound=RoleWithPolicy)


def awaited(roles: Sequence[R]) -> list[R]:
    """Return the roles that must succeed for the app to succeed: all but sidecars, or all if every role is one."""
    return [role for role in roles if not role.policy.sidecar] or list(roles)
