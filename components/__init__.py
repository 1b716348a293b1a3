# SPDX-License-Identifier: BSD-3-Clause
"""The components of torchx-monarch, for ``torchx run -s monarch_... monarch.COMPONENT``.

``spmd`` returns a plain torchrun app, which any TorchX scheduler can run; the ``monarch_*`` schedulers run it on a
Monarch mesh. TorchX lints and lists every function defined here, so helpers live in ``torchx_monarch.command.spmd``. It
reads annotations as they are, so they are not postponed and use ``Optional``, ``Dict`` and ``List``.
"""

from typing import Dict, List, Optional

import torchx
from torchx import specs

from torchx_monarch.command import allocations
from torchx_monarch.command import spmd as plan
from torchx_monarch.command.command import HOSTS_MODULE
from torchx_monarch.model.role_spec import METADATA_KEY, MIN_GROUPS


def spmd(
    *script_args: str,
    m: Optional[str] = None,
    script: Optional[str] = None,
    nproc: Optional[str] = None,
    nnodes: Optional[str] = None,
    j: Optional[str] = None,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    env: Optional[Dict[str, str]] = None,
    metadata: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_restarts: int = 0,
    max_retries: int = 0,
    tee: str = "3",
    log_dir: Optional[str] = None,
    torchrun: str = "",
    debug: bool = False,
) -> specs.AppDef:
    """Run a torchrun program, one process per rank: ``monarch.spmd --nproc 4 train.py --lr 0.1``.

    Options come before the script or module; everything after it belongs to it. torchrun's options can be typed as they
    are, such as --nproc-per-node 4 --master-port 29500. Where dist.torchrun has an option of the same name, it means
    the same.

    Args:
        script_args: the script and its arguments (only arguments when -m or --script names the program)
        m: module to run instead of a script, as `python -m` does
        script: script to run (default: the first argument that is not an option)
        nproc: processes per node: a number, or auto, gpu, cpu, xpu (default: that of -j, or 2)
        nnodes: number of nodes (default: that of -j, or 1)
        j: nodes and processes per node, [NNODES[+SPARES]x]NPROC; with -h a bare number is nodes, one process per GPU
        name: {experiment}/{run}, {experiment}/, /{run} or {run} of the app (default run: the program's name)
        image: container image, or directory, in which the job runs
        h: a registered named resource (takes precedence over cpu, gpu, memMB)
        cpu: cpus per node
        gpu: gpus per node
        memMB: memory per node in MB
        env: environment variables for the job (A=1,B=2)
        metadata: metadata for the scheduler (A=1,B=2)
        mounts: mounts (type=bind,src=/host,dst=/job[,readonly])
        max_restarts: how often the ranks are restarted on the same nodes after a failure
        max_retries: how often the scheduler may restart a failed job
        tee: streams shown and also written to files: 0 none, 1 stdout, 2 stderr, 3 both; or LOCAL_RANK:STREAMS,...
        log_dir: directory on the nodes for the log files of each rank
        torchrun: further options of torchrun ('--redirects 3 --master-port 29500')
        debug: set the environment variables for debug output of CUDA, NCCL and torch.distributed
    """
    program = plan.parse_program(spmd, script_args, m, script)
    resource = plan.resource(h, cpu, gpu, memMB)
    shape = plan.Shape.parse(j, nnodes, nproc, h)
    plan.require_counts(max_restarts=max_restarts, max_retries=max_retries)
    role = plan.role_name(program)
    app_name, tracking = plan.names(program, name)
    return specs.AppDef(
        name=app_name,
        roles=[
            specs.Role(
                name=role,
                image=image,
                min_replicas=shape.min_replicas,
                entrypoint="torchrun",
                args=plan.torchrun_args(program, role, shape, tee, max_restarts, log_dir, torchrun),
                env={**(env or {}), **tracking, **(plan.DEBUG_ENV if debug else {})},
                num_replicas=shape.replicas,
                max_retries=max_retries,
                resource=resource,
                mounts=plan.mounts(mounts),
                metadata=shape.role_metadata,
            )
        ],
        metadata=dict(metadata or {}),
    )


