# SPDX-License-Identifier: BSD-3-Clause
"""Code for many hosts: ``python bench/distribute.py [--hosts N ...] [--size MB] [--rounds N]``.

Replica 0, the real one, has a process of its own and sends over mutual TLS. The other hosts are simulated in this one:
each asks replica 0 for code that does not compress and takes what that sends. Between two simulated hosts no bytes
move; it takes as long as ``--rate`` says. Replica 0 sends it to all hosts (``star``), or hosts pass it on (``tree``).
Columns, medians over the rounds:

    seconds   from the first connection until the last host has the code
    sent      to how many hosts replica 0 has sent it
    CPU       seconds of processor time of replica 0
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from rendezvous import NAME, free_port

from torchx_monarch.code_sync.code_store import CodeStore
from torchx_monarch.code_sync.scan import scan
from torchx_monarch.code_sync.upload import PIECE, pack
from torchx_monarch.controller.host_network import HostNetwork
from torchx_monarch.controller.rendezvous import Rendezvous
from torchx_monarch.host.code_distribution import HostCode
from torchx_monarch.model.host_spec import HostSpec
from torchx_monarch.system.processes import raise_file_limit
from torchx_monarch.transport import credentials, messages
from torchx_monarch.transport.connections import Address, Identity

_AT_ONCE = 256
"""Hosts that connect at a time: this process could not answer for more in time."""


def fill(store: CodeStore, folder: str, size: int) -> str:
    """Store a workspace of one file; return the hash of its tree."""
    root = Path(folder, "workspace")
    root.mkdir()
    (root / "data").write_bytes(os.urandom(size))
    tree = scan(str(root))
    with tempfile.TemporaryFile() as file:
        upload = store.new_upload("1", pack(str(root), tree, list(tree.contents), file))
        while piece := file.read(PIECE):
            upload.append(piece)
    store.add(tree.hash, [upload])
    return tree.hash


def serve(pipe: Connection, address: Address, identity: Identity, size: int, star: bool) -> None:
    """The process of replica 0: says which tree it has when it listens, and at the end its seconds of CPU."""
    raise_file_limit()
    asyncio.run(_serve(pipe, address, identity, size, star))


async def _serve(pipe: Connection, address: Address, identity: Identity, size: int, star: bool) -> None:
    network = HostNetwork(address, HostSpec(replicas=2), bind=NAME, identity=identity)
    rendezvous = Rendezvous(network)
    with tempfile.TemporaryDirectory() as folder:
        code = HostCode(os.path.join(folder, "code"), network)
        tree = fill(code._store, folder, size)
        network.handlers["code"] = code.serve_host if star else code.distribute
        await rendezvous.start()
        pipe.send(tree)
        cpu = time.process_time()
        await asyncio.to_thread(pipe.recv)
        pipe.send(time.process_time() - cpu)


async def hosts(network: HostNetwork, tree: str, count: int, seconds: float) -> int:
    """All other hosts; ``seconds`` is how long one takes to pass the code on. Return how many got it from replica 0."""
    connecting, sent = asyncio.Semaphore(_AT_ONCE), 0

    async def host(number: int) -> None:
        nonlocal sent
        greeting = {"type": "code", "tree": tree, "has": [], "address": f"unix:{number}"}
        answer = None
        while answer is None:  # a busy replica 0 closes connections whose handshake takes long
            async with connecting:
                reader, writer = await network.greet(network.rendezvous, greeting)
            answer = await messages.receive(reader)
        if "source" in answer:
            await asyncio.sleep(seconds)
        else:
            ((_, left),) = answer["uploads"]
            sent += 1
            while left:
                left -= len(await reader.readexactly(min(left, PIECE)))
        await messages.send(writer, {"type": "code", "received": True})
        writer.close()

    await asyncio.gather(*(host(number) for number in range(1, count)))
    return sent


def once(identity: Identity, count: int, size: int, seconds: float, star: bool) -> tuple[float, int, float]:
    """Bring the code to so many hosts; return the seconds, how many got it from replica 0, and its seconds of CPU."""
    address = Address("tls", NAME, free_port())
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, address, identity, size, star), daemon=True)
    process.start()
    theirs.close()
    try:
        tree = ours.recv()
        started = time.monotonic()
        sent = asyncio.run(hosts(HostNetwork(address, identity=identity), tree, count, seconds))
        taken = time.monotonic() - started
        ours.send(None)
        return taken, sent, ours.recv()
    finally:
        process.kill()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[10, 100], help="numbers of hosts (default: 10, 100)")
    parser.add_argument("--size", type=float, default=50.0, help="megabytes of code (default: 50)")
    parser.add_argument("--rate", type=float, default=1000.0, help="megabytes per second of a host (default: 1000)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--tree", action="store_true", help="leave out that replica 0 sends it to all hosts")
    args = parser.parse_args()
    raise_file_limit()
    authority, _ = credentials.create()
    print("hosts        seconds  sent    CPU")
    with tempfile.TemporaryDirectory() as folder:
        identity = Identity.from_credentials(authority, {NAME}, folder)
        for count in args.hosts:
            for name in ("tree",) if args.tree else ("star", "tree"):
                taken = [
                    once(identity, count, round(args.size * 1e6), 2 * args.size / args.rate, name == "star")
                    for _ in range(args.rounds)
                ]
                seconds, sent, cpu = (statistics.median(values) for values in zip(*taken, strict=True))
                print(f"{count:>5}  {name}  {seconds:>7.2f}  {sent:>4.0f}  {cpu:>5.2f}", flush=True)


if __name__ == "__main__":
    main()
