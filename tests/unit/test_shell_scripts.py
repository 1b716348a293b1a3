# SPDX-License-Identifier: BSD-3-Clause
"""Random shell scripts with one torchrun: in bash, they do the same before and after they are rewritten."""

from __future__ import annotations

import random
import shlex
import subprocess
from pathlib import Path

import pytest
from torchx.specs import AppDef, Role, macros

from torchx_monarch.command.command import CommandError
from torchx_monarch.command.rewrite import WrapOptions, rewrite
from torchx_monarch.command.shell import escape

_SHOW = 'printf "<%s>" "$V" "$W" "$@" | tee -a "$SEEN"; echo; cat >/dev/null; exit 3\n'

_PROGRAMS = {
    "torchrun": f"#!/bin/sh\n{_SHOW}",
    # What a host process is given behind `--`, it shows as torchrun does.
    "python": '#!/bin/sh\n[ "$2" = torchx_monarch.host ] || exit 0\n'
    f'while [ "$1" != -- ]; do shift; done; shift 2\n{_SHOW}',
    # A runner that is not installed everywhere: it shows its own words, and executes the command.
    "runner": '#!/bin/sh\nuntil [ "$1" = torchrun ] || [ "$1" = python ]; do printf "[%s]" "$1"; shift; done\n'
    'exec "$@"\n',
}
_STAND_INS = ("numactl", "taskset", "nsys", "ncu", "strace", "perf", "conda", "uv", "poetry", "pixi", "srun", "chrt")


def _lines(text: str) -> list[str]:
    """Return the entries of a table, in which ``\n`` is the end of a line of the script."""
    return [line.replace(r"\n", "\n").replace(r"\t", "\t") for line in text.strip().splitlines()]


_BUILTINS = ("exec", "command", "exec -a name", "time -p", "!")

_RUNNERS = _lines(r"""
nohup
env A=1 W='x y'
env -u V
nice -n 5
timeout 60
timeout -k 5 -s INT 60
stdbuf -oL
setsid -w
numactl -N 0 --membind 0 --
taskset -c 0-3
nsys profile -t cuda -o x --stats=true
ncu --set full -fo x
strace -fo x
perf stat -e x
conda run -n x --no-capture-output
uv run --with torch
poetry run
pixi run
srun -n 1 --mpi=none -l
chrt -b 0
./set-up.sh -v
bash ./set-up.sh
""")

_ARGUMENTS = _lines(r"""
a.py
--lr 0.1
'b c'
"$V"
$V
"${W:-d e}"
${W:=d e}
$(echo f g)
`echo h`
$((1+2))
$'i\\j'
é
a,b
2>/dev/null
</dev/null
--
"#no"
x#y
*.none
~
{1,2}
torchrun
\\n
'%APP'
""")

_BEFORE = _lines(r"""
cd .
export W='u v'
W=1
echo torchrun a.py
# torchrun a.py
which torchrun >/dev/null
. ./set.sh
grep -n torchrun p.txt
command -v torchrun >log
X=$(echo torchrun b.py)
echo 'torchrun c.py; torchrun d.py'
cat <<E\ntorchrun a.py\nE
cat <<-'E' | wc -l\n\ttorchrun $V\n\tE
for i in 1 2; do echo $i; done
set -e
trap 'echo bye' EXIT
[ -d x ] || mkdir x
case $V in v*) echo yes;; *) echo no;; esac
python setup.py
f() { echo $1; }; f torchrun
while read line; do echo $line; done <p.txt
a=(torchrun b); echo ${a[0]}
""")

_FRAMES = _lines(r"""
@
(\n@\n)
{ @\n}
if true; then @\nfi
if false; then :; else @\nfi
if ! { @\n}; then echo failed; fi
case a in a) @\n;; esac
f() {\n@\n}; f
true && @
false || @
[ a = b ] || @
@ && echo done
@ || echo failed
@ | cat
echo in | {\n@\n}
@ & wait
@; echo code $?
@ >out; cat out
@  # torchrun x
(cd .; @\n)
{ cd .; @\n} 2>/dev/null
""")


def script(number: int) -> str:
    """Return a script in which torchrun is executed at one place, in which several lines name it."""
    chosen = random.Random(number)
    words = [chosen.choice(_BUILTINS)] if chosen.random() < 0.2 else []
    words += chosen.sample(_RUNNERS, chosen.choice((0, 0, 1, 1, 2)))
    words = [*(["W='a b'"] if chosen.random() < 0.2 and words[:1] != ["!"] else []), *words]
    arguments = chosen.choices(_ARGUMENTS, k=chosen.randrange(4))
    arguments += [shlex.quote("".join(chosen.choices("ab $'\"\\`#é\n", k=4))) for _ in range(chosen.randrange(2))]
    command = " ".join([*words, "torchrun t.py", *arguments])
    for frame in chosen.choices(_FRAMES, k=chosen.choice((1, 1, 2))):
        command = frame.replace("@", command)
    before, after = (chosen.choices(_BEFORE, k=chosen.randrange(most)) for most in (4, 2))
    return "\n".join([*before, command, *after])


class Shell:
    """Executes roles in bash, with stand-ins for torchrun, the host process, and some runners."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bin = folder / "bin"
        self._bin.mkdir()
        for name in (*_STAND_INS, "torchrun", "python"):
            (self._bin / name).write_text(_PROGRAMS.get(name, _PROGRAMS["runner"]))
            (self._bin / name).chmod(0o755)

    def run(self, role: Role, name: str) -> tuple[object, ...]:
        """Execute the string of a role in a folder of its own; return exit code, stdout and what the programs saw."""
        folder = self._folder / name
        folder.mkdir()
        (folder / "p.txt").write_text("torchrun\nother\n")
        (folder / "set.sh").write_text("W=set\n")
        (folder / "set-up.sh").write_text('#!/bin/sh\n[ "$1" = -v ] && shift\nW=up exec "$@"\n')
        (folder / "set-up.sh").chmod(0o755)
        seen = folder / "seen"
        applied = macros.Values(img_root="/", app_id="app", replica_id="0", rank0_env="R0").apply(role)
        env = {"PATH": f"{self._bin}:/usr/bin:/bin", "V": "v w", "SEEN": str(seen), "HOME": "/"}
        command = ["bash", *applied.args]
        ran = subprocess.run(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
        return ran.returncode, ran.stdout, seen.read_bytes() if seen.exists() else None


def outcome(shell: Shell, number: int) -> str:
    """Rewrite a script; return whether its torchrun is recognised, and whether it still does the same."""
    role = Role("r", image="", entrypoint="bash", args=["-c", escape(script(number)).replace("%APP", "${app_id}")])
    try:
        rewritten = rewrite(AppDef("app", [role]), WrapOptions()).app.roles[0]
    except CommandError as error:
        return f"refused: {error}"
    if rewritten.args == role.args:
        return "not recognised"
    before, after = shell.run(role, f"{number}a"), shell.run(rewritten, f"{number}b")
    if before[2] is None:
        return f"not executed: {before}"
    return "same" if before == after else f"different: {before} {after}"


@pytest.mark.parametrize("some", [range(50), pytest.param(range(50, 1000), marks=pytest.mark.nightly("a minute"))])
def test_random_scripts_do_the_same_when_they_are_rewritten(some: range, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    found = {number: outcome(shell, number) for number in some}
    assert {script(number): result for number, result in found.items() if result != "same"} == {}
