# SPDX-License-Identifier: BSD-3-Clause
"""The option table against the torchrun that is installed.

torch is imported when a test runs: each of pytest's processes collects all tests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from collections.abc import Iterator, Mapping
from importlib import metadata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from torchx_monarch.command.torchrun_options import (
    DEFAULTS,
    OPTIONS,
    UNEXPANDED,
    HelpRequested,
    Option,
    RendezvousConf,
    Streams,
    TorchrunOptions,
    parse_options,
    unused_options,
)
from torchx_monarch.model.world import CommandError


@pytest.fixture(autouse=True)
def _no_torchrun_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)


def torch_parser() -> argparse.ArgumentParser:
    """torchrun's own parser."""
    from torch.distributed.run import get_args_parser

    return get_args_parser()


def torch_streams(text: str, ranks: int) -> object:
    """The streams of each rank, as torchrun reads ``--redirects`` and ``--tee``."""
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.elastic.multiprocessing.api import to_map

    return to_map(Std.from_str(text), ranks)


def torch_actions() -> dict[str, argparse.Action]:
    """torchrun's own options by destination, but for those that print something instead of launching."""
    actions = torch_parser()._actions
    prints = ("help", "print_completion")
    return {action.dest: action for action in actions if action.option_strings and action.dest not in prints}


def version_of(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("+")[0].split(".")[:2])


INSTALLED = version_of(metadata.version("torch"))

THERE = [option for option in OPTIONS if not option.since or version_of(option.since) <= INSTALLED]
"""What of the table the torchrun that is installed has."""


def described(action: argparse.Action) -> dict[str, object]:
    """What of torch's action the table repeats."""
    switch = action.nargs == 0
    return {
        "flags": tuple(action.option_strings),
        "type": "bool" if switch else getattr(action.type, "__name__", None),
        "default": tuple(action.default) if isinstance(action.default, list) else action.default,
        "choices": tuple(action.choices or ()),
        "env": type(action).__name__ in ("env", "check_env"),
        "nargs": 0 if switch else action.nargs,
        "required": action.required,
    }


def tabled(option: Option) -> dict[str, object]:
    return {
        "flags": option.flags,
        "type": option.type.__name__.lstrip("_"),
        "default": option.default,
        "choices": option.choices,
        "env": option.env,
        "nargs": 0 if option.type is bool else None,
        "required": False,
    }


def test_the_table_is_torchruns_parser() -> None:
    ours = {option.dest: tabled(option) for option in THERE}
    assert ours == {dest: described(action) for dest, action in torch_actions().items()}


def test_the_positionals_are_torchruns() -> None:
    positionals = [(action.dest, action.nargs) for action in torch_parser()._actions if not action.option_strings]
    assert positionals == [("training_script", None), ("training_script_args", argparse.REMAINDER)]


def options(*arguments: str, env: Mapping[str, str] | None = None) -> TorchrunOptions:
    return parse_options([*arguments, "train.py"], env or {})[0]


VALUES: dict[str, list[str]] = {
    "nnodes": ["1", "3", "2:4", "0", "4:2", "1:2:3", "x", ""],
    "rdzv_conf": [
        *("", " ", "x", "=1", "a=", "a=1,", "a=b=c,d=2", "join_timeout=7", " join_timeout = 7 , last_call_timeout=3"),
        *(
            "join_timeout=5,join_timeout=6",
            "join_timeout=0",
            "last_call_timeout=-1",
            "join_timeout=1.5",
            "join_timeout=",
        ),
        "join_timeout=600,close_timeout=600,timeout=600",
    ],
    "max_restarts": ["0", "3", "x", ""],
    "monitor_interval": ["5", "0.01", "1e-3", "x", "0", "-1", "nan"],
    "rdzv_backend": ["static", "c10d", "etcd", "etcd-v2", "unknown", "C10D", ""],
    "start_method": ["spawn", "fork", "thread"],
    "numa_binding": ["node", "nowhere"],
    "redirects": ["0", "3", "0:1,1:2", "4", "", "0:1,", "10:1"],
    "tee": ["0", "3", "0:3", "x"],
    "node_rank": ["1", "-1", "x"],
    "master_port": ["29500", "x", "0", "65535", "65536", "-1"],
    "shutdown_timeout": ["10", "1.5"],
    # torchrun warns of a name that it does not know, in its agent, and goes on; here that is an error.
    "signals_to_handle": ["SIGTERM", "SIGUSR1,SIGTERM", "SIGUSR1, SIGUSR2"],
    "local_ranks_filter": ["", "0", "0,2", "0,", "x"],
}
TEXT = ["", "x", "a b", "-", "a,b,,c", "α"]


