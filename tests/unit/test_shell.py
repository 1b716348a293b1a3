# SPDX-License-Identifier: BSD-3-Clause
"""Commands in shell strings, against the shells themselves."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from torchx.specs import macros

from torchx_monarch.command.shell import escape, shell_operand, simple_commands, substitute
from torchx_monarch.command.torchrun_options import UNEXPANDED

X = UNEXPANDED


def words(text: str) -> list[list[str]]:
    return [[word.value for word in command.words] for command in simple_commands(text)]


@pytest.mark.parametrize(
    ("entrypoint", "args", "index"),
    [
        ("bash", ["-c", "x"], 1),
        ("/bin/sh", ["-lc", "x", "name", "arg"], 1),
        ("zsh", ["-e", "-c", "x"], 2),
        ("dash", ["-ec", "x"], 1),
        ("bash", ["-c", "-e", "x"], 2),
        ("bash", ["-euo", "pipefail", "-c", "x"], 3),
        ("bash", ["-o", "errexit", "+o", "nounset", "-c", "x"], 5),
        ("bash", ["--login", "--rcfile", "f", "-c", "x"], 4),
        ("bash", ["-c", "--", "x"], 2),
        ("bash", ["script.sh", "-c", "x"], None),
        ("bash", ["--rcfile", "-c", "x"], None),
        ("bash", ["+c", "x"], None),
        ("bash", [], None),
    ],
)
def test_the_string_of_a_shell(entrypoint: str, args: list[str], index: int | None) -> None:
    operand, is_string = shell_operand([entrypoint, *args])
    assert (operand - 1 if is_string else None) == index


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchrun a.py", [["torchrun", "a.py"]]),
        ("cd x && torchrun a.py", [["cd", "x"], ["torchrun", "a.py"]]),
        ("export A=1; torchrun a.py | tee log", [["export", "A=1"], ["torchrun", "a.py"], ["tee", "log"]]),
        ("A=1 B='x y' torchrun a.py", [["torchrun", "a.py"]]),
        ("A=(1 2) torchrun a.py", [["torchrun", "a.py"]]),
        ("A[1]=x B+=y torchrun a.py", [["torchrun", "a.py"]]),
        ("A=1 exec -a x torchrun a.py", [["exec", "-a", "x", "torchrun", "a.py"]]),
        ("time ! nohup torchrun a.py &", [["nohup", "torchrun", "a.py"]]),
        ("time -p torchrun -p", [["torchrun", "-p"]]),
        ("A=1", []),
        ("if true; then torchrun a.py; fi", [["true"], ["torchrun", "a.py"], ["fi"]]),
        ("{ torchrun a.py; }", [["torchrun", "a.py"], ["}"]]),
        ("(torchrun a.py)", [["torchrun", "a.py"]]),
        ("! torchrun a.py || exit 1", [["torchrun", "a.py"], ["exit", "1"]]),
        ("'if' x", [["if", "x"]]),
        ("echo torchrun a.py # torchrun b.py\ntorchrun c.py", [["echo", "torchrun", "a.py"], ["torchrun", "c.py"]]),
        ("echo $(torchrun a.py) `torchrun b.py`", [["echo", X, X]]),
        ("torchrun a.py 2>&1 >log </dev/null 2> err &>> all", [["torchrun", "a.py"]]),
        (">log torchrun a.py", [["torchrun", "a.py"]]),
        ("torchrun a.py >|log 3<>f <<<'x y' z", [["torchrun", "a.py", "z"]]),
        ("torchrun a.py <(sort f) >(tee g) h", [["torchrun", "a.py", X, X, "h"]]),
        (
            "cat <<E | torchrun a.py\ntorchrun b.py\nE\ntorchrun c.py",
            [["cat"], ["torchrun", "a.py"], ["torchrun", "c.py"]],
        ),
        ("cat <<-'E' <<F\n\tx\n\tE\nF\ny", [["cat"], ["y"]]),
        ("cat <<E\nnever ends", [["cat"]]),
        ("torchrun --a=$X \"$Y z\" ${Z:-'a b'} $1 $@ a$", [["torchrun", f"--a={X}", f"{X} z", X, X, X, "a$"]]),
        ('torchrun "${Z:-it\'s}" "$(echo "a)" \')\')" $((1 + (2)))', [["torchrun", X, X, X]]),
        (r"torchrun $'a\'b' $" + '"x y"', [["torchrun", X, "x y"]]),
        ("torchrun 'α β' 'a\nb'", [["torchrun", "α β", "a\nb"]]),
        *((f"torchrun {text}", []) for text in ("'a", '"a', "$(a", "${a", "`a", "$'a")),
        ("", []),
    ],
)
def test_commands_of_a_string(text: str, expected: list[list[str]]) -> None:
    assert words(text) == expected


def test_macros_and_escapes_of_torchx_come_before_the_shell() -> None:
    text = "cd ${img_root} && torchrun --rdzv_endpoint $${${rank0_env}:=localhost}:29500 --rdzv_id '${app_id}' $$X ${Y}"
    assert words(text) == [["cd", X], ["torchrun", "--rdzv_endpoint", f"{X}:29500", "--rdzv_id", X, X, X]]


def test_words_know_where_they_start() -> None:
    text = "a=$$$$ cd '$${x}' ; ${img_root}/torchrun --x ${app_id}é \"b c\""
    command = list(simple_commands(text))[1]
    starts = [word.start for word in command.words]
    assert [text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)] == [
        "${img_root}/torchrun ",
        "--x ",
        "${app_id}é ",
        '"b c"',
    ]


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("python a.py", True),
        ("A=1 python a.py >log;\n", True),
        ("python a.py &", False),
        ("(python a.py)", False),
        ("! python a.py", False),
        ("python a.py | tee", False),
        ("cd x; python a.py", False),
        ("echo $(x); python a.py", False),
    ],
)
def test_alone(text: str, alone: bool) -> None:
    (command,) = (command for command in simple_commands(text) if command.words[0].value == "python")
    assert command.alone is alone


@pytest.mark.parametrize(
    ("text", "looped"),
    [
        ("for i in 1 2; do torchrun a; done", True),
        ("while torchrun a; do sleep 1; done", True),
        ("until false; do if x; then torchrun a; fi; done | tee", True),
        ("for i in 1; do x; done; torchrun a", False),
        ("echo for; torchrun a", False),
    ],
)
def test_looped(text: str, looped: bool) -> None:
    (command,) = (command for command in simple_commands(text) if command.words[0].value == "torchrun")
    assert command.looped is looped


@given(st.text("$a{}_pid ${}", max_size=12) | st.sampled_from([f"x{macros.app_id}y$$$$", "$app_id", "${ app_id}"]))
def test_substitution_is_torchxs(text: str) -> None:
    values = macros.Values(img_root=X, app_id=X, replica_id=X, rank0_env=X)
    assert substitute(text) == values.substitute(text)
    assert values.substitute(escape(text)) == text


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``torchrun`` that prints each of its arguments, with a NUL after each."""
    folder = tmp_path_factory.mktemp("bin")
    stub = folder / "torchrun"
    stub.write_text("#!/bin/sh\nprintf 'torchrun\\0'; for word; do printf '%s\\0' \"$word\"; done\n")
    stub.chmod(0o755)
    return folder


