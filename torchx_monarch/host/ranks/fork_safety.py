# SPDX-License-Identifier: BSD-3-Clause
"""Find out what forbids that ranks are forks of an interpreter: what a fork does not get, or must not share. Find the
random generators that must be seeded anew in each fork.

``zygote_main`` runs this file: it imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

_SIGNALS = 0x7FFFFFFF
"""The bits of signals that programs use: glibc has two of its own, 32 and 33."""


class Resources:
    """The threads, open descriptors, children and shared memory of this process at present."""

    def __init__(self, fork: Callable[[], int]) -> None:
        self._fork = fork
        self._threads = set(os.listdir("/proc/self/task"))
        self._descriptors = _descriptors()
        self._children = children()
        with open("/proc/self/status") as file:  # of signals, as C libraries set them, too
            self._handlers = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt:")) & _SIGNALS
        with open("/proc/self/maps") as file:  # writable memory that forks share with this process
            self._shared = {line.split(None, 5)[-1].strip() for line in file if " rw-s " in line}

    def tracer(self) -> str:
        """Return why a tracer or profiler, which would count the ranks as one process, forbids forks; else empty."""
        traced = sys.gettrace() or sys.getprofile() or threading.gettrace() or threading.getprofile()
        monitoring = getattr(sys, "monitoring", None)
        if traced or (monitoring and any(monitoring.get_tool(number) for number in range(6))):
            return "a tracer or profiler is active in their interpreter"
        return ""

    def what_is_new(self, module: str, places: Mapping[str, str] | None = None) -> str:
        """Return what the import of a module has added that forbids forks; empty if nothing.

        ``places`` are the modules and lines that have made threads or opened files, by their names.
        """
        found, now = places or {}, Resources(self._fork)
        if why := now.tracer():
            return f"{why} since the import of {module}"
        if named := [running.name for running in threading.enumerate() if running is not threading.main_thread()]:
            return f"{found.get(named[0], module)} runs a thread ({named[0]})"
        if now._threads > self._threads:
            # numpy's OpenBLAS, for one, ends its threads before every fork and starts them again when it needs them.
            if (copy := self._fork()) == 0:
                os._exit(0)
            os.waitpid(copy, 0)
            now._threads &= set(os.listdir("/proc/self/task"))
        for thread in now._threads - self._threads:
            # jemalloc, which pyarrow has, goes on without its thread in a fork (background_thread_postfork_child).
            if (name := _read(f"/proc/self/task/{thread}/comm")) != "jemalloc_bg_thd":
                return f"{module} runs a thread ({name})"
        for number in now._descriptors.keys() - self._descriptors.keys():
            path = now._descriptors[number]
            return f"{found.get(path, module)} keeps {path} open"
        for child in now._children - self._children:
            return f"{module} runs a process ({_read(f'/proc/{child}/comm')})"
        if now._handlers & ~self._handlers:
            return f"{module} sets a signal handler"
        for path in now._shared - self._shared:
            return f"{module} makes memory that processes share ({path})"  # a lock of multiprocessing, for one
        return ""


class Generators:
    """Watch how random generators are seeded while modules are imported, until ``stop``.

    One with a seed of the system's has another in each interpreter. If a module gives a seed to the generators that all
    modules share, the program has that seed once it has imported the module, and ranks cannot be forks: ``random`` has
    another seed after a fork.
    """

    def __init__(self) -> None:
        self._made = weakref.WeakSet[random.Random]()
        self._drawn = set[str]()
        self._seeded = False
        self._original = original = (random.Random.seed, random.seed, vars(random)["_urandom"])

        def seed(generator: random.Random, a: Any = None, version: int = 2) -> None:
            original[0](generator, a, version)
            self._seeded |= a is not None and generator is vars(random)["_inst"]
            (self._made.add if a is None else self._made.discard)(generator)

        def urandom(size: int) -> Any:
            data = original[2](size)
            self._drawn.add(str(int.from_bytes(data, "big")))  # the entropy of a SeedSequence of numpy's
            return data

        _set_functions(seed, types.MethodType(seed, vars(random)["_inst"]), urandom)

    def seeded_by(self, module: str) -> str:
        """Return that the import of a module has seeded or used those of ``random``, numpy or torch; else empty."""
        torch, numpy = sys.modules.get("torch.random"), sys.modules.get("numpy.random")
        # Of the system's seeds of 64 bits, one in four thousand millions is so small.
        seeded = self._seeded or (torch and torch.initial_seed() < 1 << 32)
        if torch and not seeded:
            unused = torch.torch.Generator().manual_seed(torch.initial_seed())
            seeded = not unused.get_state().equal(torch.get_rng_state())
        with contextlib.suppress(AttributeError):  # of another numpy
            if numpy and not seeded:
                generator = numpy.mtrand._rand._bit_generator
                seeded = repr(generator.state) != repr(type(generator)(generator._seed_seq).state)
        return f"{module} seeds or uses a random generator" if seeded else ""

    def is_renewed(self, source: object) -> bool:
        """Return whether a generator has a seed of the system's, and so another one in each fork."""
        if issubclass(type(source), random.Random):
            return source in self._made
        if not issubclass(type(source), _numpy_sources()):  # others may do anything when they are asked
            return False
        # An entropy that a module gives may be a list.
        return str(getattr(getattr(source, "_seed_seq", source), "entropy", "")) in self._drawn

    def stop(self) -> Callable[[], None]:
        """End the watch; return a function for forks that seeds the generators anew that have seeds of the system's."""
        _set_functions(*self._original)
        made, sources = list(self._made), _numpy_sources()
        found = [source for source in gc.get_objects() if issubclass(type(source), sources)] if sources else []
        found = [source for source in found if self.is_renewed(source)]

        def renew() -> None:
            for generator in made:
                random.Random.seed(generator)
            for source in found:
                source.__init__()

        return renew


def _numpy_sources() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy.random")
    return (numpy.BitGenerator, numpy.SeedSequence) if numpy else ()


def _set_functions(seed: Any, global_seed: Any, urandom: Any) -> None:
    vars(random).update(seed=global_seed, _urandom=urandom)
    setattr(random.Random, "seed", seed)  # noqa: B010


def _descriptors() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return {number: path for number, path in found.items() if path not in ("/dev/null", "/dev/urandom", "/dev/random")}


def children() -> set[str]:
    return set(_read(f"/proc/self/task/{os.getpid()}/children").split())


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(path) as file:
        return file.read().strip()
    return ""
