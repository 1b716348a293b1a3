# SPDX-License-Identifier: BSD-3-Clause
"""Every command of the documentation does what it can do here, as it is written.

README's jobs on this machine run. Other jobs are dry runs (``--dryrun``), those of clusters without a cluster. Commands
for a job that exists already are parsed. Programs that need another machine are listed with a reason.
"""

from __future__ import annotations

import ast
import configparser
import os
import re
import shlex
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torchx.cli.main import create_parser, get_sub_cmds, main
from torchx.runner import get_runner
from torchx.specs import AppState

from tests.clusters.__main__ import CLUSTERS
from tests.fork_server import run_torchx
from tests.packaging.documented_commands import ROOT, Command, commands, pages

NOT_HERE = {
    "kubectl": "needs a cluster; is not ours",
    "ssh": "needs another machine; is not ours",
    "sbatch": "needs a cluster; is not ours",
    "pkill": "sends a signal; is not ours",
    "torchrun": "is torch's; tests/conformance runs it",
    "git": "is not ours",
    "cd": "changes the folder",
    ".": "needs .venv, which `make` has created",
    "source": "needs .venv, which `make` has created",
    "export": "sets a variable",
    "eval": "takes over what `make ...-up` prints",
}
"""Programs that are not checked, each with the reason."""

PLACEHOLDERS = {
    "HANDLE": "monarch_local://torchx/train-x1y2z3",
    "SCHEDULER": "monarch_local",
    "acme": "monarch_local",
    "monarch_acme": "monarch_local",
    "COMMAND": "ps",
    "NxM": "1x2",
    "N": "1",
    "DIR": "logs",
}
"""Words that stand for others, and what they are here."""

OFFLINE = {
    "monarch_docker": {},
    "monarch_kubernetes": {"validate_spec": "False"},
    "monarch_aws_batch": {},
}
"""Run options of dry runs without a cluster. There the folder is not put on top of an image, which takes Docker."""

PROGRAM = """\
import os, sys
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
"""

COMMANDS = [command for page in pages() for command in commands(page)]
KNOWN = ("torchx", "make", "python", "pip", "docker", *NOT_HERE)


def chosen(*programs: str, page: str = "") -> list[Command]:
    """Return the commands of programs, each once, without those that are abbreviated.

    Args:
        programs: names of the programs.
        page: path of the page; empty for all pages.
    """
    found: dict[tuple[str, ...], Command] = {}
    for command in COMMANDS:
        if command.program in programs and page in ("", command.page) and not command.is_abbreviated:
            found.setdefault(command.words, command)
    return list(found.values())


def placed(command: Command) -> list[str]:
    """Return its words, without placeholders and without what is optional, such as ``[RUN]``."""
    words = [word for word in command.words if not re.fullmatch(r"\[.*\]", word)]
    return [re.sub(r"^[A-Za-z_]+(?=/|$)", lambda found: PLACEHOLDERS.get(found[0], found[0]), word) for word in words]


def option(words: list[str], *names: str) -> str:
    """Return the value of an option; empty without it."""
    return next((value for name, value in zip(words, words[1:], strict=False) if name in names), "")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs, which is the current one."""
    for name in ("train.py", "main.py", "package/train.py", "pkg/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PROGRAM)
    component = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "how_to" / "recipes.md").read_text(), re.DOTALL)
    assert component is not None
    (tmp_path / "job.py").write_text(component[1])
    # Ranks that import no torch cost a tenth, and no command line changes.
    (tmp_path / ".torchxconfig").write_text("[monarch_local]\npreload = none\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def torchx(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Run the torchx command in this process; return what it prints."""
    monkeypatch.setenv("TORCHXCONFIG", str(folder / ".torchxconfig"))  # TorchX has noted the folder of its import
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent")
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    hook, environ = threading.excepthook, dict(os.environ)

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["torchx", *words])
        try:
            main(list(words))
            code: object = 0
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        assert not code, f"torchx {shlex.join(words)}: {code}\n{said.out}{said.err}"
        return said.out

    yield run
    threading.excepthook = hook
    for name in os.environ.keys() - environ.keys():  # TorchX's command sets some, by which it knows itself
        del os.environ[name]