def ft(
    *script_args: str,
    m: Optional[str] = None,
    script: Optional[str] = None,
    j: str = "2x1",
    group_hosts: int = 1,
    min_groups: int = 1,
    lighthouse: Optional[str] = None,
    heartbeat_timeout_ms: int = 5000,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    env: Optional[Dict[str, str]] = None,
    metadata: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_restarts: int = 10,
    max_retries: int = 0,
    tee: str = "3",
    log_dir: Optional[str] = None,
) -> specs.AppDef:
    """Run a torchft program in groups that restart one by one: ``monarch.ft -j 4x8 train.py``.

    Each group is a world of its own (RANK, WORLD_SIZE); REPLICA_GROUP_ID and NUM_REPLICA_GROUPS tell a rank its group.
    torchft's lighthouse runs beside them, at TORCHFT_LIGHTHOUSE.

    Args:
        script_args: the script and its arguments (only arguments when -m or --script names the program)
        m: module to run instead of a script, as `python -m` does
        script: script to run (default: the first argument that is not an option)
        j: groups and processes per node, GROUPSxNPROC
        group_hosts: nodes of each group
        min_groups: the job fails when fewer groups than this can go on
        lighthouse: address of a lighthouse of yours, http://HOST:PORT (default: one is started)
        heartbeat_timeout_ms: milliseconds of a lost group's silence until the others go on without it
        name: {experiment}/{run}, {experiment}/, /{run} or {run} of the app (default run: the program's name)
        image: container image, or directory, in which the job runs
        h: a registered named resource of each node (takes precedence over cpu, gpu, memMB)
        cpu: cpus per node
        gpu: gpus per node
        memMB: memory per node in MB
        env: environment variables for the job (A=1,B=2)
        metadata: metadata for the scheduler (A=1,B=2)
        mounts: mounts (type=bind,src=/host,dst=/job[,readonly])
        max_restarts: how often the ranks of a group are restarted on the same nodes
        max_retries: how often each lost node is replaced
        tee: streams shown and also written to files: 0 none, 1 stdout, 2 stderr, 3 both; or LOCAL_RANK:STREAMS,...
        log_dir: directory on the nodes for the log files of each rank
    """
    program = plan.parse_program(ft, script_args, m, script)
    resource = plan.resource(h, cpu, gpu, memMB)
    count, shape = plan.groups(j, group_hosts, min_groups, h)
    plan.require_counts(max_restarts=max_restarts, max_retries=max_retries)
    app_name, tracking = plan.names(program, name)
    address, beside = plan.lighthouse(lighthouse, min_groups, heartbeat_timeout_ms, image)
    groups = [
        specs.Role(
            name=f"group{group}",
            image=image,
            entrypoint="torchrun",
            args=plan.torchrun_args(program, f"group{group}", shape, tee, max_restarts, log_dir),
            env={
                "REPLICA_GROUP_ID": str(group),
                "NUM_REPLICA_GROUPS": str(count),
                "TORCHFT_LIGHTHOUSE": address,
                **(env or {}),
                **tracking,
            },
            num_replicas=shape.replicas,
            max_retries=max_retries,
            retry_policy=specs.RetryPolicy.REPLICA,
            resource=resource,
            mounts=plan.mounts(mounts),
            metadata={METADATA_KEY: {MIN_GROUPS: min_groups}},
        )
        for group in range(count)
    ]
    return specs.AppDef(
        name=app_name,
        roles=[*groups, *filter(None, [beside])],
        metadata=dict(metadata or {}),
    )