def spellings() -> Iterator[list[str]]:
    """Every option, in every spelling, with every value of interest, good or bad."""
    for option in THERE:
        for flag in option.flags:
            if option.type is bool:
                yield [flag]
                continue
            for value in VALUES.get(option.dest, TEXT):
                yield [flag, value]
                yield [f"{flag}={value}"] if flag.startswith("--") else [flag + value]


def torch_value(option: Option, arguments: list[str]) -> object:
    """What torchrun makes of the arguments for one option, in our terms; None when it refuses them."""
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import parse_min_max_nnodes

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            parsed = torch_parser().parse_args([*arguments, "train.py"])
        except (SystemExit, ValueError):
            return None
    value = getattr(parsed, option.dest)
    try:
        if option.dest == "nnodes":
            low, high = parse_min_max_nnodes(value)
            return (low, high) if 0 < low <= high else None
        if option.dest in ("redirects", "tee"):
            return torch_streams(value, 12)
        if option.dest == "rdzv_conf":
            return torch_rendezvous_conf(value)
        if option.dest == "rdzv_backend" and value not in rendezvous_handler_registry._registry:
            return None  # `create_handler` refuses it
        if option.dest == "monitor_interval" and not value > 0:
            return None  # `WorkerSpec` refuses it
        if option.dest == "master_port":
            parse_rendezvous_endpoint(f"127.0.0.1:{value}", -1)
        if option.dest == "local_ranks_filter":
            return (frozenset(map(int, value.split(","))) if value else frozenset(),)
    except (RuntimeError, ValueError):
        return None
    return (tuple(value) if isinstance(value, list) else value,)


def torch_rendezvous_conf(text: str) -> tuple[int, int]:
    """Seconds to join and of the last call, as torch's dynamic rendezvous reads them."""
    from torch.distributed.elastic.rendezvous.api import RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout, _get_timeout
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config

    config = _parse_rendezvous_config(text)
    params = RendezvousParameters("c10d", "h:1", "id", 1, 1, **config)
    timeout = RendezvousTimeout(_get_timeout(params, "join"), _get_timeout(params, "last_call"))
    return int(timeout.join.total_seconds()), int(timeout.last_call.total_seconds())


def our_value(option: Option, arguments: list[str], env: Mapping[str, str] | None = None) -> object:
    try:
        parsed = options(*arguments, env=env)
    except CommandError:
        return None
    if option.dest == "nnodes":
        return parsed.min_nodes, parsed.max_nodes
    value = getattr(parsed, option.dest)
    if isinstance(value, Streams):
        return {rank: value.stdout(rank) + 2 * value.stderr(rank) for rank in range(12)}
    if option.dest == "local_ranks_filter":
        return (value or frozenset(),)
    if isinstance(value, RendezvousConf):
        return value.join_timeout or 600, value.last_call_timeout
    return (value,)


