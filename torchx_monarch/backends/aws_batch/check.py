# SPDX-License-Identifier: BSD-3-Clause
"""Check an app and its run options against the limits of AWS Batch: refuse it, or warn the user."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torchx.specs import AppDef

from torchx_monarch.backends.aws_batch.options import AWSBatchOpts
from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.model.role_spec import RetryPolicy, RoleSpec

_MOST_ROLES = 5
"""Most node ranges of one job."""

_log = logging.getLogger("torchx_monarch")


def check_options(options: AWSBatchOpts) -> None:
    """Check the values of the run options.

    Raises:
        UserError: a value is not allowed.
    """
    if options.job_type not in ("auto", "multinode", "container"):
        raise UserError(f"run option job_type is {options.job_type!r}; it is auto, multinode or container")
    if not 0 <= options.priority <= 9999:
        raise UserError(f"run option priority is {options.priority}; it is a number from 0 to 9999")
    if options.timeout is not None and options.timeout < 60:
        raise UserError(f"run option timeout is {options.timeout}; it is a number of seconds, 60 or more")
    if options.host_retries < 0:
        raise UserError(f"run option host_retries is {options.host_retries}; it is a number, 0 or more")
    if options.secret and not options.execution_role_arn:
        raise UserError("run option secret needs execution_role_arn, a role that may read secrets (GetSecretValue)")


def check_app(app: AppDef, roles: Sequence[RoleSpec], options: AWSBatchOpts) -> None:
    """Check that Batch can run an app and that its hosts can find each other; warn of roles that end with the first.

    Raises:
        UserError: Batch cannot run the app; the message says what is allowed.
    """
    if len(roles) > _MOST_ROLES:
        raise UserError(
            f"app {app.name!r} has {len(roles)} roles; a job of AWS Batch has at most {_MOST_ROLES} node ranges, one "
            "for each role"
        )
    replicas = sum(role.replicas for role in roles)
    if options.job_type == "container" and replicas != 1:
        raise UserError(f"run option job_type is container, which is for one replica; app {app.name!r} has {replicas}")
    for role in roles:
        if role.spares:
            raise UserError(
                f"role {role.name!r} has spare hosts, and a job of AWS Batch ends when it loses a node: leave them out"
            )
        _check_hosts(role, roles[0])
    _warn_of_unawaited(roles)


def _check_hosts(role: RoleSpec, main: RoleSpec) -> None:
    """Check that the hosts of a role can find each other and that Batch can implement the role's retry policy.

    Args:
        role: the role.
        main: the app's first role; its replica 0 is Batch's main node.
    """
    if not role.runs_hosts or role.replicas == 1:
        return
    if not main.runs_hosts:
        raise UserError(
            f"role {role.name!r} has {role.replicas} replicas that are to meet, and AWS Batch tells its nodes the "
            f"address of the first role's replica 0 alone, where no host of ours would run that knows of theirs: role "
            f"{main.name!r} has no torchrun or Python command. Make {role.name!r} the first role, or submit it as an "
            "app of its own"
        )
    if role.max_retries and role.retry_policy is RetryPolicy.REPLICA:
        raise UserError(
            f"role {role.name!r} has RetryPolicy.REPLICA, and AWS Batch replaces no single node: it starts a job again "
            "as a whole (RetryPolicy.APPLICATION)"
        )


def _warn_of_unawaited(roles: Sequence[RoleSpec]) -> None:
    """Warn of roles that Batch ends with the first role though they are not sidecars.

    Only host processes wait for another role. So these are the roles without hosts, or all if the first has no hosts.
    """
    main, *others = roles
    ended = [other.name for other in others if not (other.runs_hosts and main.runs_hosts) and not other.sidecar]
    if ended:
        _log.warning(
            "AWS Batch ends role %s when the first role, %s, has ended: only roles of torchrun or Python commands wait "
            "for each other. Mark what is to end so as a sidecar, or make it an app of its own "
            "(docs/reference/backends.md)",
            ", ".join(ended),
            main.name,
        )
