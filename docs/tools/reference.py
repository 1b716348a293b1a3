# SPDX-License-Identifier: BSD-3-Clause
"""Write the reference pages that follow from the code: ``python -m docs.tools.reference``.

Run options come from the backends' options, components from their signatures and docstrings, commands from the parsers
of ``torchx monarch``. A test fails where a page differs from the code.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torchx.schedulers.api import StructuredOpts

import components
from torchx_monarch.backends.aws_batch.request import AWSBatchOpts
from torchx_monarch.backends.batch.options import AccountOpts, BatchOpts
from torchx_monarch.backends.batch.pbs import PbsOpts
from torchx_monarch.backends.batch.sge import SgeOpts
from torchx_monarch.backends.core.options import AvoidOpts, MonarchOpts, NetworkOpts, run_options
from torchx_monarch.backends.docker.request import DockerOpts
from torchx_monarch.backends.kubernetes.request import KubernetesOpts
from torchx_monarch.backends.local.backend import LocalOpts
from torchx_monarch.backends.slurm.render import SlurmOpts
from torchx_monarch.backends.ssh.request import SshOpts
from torchx_monarch.cli import main

_Row = TypeVar("_Row", bound=tuple[str, ...])

FOLDER = Path(__file__).resolve().parents[1] / "reference"

_OPTIONS: dict[str, tuple[type[StructuredOpts], ...]] = {
    "Every backend": (MonarchOpts,),
    "Every backend but monarch_local": (NetworkOpts, MonarchOpts),
    "monarch_local": (LocalOpts, MonarchOpts),
    "monarch_docker": (DockerOpts, NetworkOpts),
    "monarch_htcondor and all other batch systems": (AccountOpts, NetworkOpts),
    "monarch_lsf, monarch_sge, monarch_pbs": (BatchOpts, AccountOpts),
    "monarch_slurm, monarch_lsf, monarch_sge, monarch_htcondor, monarch_ssh": (AvoidOpts,),
    "monarch_slurm": (SlurmOpts, AccountOpts, AvoidOpts),
    "monarch_pbs": (PbsOpts, BatchOpts),
    "monarch_sge": (SgeOpts, BatchOpts, AvoidOpts),
    "monarch_ssh": (SshOpts, NetworkOpts, AvoidOpts),
    "monarch_kubernetes": (KubernetesOpts, NetworkOpts),
    "monarch_aws_batch": (AWSBatchOpts, NetworkOpts),
}
"""Title of each table, its options, and the options that earlier tables have."""


def options_page() -> str:
    """Return the page of run options."""
    parts = [
        "# Run options",
        _paragraph(
            "Give them with `-cfg NAME=VALUE,NAME=VALUE`, in the scheduler's section of `.torchxconfig`, or as "
            "`scheduler_cfg` in Python: a list as `A;B`, a dictionary as `NAME:VALUE;NAME:VALUE`. `torchx runopts "
            "monarch_slurm` prints those of one backend. Unknown names are refused."
        ),
    ]
    for title, (kind, *bases) in _OPTIONS.items():
        known = {name for base in bases for name, _ in run_options(base)}
        rows = [
            (f"`{name}`{', required' if option.is_required else ''}", _meaning(option.help, option.default))
            for name, option in run_options(kind)
            if name not in known
        ]
        parts += [f"## {title}", _table(_OPTION, rows)]
    return _page(parts)


def components_page() -> str:
    """Return the page of components."""
    parts = [
        "# Components",
        _paragraph(
            "A component is what stands after `torchx run -s SCHEDULER`. Its options come before the program; what "
            "comes after the program belongs to the program. `torchx run monarch.spmd --help` prints the same."
        ),
    ]
    rows = {function: _options(function) for function in _functions()}
    shared = _shared(rows.values(), 3)
    parts += ["These options are the same for all components that have them:", _table(_OPTION, shared)]
    for function, of in rows.items():
        others = ", ".join(row[0] for row in of if row in shared)
        parts += [f"## monarch.{function.__name__}", _docstring(function)[0]]
        parts += [_table(_OPTION, [row for row in of if row not in shared]), f"Also: {others}."]
    return _page(parts)


_OPTION = ("option", "meaning")


def _options(component: Callable[..., Any]) -> list[tuple[str, str]]:
    """Return the rows of the options of a component."""
    meanings, rows = _docstring(component)[1], []
    for name, parameter in inspect.signature(component).parameters.items():
        option = f"`{'-' if len(name) == 1 else '--'}{name}`"
        if parameter.kind is parameter.VAR_POSITIONAL:
            option = "the program"
        # The default image is a tag of TorchX's, which changes with its release.
        rows.append((option, _meaning(meanings[name], None if name == "image" else parameter.default)))
    return rows


_EXAMPLES = {
    "doctor": "torchx monarch doctor -s monarch_slurm",
    "init": "torchx monarch init -s monarch_slurm",
    "ls": "torchx monarch ls -s monarch_slurm -n 10",
    "status": "torchx monarch status last --watch",
    "logs": "torchx monarch logs last --rank 0,2-3 --since 10m -f",
    "exec": "torchx monarch exec HANDLE -- torchrun --nproc-per-node 4 train.py --lr 0.1",
    "follow": "torchx monarch follow HANDLE 3",
    "ps": "torchx monarch ps HANDLE",
    "stop": "torchx monarch stop HANDLE --run 3",
    "wait": "torchx monarch wait train",
    "cancel": "torchx monarch cancel last",
    "delete": "torchx monarch delete train-x1y2z3",
    "prune": "torchx monarch prune --older 2d --larger 10G",
    "debug": "torchx monarch debug last --rank 1",
    "stacks": "torchx monarch stacks last --rank 3",
    "profile": "torchx monarch profile last --rank 3 --seconds 10",
    "explain": "torchx monarch explain last",
    "report": "torchx monarch report last -o job.html",
    "drill": "torchx monarch drill --faults rank,save -- monarch.spmd -j 2x2 train.py",
    "top": "torchx monarch top last --by-host",
    "metrics": "torchx monarch metrics last loss",
    "nodes": "torchx monarch nodes -s monarch_slurm",
    "compare": "torchx monarch compare train-x1y2z3 last",
    "mcp": "torchx monarch mcp",
    "web": "torchx monarch web --port 8080",
}
"""An example of each sub-command of ``torchx monarch``."""


def _shared(tables: Iterable[Sequence[_Row]], least: int) -> list[_Row]:
    """Return the rows that at least ``least`` tables have."""
    counted = Counter(row for table in tables for row in table)
    return [row for row, count in counted.items() if count >= least]


def commands_page() -> str:
    """Return the page of the sub-commands of ``torchx monarch``: first the arguments that several of them have."""
    names = main.SUB_COMMANDS
    rows = {name: _arguments(name) for name in names}
    shared = _shared(rows.values(), 3)
    parts = [
        "# Commands",
        _paragraph(
            "`torchx monarch` adds these to TorchX's `run`, `status`, `log`, `list`, `describe`, `cancel` and "
            "`delete`, which work for every job. `torchx monarch COMMAND --help` prints the same. [Exit codes]"
            "(exit_codes.md) are the same on all backends."
        ),
        "These arguments are the same for all commands that have them:",
        _table(_HEAD, shared),
    ]
    for name in names:
        own = [row for row in rows[name] if row not in shared]
        others = [re.sub(r"(--\w+) \w+`", r"\1`", row[0]) for row in rows[name] if row in shared]
        parts += [f"## torchx monarch {name}", f"{_text(names[name])[:1].upper()}{_text(names[name])[1:]}."]
        parts += [f"    {_EXAMPLES[name]}"]
        parts += [_table(_HEAD, own)] if own else []
        parts += [f"{'Also' if own else 'Arguments'}: {', '.join(others)}."] if others else []
    return _page(parts)


_HEAD = ("argument", "meaning")


def _arguments(command: str) -> list[tuple[str, str]]:
    """Return the rows of the arguments of a command."""
    parser = argparse.ArgumentParser(add_help=False)
    main.add_arguments(command, parser)
    rows = []
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            default = action.default if action.option_strings and action.nargs != 0 else None
            meaning = _meaning(action.help, default)
            meaning = meaning.replace("(documentation: JSON of torchx monarch)", "([fields](json.md))")
            rows.append((_argument(action), meaning))
    return rows


PAGES: dict[str, Callable[[], str]] = {
    "options.md": options_page,
    "components.md": components_page,
    "commands.md": commands_page,
}
"""The generated pages of docs/reference."""


def _functions() -> list[Callable[..., Any]]:
    """Return the components in the order of the source."""
    own = [
        one for one in vars(components).values() if inspect.isfunction(one) and one.__module__ == components.__name__
    ]
    return sorted(own, key=lambda one: one.__code__.co_firstlineno)


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the text of a component's docstring, and the meaning of each argument."""
    summary, _, arguments = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    meanings = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE))
    return summary.strip().replace("``", "`"), meanings