def hosts(
    j: str = "1x1",
    name: str = "hosts",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    env: Optional[Dict[str, str]] = None,
    metadata: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    idle_timeout: int = 1800,
) -> specs.AppDef:
    """Allocate hosts that wait for runs: `torchx monarch exec HANDLE -- torchrun --nproc-per-node 4 train.py`.

    The hosts end after idle_timeout seconds without a run, or with `torchx monarch stop HANDLE`.

    Args:
        j: [NNODES[+SPARES]x]NPROC: nodes, spare nodes, and interpreters to keep ready on each node (0 for none)
        name: name of the app
        image: container image, or directory, in which the hosts run
        h: a registered named resource (takes precedence over cpu, gpu, memMB)
        cpu: cpus per node
        gpu: gpus per node
        memMB: memory per node in MB
        env: environment variables for the hosts and all of their runs (A=1,B=2)
        metadata: metadata for the scheduler (A=1,B=2)
        mounts: mounts (type=bind,src=/host,dst=/job[,readonly])
        max_retries: how often a lost host is replaced while the others wait
        idle_timeout: seconds without a run after which the hosts end (0: never)
    """
    shape = plan.hosts(j, h)
    plan.require_counts(max_retries=max_retries, idle_timeout=idle_timeout)
    return specs.AppDef(
        name=plan.app_name(name, "hosts"),
        roles=[
            specs.Role(
                name="hosts",
                image=image,
                entrypoint="python",
                args=["-m", HOSTS_MODULE, "--idle-timeout", str(idle_timeout), "--nproc", shape.nproc],
                env=dict(env or {}),
                num_replicas=shape.replicas,
                max_retries=max_retries,
                retry_policy=specs.RetryPolicy.REPLICA if max_retries else specs.RetryPolicy.APPLICATION,
                resource=plan.resource(h, cpu, gpu, memMB),
                mounts=plan.mounts(mounts),
                metadata=shape.role_metadata,
            )
        ],
        metadata=dict(metadata or {}),
    )


def controller(
    *script_args: str,
    m: Optional[str] = None,
    script: Optional[str] = None,
    meshes: Optional[Dict[str, str]] = None,
    name: str = "/",
    image: str = torchx.IMAGE,
    h: Optional[str] = None,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,
    env: Optional[Dict[str, str]] = None,
    metadata: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> specs.AppDef:
    """Run a Monarch program that controls meshes of hosts: ``monarch.controller --meshes trainers=2 main.py --lr 0.1``.

    The script runs once, on host 0 of the first mesh. ``torchx_monarch.this_job().state().trainers`` is the HostMesh.
    The job ends with the script and its exit code. Needs a monarch_* scheduler (monarch_local, monarch_slurm, ...).

    Args:
        script_args: the script and its arguments (only arguments when -m or --script names the program)
        m: module to run instead of a script, as `python -m` does
        script: script to run (default: the first argument that is not an option)
        meshes: number of hosts of each mesh: NAME=N,NAME=N (default: hosts=1)
        name: {experiment}/{run}, {experiment}/, /{run} or {run} of the app (default run: the program's name)
        image: container image, or directory, in which the job runs
        h: a registered named resource of each host (takes precedence over cpu, gpu, memMB)
        cpu: cpus per host
        gpu: gpus per host
        memMB: memory per host in MB
        env: environment variables for the job (A=1,B=2)
        metadata: metadata for the scheduler (A=1,B=2)
        mounts: mounts (type=bind,src=/host,dst=/job[,readonly])
        max_retries: how often the scheduler may restart a failed job
    """
    program = plan.parse_program(controller, script_args, m, script)
    resource = plan.resource(h, cpu, gpu, memMB)
    plan.require_counts(max_retries=max_retries)
    app_name, tracking = plan.names(program, name)
    app = specs.AppDef(
        name=app_name,
        roles=[
            specs.Role(
                name=mesh,
                image=image,
                entrypoint="python",
                env={**(env or {}), **tracking},
                num_replicas=hosts,
                max_retries=max_retries,
                resource=resource,
                mounts=plan.mounts(mounts),
            )
            for mesh, hosts in plan.mesh_sizes(meshes or {"hosts": "1"}).items()
        ],
        metadata=dict(metadata or {}),
    )
    return allocations.hold_for_clients(app, 0.0, ("python", *plan.program_words(program)))
