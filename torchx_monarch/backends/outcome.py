# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Decides from the ends of its replicas how a role, and from the ends of its roles how an app has ended.

The rules, the same on all backends:

- An app has succeeded when every role has (``LocalScheduler.describe`` of torchx.schedulers.local_scheduler: RUNNING
  while a replica of any role lives, FAILED if one has failed, else SUCCEEDED). Roles that are marked as sidecars
  (``torchx_monarch.model.sidecars``) are not waited for: they are ended when all others have succeeded.
- A role has failed when one of its replicas has failed for good, with no retries left. A role with ``min_replicas``
  tolerates failed replicas, other than replica 0, while so many others run or have succeeded.
- An app has failed when a role has; a sidecar's failure counts until all others have succeeded.

Of the standard library alone: the supervisor and Slurm's batch step import this.
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
    """What of a role decides how it and its app end.

    Attributes:
        replicas: how many it has.
        min_replicas: how many of them it needs, replica 0 among them; None for all.
        sidecar: whether the app does not wait for it.
    """

    replicas: int
    min_replicas: int | None = None
    sidecar: bool = False

    @classmethod
    def of(cls, role: Role) -> RolePolicy:
        """The policy of a TorchX role."""
        return cls(role.num_replicas, role.min_replicas, is_sidecar(role))

    @property
    def elastic(self) -> bool:
        """Whether it tolerates any failed replica."""
        return self.min_replicas is not None and self.min_replicas < self.replicas

    def tolerates(self, failed: Collection[int]) -> bool:
        """Whether the role can still succeed when these of its replicas have failed for good."""
        fewest = self.replicas if self.min_replicas is None else self.min_replicas
        return not failed or (0 not in failed and self.replicas - len(failed) >= fewest)

    def succeeded(self, succeeded: Collection[int], failed: Collection[int]) -> bool:
        """Whether the role has succeeded: all of its replicas have ended, and it tolerates those that have failed."""
        return len(succeeded) + len(failed) >= self.replicas and self.tolerates(failed)


class HasPolicy(Protocol):
    """What a backend knows of a role."""

    @property
    def policy(self) -> RolePolicy:
        """The role's."""


R = TypeVar("R", bound=HasPolicy)


def awaited(roles: Sequence[R]) -> list[R]:
    """The roles that must have succeeded for the app to have; never none, for an app of sidecars waits for all."""
    return [role for role in roles if not role.policy.sidecar] or list(roles)
