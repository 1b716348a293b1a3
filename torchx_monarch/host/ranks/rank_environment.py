# SPDX-License-Identifier: BSD-3-Clause
"""Build the environment variables of a rank: torchelastic's, from the world of an attempt.

Names and values follow ``LocalElasticAgent._start_workers`` of torch 2.13
(``torch/distributed/elastic/agent/server/local_elastic_agent.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

from torchx_monarch.command.command import CommandError, TorchrunOptions
from torchx_monarch.model.env_names import is_for_hosts, keep_monarch_log_private
from torchx_monarch.model.world import World


def env_number(environ: Mapping[str, str], variable: str, default: float) -> float:
    """Return an environment variable as a number of 0 or more.

    Args:
        environ: the environment.
        variable: name of the variable.
        default: returned if the variable is not set.

    Raises:
        CommandError: the value is not such a number.
    """
    text = environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise CommandError(f"{variable}={text!r} is not a number of 0 or more")
    return value


INTERFACE = "GLOO_SOCKET_IFNAME"
"""The variable that names the network interface for ranks' connections by Gloo."""


def interpreter_environment(host: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """Return the environment with which a rank's interpreter starts, before its rank is known.

    OMP_NUM_THREADS must be set before torch is imported. torchrun sets it to 1 when it starts several ranks and the
    user has not set it.

    Args:
        host: environment of the host process.
        local_world_size: number of ranks on this host.
    """
    env = {name: value for name, value in host.items() if not is_for_hosts(name)}
    keep_monarch_log_private(env)
    if local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def rank_environment(
    world: World, options: TorchrunOptions, replica: int, local_rank: int, base: Mapping[str, str], error_file: str
) -> dict[str, str]:
    """Return the variables to add to ``base`` for one rank.

    Args:
        world: the ranks of the attempt.
        options: options of the torchrun command.
        replica: id of the host's replica.
        local_rank: local rank on that host.
        base: environment of the role.
        error_file: path of the rank's error file; empty for none.

    Raises:
        ValueError: with ``--virtual-local-rank`` there are fewer visible devices than ranks, as in torchrun.
    """
    rank = world.first_rank(replica) + local_rank
    env = {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(world.group_rank(replica)),
        "ROLE_RANK": str(rank),
        "ROLE_NAME": options.role,
        "WORLD_SIZE": str(world.size),
        "LOCAL_WORLD_SIZE": str(world.local_world_sizes[world.group_rank(replica)]),
        "GROUP_WORLD_SIZE": str(len(world.local_world_sizes)),
        "ROLE_WORLD_SIZE": str(world.size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(world.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": world.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(world.agent_store),
        "TORCHELASTIC_ERROR_FILE": error_file,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if options.virtual_local_rank:
        # ROCm ignores CUDA_VISIBLE_DEVICES if HIP_VISIBLE_DEVICES is set, which torchrun observes since torch 2.15.
        names = [name for name in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES") if name in base]
        device = str(local_rank)
        if names:
            devices = base[names[0]].split(",")
            if local_rank >= len(devices):
                raise ValueError(f"local rank {local_rank} has no device of its own in {names[0]}={base[names[0]]}")
            device = devices[local_rank].strip()
        env.update({"LOCAL_RANK": "0", **dict.fromkeys([*names, "CUDA_VISIBLE_DEVICES"], device)})
    return env