def completed(words: list[str]) -> list[str]:
    """Return a ``torchx run`` as a dry run that needs no cluster, of a program if it names none."""
    scheduler = option(words, "-s", "--scheduler") or "monarch_local"
    words = [re.sub(r"^on=\w+", "grace=30", word) for word in words]  # of a live allocation, which is not here
    added = ["--dryrun"] if "--dryrun" not in words else []
    if not option(words, "-s", "--scheduler"):
        added += ["-s", scheduler]
    if scheduler in OFFLINE:
        words = with_cfg(words, OFFLINE[scheduler])
        added += ["--workspace", ""] if "--workspace" not in words else []
    names_program = any(word.endswith(".py") or word in ("-m", "--m", "--module") for word in words)
    if not names_program and any(word in ("monarch.spmd", "monarch.controller") for word in words):
        value = ["1"] if words[-1].startswith("--") else []  # a sentence names the option
        words = [*words, *value, "train.py"]
    return ["run", *added, *words[2:]]


def with_cfg(words: list[str], options: dict[str, str]) -> list[str]:
    """Return the words of a ``torchx run`` with run options beside those that they give."""
    name = next((word for word in words if word in ("-cfg", "--scheduler_args")), "")
    given = words[words.index(name) + 1] if name else ""
    named = {option.partition("=")[0] for option in given.split(",")}
    more = [f"{key}={value}" for key, value in options.items() if key not in named]
    text = ",".join(filter(None, [given, *more]))
    if not text:
        return words
    if name:
        at = words.index(name) + 1
        return [*words[:at], text, *words[at + 1 :]]
    return [*words[:2], "-cfg", text, *words[2:]]


@pytest.mark.parametrize("command", chosen("torchx"), ids=str)
def test_torchx_takes_it(torchx: Callable[..., str], command: Command, caplog: pytest.LogCaptureFixture) -> None:
    """A command that a reader copies asks for what its ranks need."""
    words = placed(command)
    for scheme in re.findall(r"\b(\w+)://", " ".join(words)):
        assert scheme in OFFLINE or scheme in ("monarch_local", "monarch_slurm", "file", "http")
    if "--help" in words or words[1] in ("runopts", "builtins"):
        assert torchx(*words[1:])
    elif words[1] != "run":
        # `torchx monarch exec`, in a sentence, is a name.
        is_name = len(words) == 3 and words[1] == "monarch" and not command.in_block
        torchx(*words[1:], "--help") if is_name else create_parser(get_sub_cmds()).parse_args(words[1:])
    elif not any("." in word and not word.startswith("-") for word in words[2:]):
        create_parser(get_sub_cmds()).parse_args([*words[1:], "utils.echo"])
    elif "dist.torchrun" in words and "--script" not in words:
        torchx(*completed([*words, "--script", "train.py"]))
    else:
        assert torchx(*completed(words)) and "each host is for" not in caplog.text


def test_the_jobs_of_the_readme_run(folder: Path) -> None:
    """In the order of the page; what follows a job is about it."""

    def torchx(words: list[str]) -> str:
        done = run_torchx(*words[1:])
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    handle, default = "", ""
    for command in chosen("torchx", page="README.md"):
        words = [re.sub(r"^(HANDLE|monarch_local://torchx/[\w-]+)", handle, word) for word in command.words]
        if words[1] == "run" and {"monarch.spmd", "--nproc"} <= set(words) and "--dryrun" not in words:
            if (option(words, "-s", "--scheduler") or default) == "monarch_local":
                (handle,) = set(re.findall(r"monarch_local://torchx/[\w-]+", torchx(words)))
                with get_runner() as runner:
                    status = runner.wait(handle, wait_interval=0.1)
                assert status is not None and status.state is AppState.SUCCEEDED, status
        elif not command.in_block:
            continue
        elif words[1:3] == ["monarch", "init"]:
            torchx(words)
            default = option(words, "-s", "--scheduler") or "monarch_local"
        elif words[1] in ("status", "list", "log", "cancel") or words[2] in ("status", "ls", "logs"):
            said = torchx(words)
            assert words[1] != "log" or "rank 1 of " in said
    assert handle


