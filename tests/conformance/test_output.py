# SPDX-License-Identifier: BSD-3-Clause
"""What ranks print: which files get it and what the caller sees of it."""

from __future__ import annotations

import re

import pytest

from tests.conformance.differences import Difference, differs
from tests.conformance.launchers import Launchers, Outcome

LINES = """
for number in range(3):
    os.write(1, f"out {os.environ['RANK']} {number}\\n".encode())
    os.write(2, f"err {os.environ['RANK']} {number}\\n".encode())
"""
"""Whole lines: what two ranks ``print`` at the same time is torn under torchrun, as the interpreter is unbuffered."""

FORMS = {
    "nothing asked": (),
    "redirects 0": ("--redirects", "0"),
    "redirects 1": ("--redirects", "1"),
    "redirects 2": ("-r", "2"),
    "redirects 3": ("--redirects", "3"),
    "redirects of one rank each": ("--redirects", "0:1,1:2"),
    "redirects of one rank": ("-r", "1:3"),
    "tee 1": ("--tee", "1"),
    "tee 2": ("-t", "2"),
    "tee 3": ("--tee", "3"),
    "tee of one rank": ("--tee", "0:3"),
    "tee of one rank each": ("--tee", "0:1,1:2"),
    "redirects and tee": ("--redirects", "3", "--tee", "1"),
    "redirects and tee of ranks": ("--redirects", "0:3", "--tee", "1:3"),
    "filter": ("--local-ranks-filter", "1"),
    "filter of both": ("--local-ranks-filter", "0,1"),
    "filter of a rank that is not": ("--local-ranks-filter", "5"),
    "filter and tee": ("--local-ranks-filter", "0", "--tee", "3"),
    "filter and redirects": ("--local-ranks-filter", "0", "--redirects", "1"),
    "role": ("--role", "my role", "--tee", "3"),
}


def console(outcome: Outcome) -> tuple[list[bytes], list[bytes]]:
    """The ranks' lines that the caller gets, whatever their order between ranks."""
    return tuple(  # type: ignore[return-value]
        sorted(line for line in stream.splitlines() if re.search(rb"\b(out|err) \d \d", line))
        for stream in (outcome.out, outcome.err)
    )


def files(outcome: Outcome) -> dict[str, bytes]:
    """Contents of the log files, below the folder of the run."""
    found = {"/".join(path.split("/")[2:]): data for path, data in outcome.files.items() if path.startswith("logs/")}
    assert all(path.startswith("attempt_0/") for path in found)
    return found


@differs(Difference.ALL_FILES)
@pytest.mark.parametrize("form", FORMS)
def test_streams(form: str, both: Launchers) -> None:
    theirs, ours = both.script(LINES, "--log-dir", "logs", *FORMS[form], preload="")
    assert theirs.code == ours.code == 0
    assert console(ours) == console(theirs)
    their, our = files(theirs), files(ours)
    assert {path: our.get(path) for path in their} == their
    # What is more: the files of streams that torchrun shows alone.
    everything = {f"attempt_0/{rank}/{stream}.log" for rank in range(2) for stream in ("stdout", "stderr")}
    assert {*our} == everything


FILTERS = {
    "a text": ("--tee", "3", "--duplicate-stdout-filters", " 1"),
    "texts of both streams": (
        *("--tee", "3", "--duplicate-stdout-filters", "out 0,out 1 2", "--duplicate-stderr-filters", "err 1"),
    ),
    "the empty text": ("--tee", "1", "--duplicate-stdout-filters", ""),
    "a comma and an end of line": ("--tee", "3", "--duplicate-stderr-filters", "x,,y,0\n"),
    "a stream that is not teed": ("--tee", "2", "--redirects", "1", "--duplicate-stdout-filters", "out"),
    "one rank teed": ("--tee", "0:3", "--duplicate-stdout-filters", "out", "--duplicate-stderr-filters", "none"),
    "a rank that is not shown": ("--tee", "3", "--local-ranks-filter", "1", "--duplicate-stdout-filters", "out"),
}


@pytest.mark.parametrize("form", FILTERS)
def test_filtered_lines(form: str, both: Launchers) -> None:
    theirs, ours = both.script(LINES, "--log-dir", "logs", *FILTERS[form], preload="")
    assert theirs.code == ours.code == 0
    assert console(ours) == console(theirs)
    their, our = (
        {path: sorted(data.splitlines()) for path, data in files(outcome).items() if "filtered" in path}
        for outcome in (theirs, ours)
    )
    assert our == their != {}


def test_filtered_lines_into_nothing(both: Launchers) -> None:
    words = ("--log-dir", "/dev/null", "--tee", "1", "--duplicate-stdout-filters", "out")
    theirs, ours = both.script("mark('ran')", *words, preload="")
    assert theirs.code == 1 and ours.code == 2
    assert theirs.marks() == ours.marks() == []
    assert b"--log-dir=/dev/null and" in ours.err


@differs(Difference.LOG_DIR)
def test_log_dir_of_a_run(both: Launchers) -> None:
    theirs, ours = both.script(
        LINES, "--log-dir", "new/logs", "-r", "3", "--rdzv-id", "id", "--master-port", "29511", preload=""
    )
    their, our = (
        {path.split("/")[2] for path in outcome.files if path.startswith("new/logs/")} for outcome in (theirs, ours)
    )
    assert our == {"id"}
    assert re.fullmatch(r"id_\w+", their.pop())