@pytest.mark.parametrize(
    ("arguments", "in_run", "lines"),
    [
        ([], True, []),
        (["--rdzv-conf", "join_timeout=7,last_call_timeout=3", "--signals-to-handle", "SIGUSR1"], False, []),
        (
            ["--rdzv-conf", "join_timeout=7,timeout=3"],
            False,
            ["--rdzv-conf timeout has no effect: the hosts of the job"],
        ),
        (["--rdzv-conf", "keys=1"], False, ["--rdzv-conf keys has no effect: "]),
        (["--rdzv-conf", "join_timeout=7,timeout=3"], True, ["--rdzv-conf join_timeout, timeout has no effect: "]),
        (["--signals-to-handle", "SIGUSR1"], True, ["--signals-to-handle SIGUSR1 has no effect on the hosts: "]),
    ],
)
def test_what_has_no_effect_is_told(arguments: list[str], in_run: bool, lines: list[str]) -> None:
    told = unused_options(options(*arguments), in_run)
    assert [line.startswith(start) for line, start in zip(told, lines, strict=True)] == [True] * len(lines)


def test_every_value_is_read_or_refused_as_by_torchrun() -> None:
    for arguments in spellings():
        meant = next(option for option in THERE if any(arguments[0].startswith(flag) for flag in option.flags))
        theirs, ours = torch_value(meant, arguments), our_value(meant, arguments)
        assert theirs == ours, arguments


