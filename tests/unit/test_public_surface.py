# SPDX-License-Identifier: BSD-3-Clause
"""Nothing public goes without a deprecation: names are compared with ``public_surface.txt``, which this module writes.

``python -m tests.unit.test_public_surface`` records what is there. What goes is named in CHANGELOG.md, after a release
in which it has warned (docs/reference/versions.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torchx_monarch
from torchx_monarch import schedulers
from torchx_monarch.cli.main import SUB_COMMANDS, add_arguments
from torchx_monarch.components import controller, ft, hosts, spmd
from torchx_monarch.schedulers.job_status import JobStatus

RECORD = Path(__file__).with_name("public_surface.txt")
COMPONENTS: dict[str, Callable[..., Any]] = {
    "monarch.spmd": spmd,
    "monarch.hosts": hosts,
    "monarch.controller": controller,
    "monarch.ft": ft,
}


def surface() -> list[str]:
    """Return a line for each public name."""
    return sorted({*_python(), *_commands(), *_options(), *_components(), *_json()})


def _python() -> Iterator[str]:
    for name in torchx_monarch.__all__:
        public = getattr(torchx_monarch, name)
        yield f"python {name}"
        if inspect.isclass(public) and public.__module__.startswith("torchx_monarch"):
            own = {
                member
                for base in public.__mro__
                if base.__module__.startswith("torchx_monarch")
                for member in vars(base)
            }
            own |= {field.name for field in dataclasses.fields(public)} if dataclasses.is_dataclass(public) else set()
            yield from (f"python {name}.{member}" for member in own if not member.startswith("_"))
        elif inspect.isfunction(public):
            yield from (f"python {name}({parameter})" for parameter in inspect.signature(public).parameters)


def _commands() -> Iterator[str]:
    for name in SUB_COMMANDS:
        parser = argparse.ArgumentParser(add_help=False)
        add_arguments(name, parser)
        yield f"command {name}"
        for action in parser._actions:
            words = action.option_strings if action.help != argparse.SUPPRESS else ()
            yield from (f"command {name} {word}" for word in words)


def _options() -> Iterator[str]:
    for name in schedulers.NAMES:
        yield f"scheduler {name}"
        yield from (f"scheduler {name} {option}" for option, _ in getattr(schedulers, name)("torchx").run_opts())


def _components() -> Iterator[str]:
    for name, component in COMPONENTS.items():
        yield from (f"component {name} {parameter}" for parameter in inspect.signature(component).parameters)


def _json() -> Iterator[str]:
    yield from (f"json status {field.name}" for field in dataclasses.fields(JobStatus))


def test_nothing_public_goes_without_a_word() -> None:
    recorded, found = RECORD.read_text().splitlines(), surface()
    gone = sorted({*recorded} - {*found})
    assert not gone, f"public, and gone: {gone}. Deprecate it first: docs/reference/versions.md"
    new = sorted({*found} - {*recorded})
    assert not new, f"public from now on: {new}. Record it: python -m tests.unit.test_public_surface"


if __name__ == "__main__":
    RECORD.write_text("".join(f"{line}\n" for line in surface()))
    print(f"{len(surface())} names in {RECORD}", file=sys.stderr)