def test_the_image_may_be_named_once(torchx: Callable[..., str], folder: Path) -> None:
    """In .torchxconfig, as docs/how_to/image.md has it."""
    block = re.search(
        r"(?m)^    \[component:monarch.spmd\]\n    image = .+\n", (ROOT / "docs/how_to/image.md").read_text()
    )
    assert block
    (folder / ".torchxconfig").write_text(textwrap.dedent(block[0]))
    words = ["torchx", "run", "-s", "monarch_kubernetes", "monarch.spmd", "train.py"]
    assert "image: my/image" in torchx(*completed(words))


@pytest.mark.parametrize("command", chosen("make"), ids=str)
def test_make_has_such_a_target(command: Command) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = {f"{name}-{way}" for name in CLUSTERS for way in ("up", "down")}
    targets |= {name for names in re.findall(r"^([\w -]+):", makefile, re.MULTILINE) for name in names.split()}
    for word in command.words[1:]:
        name, is_variable, _ = word.partition("=")
        if is_variable:
            assert re.search(rf"^{name} [?:]?=|\$[({{]{name}[)}}]", makefile, re.MULTILINE), name
        else:
            assert word.startswith("-") or word in targets


@pytest.mark.parametrize("command", chosen("python"), ids=str)
def test_python_has_such_a_file(command: Command) -> None:
    """And the file such options: what these do takes minutes, and is none of a reader's first steps."""
    words = list(command.words[1:])
    if words[0] == "-c":
        ast.parse(words[1])
        return
    if words[0] == "-m":
        path = Path(*words[1].split("."))
        if words[1] == "pytest":
            assert all((ROOT / word).exists() for word in words[2:] if word.startswith("tests") and "acme" not in word)
            return
        if words[1] in ("venv", "pip", "build"):
            return
        files = [ROOT / path.with_suffix(".py"), ROOT / path / "__main__.py"]
    else:
        files = [ROOT / words[0]]
    (file,) = [file for file in files if file.exists()]
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word.partition("=")[0]}"' in file.read_text()


@pytest.mark.parametrize("command", chosen("pip"), ids=str)
def test_pip_finds_it(command: Command) -> None:
    """What test_install.py installs: this package, with extras that there are."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    for word in command.words[1:]:
        package, _, names = word.rstrip("]").partition("[")
        if package in ("torchx-monarch", "."):
            assert set(filter(None, names.split(","))) <= extras
        if word.endswith(".txt"):
            assert (ROOT / word).exists()


@pytest.mark.parametrize("command", chosen("docker"), ids=str)
def test_docker_builds_such_an_image(command: Command) -> None:
    """tests/clusters/docker/test_image.py builds it."""
    words = list(command.words[1:])
    if words[0] != "build":
        return
    text = (ROOT / option(words, "-f", "--file")).read_text()
    for argument in (value for name, value in zip(words, words[1:], strict=False) if name == "--build-arg"):
        assert f"\nARG {argument.partition('=')[0]}" in text


def test_every_line_of_a_shell_is_known() -> None:
    unknown = [str(command) for command in COMMANDS if command.in_shell and command.program not in KNOWN]
    assert not unknown, "say in this file how these are checked, or why not"


def test_commands_are_found() -> None:
    """Among them are those that a reader sees first, character by character."""
    words = {command.words for command in COMMANDS if command.page == "README.md"}
    for line in ("make demo", "make test"):
        assert tuple(line.split()) in words
    assert len(chosen("torchx")) > 30