pieces = st.lists(
    st.sampled_from(
        ["a", "2", " ", "\t", "'", '"', "\\", "\n", "$V", "${V}", "`", "$(echo b)", "#", ";", "&&", "|", "(", ")"]
    )
    | st.sampled_from(["<f", "2>f", ">", "$'x'", "é", "=", "{", "}", "~", "!", "$", "\\\n", "${V:-'x y'}", "A=1"]),
    max_size=7,
).map("".join)


@given(pieces)
def test_bash_reads_the_words_that_we_read(stubs: Path, text: str) -> None:
    """What we take for the words of a torchrun is what bash gives it, expansions apart."""
    # Bash reads a backslash that nothing follows in more than one way, and joins lines within an operator or a `$x`.
    assume(not text.endswith("\\") and not re.search(r"[^\w\s]\\\n", text))
    text = f"torchrun {text}"
    with tempfile.TemporaryDirectory() as cwd:  # its own, for a redirection can leave a file for another to find
        (Path(cwd) / "f").touch()
        ran = subprocess.run(
            ["bash", "-c", text],
            cwd=cwd,
            env={"PATH": f"{stubs}:/usr/bin:/bin", "V": "v w"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=240,
        )
    assume(ran.returncode == 0 and ran.stdout.startswith(b"torchrun\0"))
    ours = words(escape(text))[0]
    assume(not any(X in word or "~" in word for word in ours))
    assert ours == ran.stdout.decode().split("\0")[: len(ours)]
    assert len(ours) == len(ran.stdout.decode().split("\0")) - 1