def _argument(action: argparse.Action) -> str:
    """Return an argument of a command as it is typed."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    if not action.option_strings:
        return f"`[{value}]`" if action.nargs in ("?", "*") else f"`{value}`"
    value = f" [{value}]" if action.nargs == "?" else f" {value}"
    return f"`{', '.join(action.option_strings)}{'' if action.nargs == 0 else value}`"


def _text(value: str | None) -> str:
    """Return a text as it stands in a cell of a table."""
    return " ".join((value or "").replace("``", "`").split()).replace("|", "\\|").replace("<", "&lt;")


def _meaning(value: str | None, default: object) -> str:
    """Return the meaning of an option, with its default unless that is off or empty, or the text says it."""
    text, shown = _text(value), "" if default is False else _value(default)
    return f"{text} (default: {shown})" if shown and "(default" not in text else text


def _value(default: object) -> str:
    """Return a default as it stands in a cell; empty where there is none."""
    return "" if default in (None, "", inspect.Parameter.empty) or default == [] else f"`{default}`"


def _paragraph(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([first, f"|{'---|' * len(head)}", *others])


def _page(parts: Sequence[str]) -> str:
    note = f"<!-- Written by `{__name__}` from the code. Change the code, then run `make docs-pages`. -->"
    return "\n\n".join([*parts, note.replace("__main__", "docs.tools.reference")]) + "\n"


if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