@pytest.mark.parametrize("option", [option for option in THERE if option.env], ids=lambda option: str(option.dest))
def test_the_environment_supplies_an_option_as_in_torchrun(option: Option, monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ["0", "1", "2"] if option.type is bool else VALUES.get(option.dest, TEXT):
        if option.choices and value not in option.choices:
            continue  # argparse does not look at the choices of a default; torchrun fails later
        monkeypatch.setenv(option.variable, value)
        assert our_value(option, [], os.environ) == torch_value(option, []), value


def test_options_of_a_newer_torch_are_known() -> None:
    """Which torch the hosts have is not known where a job is submitted, and may not be."""
    assert options("--log-line-prefix-template", "${rank}> ").log_line_prefix_template == "${rank}> "
    assert options(env={"PET_LOG_LINE_PREFIX_TEMPLATE": "x"}).log_line_prefix_template == "x"
    with pytest.raises(HelpRequested):
        options("--print-completion", "zsh")


def test_an_abbreviation_may_be_of_both_spellings_of_an_option() -> None:
    for flag in ("--nproc", "--nproc_per", "--nproc-per"):
        assert options(flag, "3", "--", "no_such_a.py").nproc_per_node == options(f"{flag}=3").nproc_per_node == "3"
    assert parse_options(["--", "--a_b.py", "--c_d"], {})[1:] == ("--a_b.py", ("--c_d",))


def test_the_command_line_wins_over_the_environment() -> None:
    assert options("--max-restarts", "1", env={"PET_MAX_RESTARTS": "x"}).max_restarts == 1
    assert options("--standalone", env={"PET_STANDALONE": "0"}).standalone is True


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(CommandError, match=r"torchrun: PET_MAX_RESTARTS=x: use a whole number, 0 or more\."):
        options(env={"PET_MAX_RESTARTS": "x"})
    with pytest.raises(CommandError, match=r"torchrun: PET_STANDALONE=yes: use 1 \(on\) or 0 \(off\)\."):
        options(env={"PET_STANDALONE": "yes"})


def test_logs_specs_and_numa_binding_do_not_come_from_the_environment() -> None:
    env = {"PET_LOGS_SPECS": "x", "PET_NUMA_BINDING": "node"}
    assert options(env=env) == DEFAULTS


words = st.sampled_from(
    [flag for option in THERE for flag in option.flags]
    + ["--rdzv-b", "--tee=3", "--no-p", "--mas", "-mt3", "-t3", "--", "-", "2", "train.py", "--lr", "-x", "a b", "0:1"]
)


@given(st.lists(words, max_size=6))
@example(["--", "train.py", "--", "x"])
@example(["train.py", "--", "--tee", "3"])
@example(["train.py", "--nproc", "4"])
@example(["-mt", "3", "train.py", "x"])
@example(["-5", "x"])
@example(["--role", "x", "-x y", "z"])
def test_a_command_line_is_split_where_torchrun_splits_it(arguments: list[str]) -> None:
    complaint = io.StringIO()
    with contextlib.redirect_stderr(complaint):
        try:
            theirs = torch_parser().parse_args(arguments)
        except SystemExit:
            theirs = None
    try:
        ours = parse_options(arguments, {})
    except CommandError:
        ours = None
    if theirs is None:
        # Before Python 3.12 an ambiguous abbreviation is refused even among the script's own arguments.
        assert ours is None or "ambiguous" in complaint.getvalue()
    elif ours is not None:
        parsed, script, script_args = ours
        assert (script, list(script_args)) == (theirs.training_script, theirs.training_script_args)
        same = {name: getattr(theirs, name) for name in ("module", "no_python", "rdzv_backend", "standalone", "role")}
        assert same == {name: getattr(parsed, name) for name in same}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nprocs=2", "a.py"], "torchrun has no option --nprocs. Did you mean --nproc-per-node?"),
        (["--max_restart_count", "1", "a.py"], "torchrun has no option --max_restart_count. Did you mean"),
        (["--zzz", "a.py"], "torchrun has no option --zzz. See `torchrun --help`."),
        (["--r", "1", "a.py"], "torchrun: ambiguous option: --r could match"),
        ([], "torchrun: the following arguments are required: training_script"),
        (["--tee"], "torchrun: argument -t/--tee: expected one argument"),
        (["--max-restarts", "-1", "a.py"], "torchrun: --max-restarts=-1: use a whole number, 0 or more."),
        (["--signals-to-handle", "SIGTERM,TERM", "a.py"], "torchrun: --signals-to-handle=SIGTERM,TERM: use names of"),
        (
            ["--rdzv-backend=unknown", "a.py"],
            "torchrun: --rdzv-backend=unknown: use one of static, c10d, etcd, etcd-v2, or leave it out: the hosts of",
        ),
        (["--monitor-interval=0", "a.py"], "torchrun: --monitor-interval=0: use a number of seconds above 0."),
        (["--master-port", "70000", "a.py"], "torchrun: --master-port=70000: use a port from 0 to 65535"),
        (["--tee", "5", "a.py"], "torchrun: --tee=5: use 0 (none), 1 (stdout), 2 (stderr) or 3 (both)"),
        (["--nnodes", "4:2", "a.py"], "torchrun: --nnodes=4:2: use a number of nodes above 0, or MIN:MAX"),
        (
            ["--rdzv-conf", "x", "a.py"],
            "torchrun: --rdzv-conf=x: x has no value; use KEY=VALUE,..., such as join_timeout=",
        ),
        (
            ["--rdzv-conf", "a=b,join_timeout=soon", "a.py"],
            "torchrun: --rdzv-conf=a=b,join_timeout=soon: join_timeout=soon is not a whole number of seconds above 0.",
        ),
        (["--local-ranks-filter", "x", "a.py"], "torchrun: --local-ranks-filter=x: use a comma-separated list"),
    ],
)
def test_a_mistake_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(CommandError) as caught:
        parse_options(arguments, {})
    assert message in str(caught.value)


@pytest.mark.parametrize("flag", ["-h", "--help", "--he"])
def test_help_is_not_a_launch(flag: str) -> None:
    with pytest.raises(HelpRequested):
        parse_options(["--tee", "3", flag], {})


def test_what_a_shell_has_yet_to_expand_is_not_judged() -> None:
    parsed = options(f"--nnodes={UNEXPANDED}", "--max-restarts", f"{UNEXPANDED}x", env={"PET_TEE": UNEXPANDED})
    assert parsed.unexpanded == {"nnodes", "max_restarts", "tee"}
    assert (parsed.min_nodes, parsed.max_restarts, parsed.tee) == (1, 0, Streams())
