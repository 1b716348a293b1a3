# SPDX-License-Identifier: BSD-3-Clause
"""The master endpoint: what of torchrun's options it follows, and what cannot be served."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
from unittest import mock

import pytest

from tests.ports import free_port
from torchx_monarch.command.command import CommandError, check, parse
from torchx_monarch.command.torchrun_options import parse_options
from torchx_monarch.host.ranks.master_store import MasterEndpoint, MasterStore
from torchx_monarch.model.world import LaunchError

COMMANDS = [
    [],
    ["--standalone", "--master-port", "1"],
    ["--master-port", "29500"],
    ["--master-port", "0"],
    ["--master-addr", "node0", "--master-port", "29500"],
    ["--master-addr", "node0"],
    ["--rdzv-backend", "c10d", "--rdzv-endpoint", "node0:29500", "--master-port", "1"],
    ["--rdzv-endpoint", "node0:29500", "--master-port", "1"],
    ["--rdzv-backend", "static", "--rdzv-endpoint", "[::1]:29500"],
    ["--rdzv-endpoint", " node0:29500 "],
    ["--rdzv-endpoint", "node0"],
    ["--rdzv-endpoint", "node0:x"],
    ["--rdzv-endpoint", "node0:65536"],
    ["--rdzv-endpoint", "a b:1"],
    ["--rdzv-endpoint", ":1"],
    ["--nnodes", "2"],
    ["--nnodes", "2", "--master-addr", "node0"],
    ["--nnodes", "2", "--master-addr", "node0", "--master-port", "29500"],
]


def torch_endpoint(arguments: list[str]) -> tuple[str, int] | None:
    """What torchrun's own ``run`` gives to its static rendezvous; its default port counts as none."""
    import torch.distributed.run  # not above: each of pytest's processes collects all tests

    args = torch.distributed.run.parse_args([*arguments, "train.py"])
    given = args.master_port
    with (
        mock.patch("torch.distributed.run.config_from_args", side_effect=_Stop),
        contextlib.suppress(_Stop),
    ):
        torch.distributed.run.run(args)
    return _static(args, given)


class _Stop(Exception):
    pass


def _static(args: argparse.Namespace, given: int | None) -> tuple[str, int] | None:
    import torch.distributed.run
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    if args.rdzv_backend != "static":
        return None
    host, port = parse_rendezvous_endpoint(torch.distributed.run.get_rdzv_endpoint(args), -1)
    if port == -1:
        raise ValueError("port is missing")  # as _get_addr_and_port of torch.distributed.launcher.api does
    return host, port if args.rdzv_endpoint or given is not None else 0


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_the_static_endpoint_is_torchruns(arguments: list[str]) -> None:
    try:
        theirs = torch_endpoint(arguments)
    except ValueError:
        with pytest.raises(ValueError, match="use HOST:PORT"):
            _ = parse_options([*arguments, "train.py"], {})[0].static_endpoint
        return
    assert parse_options([*arguments, "train.py"], {})[0].static_endpoint == theirs


def test_a_static_endpoint_without_a_port_is_refused() -> None:
    command = parse(["torchrun", "--rdzv-endpoint", "node0", "train.py"])
    assert command is not None
    with pytest.raises(CommandError, match=r"--rdzv-endpoint=node0 of the static rendezvous: use HOST:PORT"):
        check(command, replicas=1, role="trainer")


def endpoint_of(*arguments: str, advertised: str = "127.0.0.1", bind: str = "127.0.0.1", hosts: int = 1) -> object:
    options, *_ = parse_options([*arguments, "train.py"], {})
    return asyncio.run(MasterEndpoint.create(options, bind, advertised, hosts))


def test_without_a_word_of_the_user_it_is_the_meshs() -> None:
    assert endpoint_of() == MasterEndpoint("127.0.0.1", 0, "127.0.0.1")
    assert endpoint_of(advertised="node3", bind="") == MasterEndpoint("node3", 0, "")


def test_on_one_machine_address_and_port_are_the_users() -> None:
    named = ("--master-addr=localhost", "--master-port=29500")
    expected = MasterEndpoint("localhost", 29500, "127.0.0.1", "--master-addr=localhost")
    assert endpoint_of(*named) == endpoint_of(*named, hosts=2) == expected
    assert endpoint_of(*named, advertised="node3", bind="") == expected


def test_on_one_machine_the_local_address_is_where_the_ranks_meet() -> None:
    expected = MasterEndpoint("127.0.0.2", 0, "127.0.0.2", "--local-addr=127.0.0.2")
    assert endpoint_of("--local-addr=127.0.0.2") == endpoint_of("--local-addr=127.0.0.2", hosts=2) == expected
    named = ("--local-addr=127.0.0.2", "--master-port=29500")  # a static rendezvous, as under torchrun
    assert endpoint_of(*named) == MasterEndpoint("127.0.0.1", 29500, "127.0.0.1", "--master-addr=127.0.0.1")


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("address", ["node0", "node3"])
def test_on_several_machines_it_is_the_address_of_the_mesh(address: str, hosts: int) -> None:
    found = endpoint_of("--local-addr", address, advertised="node3", bind="", hosts=hosts)
    assert found == MasterEndpoint("node3", 0, "")


@pytest.mark.parametrize("address", ["node0", "node3", "127.0.0.1"])
def test_on_several_machines_the_port_is_the_users(address: str) -> None:
    words = ("--nnodes=2", "--master-addr", address, "--master-port=29500")
    found = endpoint_of(*words, advertised="node3", bind="", hosts=2)
    assert found == MasterEndpoint("node3", 29500, "")


@pytest.mark.parametrize("words", ["--master-addr={} --master-port=29500", "--local-addr={}"])
def test_an_address_that_cannot_be_resolved_or_is_another_machines(words: str) -> None:
    option = words.split("=")[0]
    with pytest.raises(LaunchError, match=rf"{option}=no\.such\.invalid cannot be resolved: "):
        endpoint_of(*words.format("no.such.invalid").split())
    endpoint = endpoint_of(*words.format("192.0.2.1").split())
    assert isinstance(endpoint, MasterEndpoint)
    with pytest.raises(LaunchError, match=rf"{option}=192\.0\.2\.1 is no address of this host"):
        asyncio.run(_open(endpoint))


def test_a_port_is_held_for_the_programs_own_store() -> None:
    port = free_port()
    assert asyncio.run(_open(MasterEndpoint("localhost", port, "127.0.0.1"))) == (port, False)


def test_a_port_whose_store_has_not_begun_accepts_connections() -> None:
    async def main() -> None:
        store = MasterStore(print)
        port, served = await store.open(MasterEndpoint("127.0.0.1", 0, "127.0.0.1"), serves=True)
        assert served and store.current is not None and (store.current.port, store.current.pid) == (port, 0)
        socket.create_connection(("127.0.0.1", port)).close()
        store.close()
        assert store.current is None
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))

    asyncio.run(main())


async def _open(endpoint: MasterEndpoint) -> tuple[int, bool]:
    store = MasterStore(print)
    try:
        return await store.open(endpoint, serves=False)
    finally:
        store.close()