def test_log_dir_that_is_a_file(both: Launchers) -> None:
    theirs, ours = both.script("mark('ran')", "--log-dir", "file", files={"file": ""}, preload="")
    assert (ours.code, ours.marks()) == (theirs.code, theirs.marks()) == (1, [])


TEMPLATES = ["[${role_name}${rank}]:", "${local_rank}> ", "${rank}/${nothing} $$ ", "é|"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_prefix(template: str, both: Launchers) -> None:
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}
    theirs, ours = both.script(LINES, "--tee", "3", environ=environ, preload="")
    assert console(ours) == console(theirs)


ODD = {
    "a megabyte in a line": "print('x' * (1 << 20))",
    "bytes that are no text": r"os.write(1, bytes(range(256)) * 100 + b'\n')",
    "no end of line": "print('a'); print('b', end='')",
    "only an end of line": "print()",
    "nothing": "",
    "a progress bar": r"for n in range(100): print(f'\r{n} %', end=''); sys.stdout.flush()",
    "Windows line ends": r"sys.stdout.write('a\r\nb\r\n')",
    "many lines": "for n in range(20000): print(n, 'x' * 20)",
    "one at a time": "for c in 'a word\\n': os.write(1, c.encode())",
    "form feed and line separators": r"print('a\x0cb\x1cc\u2028d\x85e')",
    "colours": r"print('\x1b[31mred\x1b[0m')",
    "a child's output": "import subprocess; subprocess.run(['sh', '-c', 'echo child; echo end >&2'])",
    "os.system": "print('a'); os.system('echo b'); print('c')",
    "C library": "import ctypes; c = ctypes.CDLL(None); c.puts(b'from C'); c.fflush(None)",
    "a stream reopened": "print('a'); sys.stdout = open(1, 'w', closefd=False); print('b')",
    "a descriptor replaced": "os.dup2(os.open('own', os.O_CREAT | os.O_WRONLY), 1); print('into own')",
    "stderr into stdout": "os.dup2(1, 2); print('a'); print('b', file=sys.stderr); print('c')",
    "both at once": "[print(n, file=(sys.stdout, sys.stderr)[n % 2]) for n in range(1000)]",
}


def test_redirected_bytes(both: Launchers) -> None:
    theirs, ours = both.each(list(ODD.values()), "--log-dir", "logs", "--redirects", "3", preload="")
    assert theirs.code == ours.code == 0
    their, our = files(theirs), files(ours)
    assert our.keys() == their.keys()
    for rank, name in enumerate(ODD):
        for stream in ("stdout.log", "stderr.log"):
            path = f"attempt_0/{rank}/{stream}"
            assert our[path] == their[path], name
    assert ours.out == theirs.out == b""
    assert ours.files["own"] == theirs.files["own"] != b""


AS_UNDER_TORCHRUN = {
    "a megabyte in a line",
    "only an end of line",
    "nothing",
    "many lines",
    "colours",
    "a child's output",
    "os.system",
    "form feed and line separators",
}


@differs(Difference.TEE)
@pytest.mark.parametrize("name", sorted(AS_UNDER_TORCHRUN))
def test_teed_bytes(name: str, both: Launchers) -> None:
    theirs, ours = both.script(ODD[name], "--tee", "3", nproc=1, preload="")
    prefix = b"[default0]:"
    # torchrun puts one wherever it happens to have read a part of a line, so what is compared is all the rest.
    assert ours.out.replace(prefix, b"") == theirs.out.replace(prefix, b"")
    assert ours.out.count(prefix) == ours.out.count(b"\n" + prefix) + ours.out.startswith(prefix)
    assert ours.out.count(prefix) == ours.out.count(b"\n")


@differs(Difference.TEE)
@pytest.mark.parametrize("name", ["bytes that are no text", "Windows line ends", "a progress bar", "no end of line"])
def test_teed_bytes_are_not_changed(name: str, both: Launchers) -> None:
    theirs, ours = both.script(ODD[name], "--tee", "3", "--log-dir", "logs", nproc=1, preload="")
    printed = ours.log(0, "stdout.log")
    assert printed == theirs.log(0, "stdout.log")
    assert printed is not None
    # A line is what ends in a line feed, and the last one gets one.
    lines = printed.split(b"\n")
    lines = lines if lines[-1] else lines[:-1]
    assert ours.out == b"".join(b"[default0]:" + line + b"\n" for line in lines)
    assert theirs.out != ours.out
    assert theirs.out.replace(b"[default0]:", b"").split()[:1] != []


@pytest.mark.parametrize("name", ["many lines", "no end of line", "bytes that are no text", "a child's output"])
def test_console_without_tee(name: str, both: Launchers) -> None:
    theirs, ours = both.script(ODD[name], nproc=1, preload="")
    assert ours.out.rstrip(b"\n") == theirs.out.rstrip(b"\n")


@differs(Difference.STDIN)
def test_stdin(both: Launchers) -> None:
    theirs, ours = both.script("report(sys.stdin.read())", files={"in": "words"}, nproc=1, preload="", stdin="in")
    assert theirs.reports == {0: "words"}
    assert ours.reports == {0: ""}


@differs(Difference.TORN)
def test_lines_of_two_ranks_are_whole(both: Launchers) -> None:
    body = "for n in range(5000): print(os.environ['RANK'] * 60, n)"
    theirs, ours = both.script(body, preload="")
    lines = sorted(f"{rank * 60} {number}" for rank in "01" for number in range(5000))
    assert sorted(ours.out.decode().splitlines()) == lines
    assert sorted(theirs.out) == sorted(ours.out)
