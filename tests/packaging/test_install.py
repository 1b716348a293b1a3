# SPDX-License-Identifier: BSD-3-Clause
"""What a user's TorchX looks like with us installed, against the same TorchX without us.

A wheel is built as for a release and installed into a fresh virtual environment. TorchX, Monarch and the rest are
not downloaded again: both environments see the running interpreter's packages through links, all but our own.
"""

from __future__ import annotations

import configparser
import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.contract.table import BACKENDS

ROOT = Path(__file__).parents[2]
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
VERSION = SETUP["metadata"]["version"]
OURS = {f"monarch_{name}" for name in BACKENDS}
DEFAULTS = ["local_docker", "local_cwd", "slurm", "kubernetes"]

pytestmark = [pytest.mark.slow]


@dataclass(frozen=True)
class Environment:
    """A virtual environment and a folder, outside of any project, to run its commands in."""

    folder: Path
    cwd: Path

    @property
    def bin(self) -> Path:
        return self.folder / "bin"

    def env(self, **more: str) -> dict[str, str]:
        drop = ("PYTHON", "TORCHX", "MONARCH", "VIRTUAL_ENV")
        env = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
        path = f"{self.bin}{os.pathsep}{env['PATH']}"
        return env | {"PATH": path, "HOME": str(self.cwd), "MONARCH_STATE_DIR": str(self.cwd / "state"), **more}

    def run(self, *command: str, exit_code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        """The command's result; fails the test when it exits with another code."""
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=240, env=self.env(**env), cwd=self.cwd, check=False
        )
        assert result.returncode == exit_code, f"{command}: {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result

    def torchx(self, *args: str, exit_code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.bin / "torchx"), *args, exit_code=exit_code, **env)

    def python(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.bin / "python"), "-c", code, exit_code=0, **env)


def build(folder: Path) -> Path:
    """Build the source archive and, from that, the wheel, as `make dist` does; return the folder with both.

    From a copy: setuptools would reuse, and leave, a build folder in the working tree.
    """
    source, out = folder / "project", folder / "dist"
    unwanted = shutil.ignore_patterns(
        ".venv*", ".git", ".*_cache", "build", "dist", "*.egg-info", "__pycache__", "digits-checkpoints"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=unwanted, copy_function=shutil.copy)  # with times of their own
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    subprocess.run(command, check=True, timeout=240, env=env, stdout=subprocess.DEVNULL)
    return out


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the project's wheel and source archive."""
    return build(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    """The project's wheel."""
    (built,) = dist.glob("*.whl")
    return built


def without_us(name: str) -> bool:
    return not name.startswith(("torchx_monarch", "torchx_plugins", "__editable__")) and not name.endswith(".pth")


def make_environment(folder: Path) -> Environment:
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    links = folder / "links"
    links.mkdir()
    for site in dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")):
        for entry in Path(site).iterdir():
            if without_us(entry.name) and not (links / entry.name).exists():
                (links / entry.name).symlink_to(entry)
    environment = Environment(folder / "venv", folder / "cwd")
    environment.cwd.mkdir()
    (site_packages,) = (environment.folder / "lib").glob("python*/site-packages")
    (site_packages / "links.pth").write_text(f"{links}\n")
    script = environment.bin / "torchx"
    script.write_text(
        f"#!{environment.bin / 'python'}\nimport sys\nfrom torchx.cli.main import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)
    return environment


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """TorchX and Monarch without us."""
    return make_environment(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """The same with our wheel installed."""
    environment = make_environment(tmp_path_factory.mktemp("installed"))
    pip = [sys.executable, "-m", "pip", "--python", str(environment.bin / "python"), "install", "-q", "--no-deps"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120)
    return environment


def schedulers(environment: Environment, **env: str) -> list[str]:
    """The names TorchX knows, in its order: the first is its default."""
    code = "import json; from torchx.schedulers import *; print(json.dumps(list(get_scheduler_factories())))"
    names: list[str] = json.loads(environment.python(code, **env).stdout)
    return names


# --- the wheel


def test_the_wheel_has_every_module_and_nothing_else(wheel: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    # Not rglob: before Python 3.13 it does not enter linked folders, and torchx_monarch/components is one.
    expected = {
        str(Path(folder, file).relative_to(ROOT))
        for package in ("torchx_monarch", "torchx_plugins")
        for folder, _, files in os.walk(ROOT / package, followlinks=True)
        for file in files
        if file.endswith((".py", ".html", ".css", ".js"))
    }
    assert "torchx_monarch/components/__init__.py" in names
    assert names == expected | {"torchx_monarch/py.typed"}


@pytest.mark.nightly("6 s of processor time for another build")
def test_two_builds_are_equal(dist: Path, tmp_path: Path) -> None:
    """Byte by byte: with the sources, anybody can check that a release was made of them."""
    first, second = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in (dist, build(tmp_path)))
    assert {name.rpartition("-")[2] for name in first} == {f"{VERSION}.tar.gz", "any.whl"}
    assert [name for name in first if first[name] != second[name]] == []


def test_the_source_archive_has_what_builds_a_wheel_and_an_image(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"LICENSE", "CHANGELOG.md", "constraints.txt", "docker/Dockerfile", "tools/build_backend.py"}


def test_the_wheel_names_its_version_and_the_project(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["Version"] == VERSION
    assert {text.partition(", ")[0] for text in metadata.get_all("Project-URL", ())} == {
        "Documentation",
        "Changelog",
        "Issues",
        "Source",
    }


def test_our_part_of_torchx_plugins_has_no_init(wheel: Path) -> None:
    """torchx_plugins belongs to all plugins together; an __init__.py would hide the others."""
    ours = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("torchx_plugins/")}
    assert ours == {"torchx_plugins/schedulers/torchx_monarch.py"}


def test_the_entry_points_name_things_that_exist(wheel: Path, installed: Environment) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/entry_points.txt"))
        parser = configparser.ConfigParser(delimiters=["="])
        parser.read_string(archive.read(name).decode())
    assert set(parser) == {"DEFAULT", "torchx.cli.cmds", "torchx.components", "torchx.schedulers"}
    named = [value for group in parser.sections() for value in parser[group].values()]
    installed.python(f"import pkgutil\nfor name in {named}: pkgutil.resolve_name(name)")


def test_no_import_hook_is_installed(installed: Environment) -> None:
    (site_packages,) = (installed.folder / "lib").glob("python*/site-packages")
    assert [p.name for p in site_packages.glob("*.pth")] == ["links.pth"]


# --- schedulers


def test_schedulers_are_added_and_the_default_stays(plain: Environment, installed: Environment) -> None:
    after = schedulers(installed)
    assert schedulers(plain) == DEFAULTS, "every comparison below would compare us with ourselves"
    assert after[0] == DEFAULTS[0]
    assert set(after) == {*DEFAULTS, *OURS}


@pytest.mark.parametrize("source", ["1", "2"])
def test_either_channel_alone_is_enough(plain: Environment, installed: Environment, source: str) -> None:
    """1: namespace packages only; 2: entry points only."""
    before = schedulers(plain, TORCHX_PLUGINS_SOURCE=source)
    after = schedulers(installed, TORCHX_PLUGINS_SOURCE=source)
    assert set(after) == set(before) | OURS
    assert after[0] == before[0]
    assert "grace" in installed.torchx("runopts", "monarch_local", TORCHX_PLUGINS_SOURCE=source).stdout


@pytest.mark.parametrize("source", ["NAMESPACE_PKG", "ENTRYPOINT", "NAMESPACE_PKG | PluginSource.ENTRYPOINT"])
def test_a_registry_of_each_kind_finds_each_scheduler_once(installed: Environment, source: str) -> None:
    """Whatever TORCHX_PLUGINS_SOURCE says of TorchX's own registry."""
    code = f"""
from torchx.plugins import PluginRegistry, PluginType
from torchx.plugins._registry import PluginSource
registry = PluginRegistry(plugin_sources=PluginSource.{source})
found = registry.get(PluginType.SCHEDULER)
print(*found, *registry.load_errors())
assert type(found["monarch_local"]("torchx")).__name__ == "MonarchScheduler"
"""
    done = installed.python(code)
    first, *others = done.stdout.split()
    assert (first, sorted(others), done.stderr) == (DEFAULTS[0], sorted(OURS), "")


def test_a_section_of_torchxconfig_wraps_a_scheduler(installed: Environment) -> None:
    (page,) = re.findall(r"```ini\n(.*?)```", (ROOT / "docs/how_to/write_a_backend.md").read_text(), re.DOTALL)
    config = installed.cwd / ".torchxconfig"
    try:
        config.write_text(page.replace("= acme", "= local_cwd"))
        done = installed.torchx("run", "--wait", "--log", "utils.echo", "--msg", "ready")  # by [cli:run] of the page
        assert "monarch_acme://torchx/echo-" in done.stdout and "echo/0 ready" in done.stderr
        assert "auto_set_cuda_visible_devices" in installed.torchx("runopts", "monarch_acme").stdout
        for line, said in (
            ("a = nosuch", "[monarch_wrap] a = nosuch of .torchxconfig: there is no scheduler nosuch."),
            ("a = monarch_local", "monarch_local is a scheduler of torchx-monarch, which needs no wrapping"),
            ("a = b\nb = a", "[monarch_wrap] a = b of .torchxconfig: b is a scheduler of torchx-monarch, which"),
            ("a = local_cwd\nslurm = slurm", "[monarch_wrap] slurm = slurm of .torchxconfig is ignored"),
        ):
            config.write_text(f"[monarch_wrap]\n{line}\n")
            done = installed.torchx("run", "-s", "a", "--dryrun", "utils.echo", exit_code="ignored" not in said)
            assert said in done.stderr and "Traceback" not in done.stderr
    finally:
        config.unlink()


# --- sub-commands


def test_one_sub_command_is_added(plain: Environment, installed: Environment) -> None:
    def names(shown: str) -> set[str]:
        return {name.strip() for name in shown[shown.index("{") + 1 : shown.index("}")].split(",")}

    before, after = plain.torchx("--help"), installed.torchx("--help")
    assert names(after.stdout) == names(before.stdout) | {"monarch"}
    assert after.stderr == before.stderr
    assert installed.torchx("monarch", "ls").stdout.split() == ["ID", "STATE", "AGE", "TIME", "CODE", "HOSTS"]


_COMMANDS = """
import json, os, sys, tempfile
# What they import, and the components that TorchX finds, once for all.
import kubernetes.client, kubernetes.config, kubernetes.watch, torchx.schedulers.kubernetes_scheduler
import torchx.schedulers.docker_scheduler, torchx.schedulers.local_scheduler, torchx.schedulers.slurm_scheduler
from torchx.cli.main import main
from torchx.specs import finder
finder.get_components()
ends = []
for words in json.load(sys.stdin):
    with tempfile.TemporaryFile() as said:
        if not (pid := os.fork()):
            os.dup2(said.fileno(), 1), os.dup2(said.fileno(), 2)
            sys.argv, code = ["torchx", *words], 1
            try:
                main(words)
                code = 0
            except SystemExit as ended:
                code = ended.code
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code or 0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        said.seek(0)
        ends.append([code, said.read().decode()])
print(json.dumps(ends))
"""
"""Runs the commands of stdin with one import of TorchX; prints the exit code and the output of each."""

_OURS_IN_TRACEBACK = re.compile(r'  File "[^"]*(torchx_monarch/|contextlib.py)[^"]*".*\n(    .*\n)*')

_VARIES = {
    r"\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b": "TIME",
    r"/tmp/\S*torchx_\w+": "LOGS",
    r"\b(echo|sh)-[a-z0-9]{10,}": r"\1-ID",
    r"'?monarch_[a-z_]+'?, ": "",
    r"usage: (.*\n)+?(?=.*: error: )": "",  # its lines are as long as the list of schedulers
    r"(?m)^echo/0 hi\n": "",  # TorchX's thread that reads the log may come too late: the job and its log are gone
}

_FOREIGN = [
    *(f"{command} {handle}" for command in ("status", "log", "describe", "cancel", "delete") for handle in (
        "local_cwd://torchx/x", "local_docker://torchx/x", "slurm://torchx/1", "kubernetes://torchx/a:b",
        "nosuch://torchx/x", "a://b/c/d/e/f",
    )),
    *("log local_cwd://torchx/x/role/0", "status local_cwd://torchx/x --json", "list", "list -s local_cwd", "status"),
    *("list -s slurm", "run -s local_cwd utils.echo --msg hi", "run -s local_cwd --json utils.echo --msg hi"),
    *("run -s local_cwd --wait --log utils.sh exit 3", "run -s local_cwd --dryrun utils.nosuch", "run utils.echo"),
    *("run -s local_cwd --dryrun train.py", "run -s local_cwd -cfg nosuch=1 utils.echo", "run -s nosuch utils.echo"),
    *("run -s local_cwd --dryrn utils.echo", "run", "run -s local_cwd utils.echo --nosuch 1", "runopts slurm"),
]  # fmt: skip


def test_commands_do_for_other_schedulers_what_they_did(plain: Environment, installed: Environment) -> None:
    """For each command that this package extends: TorchX's output and exit code, but for our frames in a traceback."""

    def ends(environment: Environment) -> dict[str, tuple[int, list[str]]]:
        command = [str(environment.bin / "python"), "-c", _COMMANDS]
        nowhere = {"DOCKER_HOST": "unix:///nonexistent", "KUBECONFIG": "/nonexistent", "COLUMNS": "200"}
        words = json.dumps([line.split() for line in _FOREIGN])
        env = environment.env(**nowhere)
        done = subprocess.run(command, input=words, env=env, cwd=environment.cwd, text=True, stdout=-1, timeout=240)
        found = dict[str, tuple[int, list[str]]]()
        for line, (code, said) in zip(_FOREIGN, json.loads(done.stdout), strict=True):
            said = _OURS_IN_TRACEBACK.sub("", said.replace(str(environment.folder.parent), "FOLDER"))
            for pattern, word in _VARIES.items():
                said = re.sub(pattern, word, said)
            found[line] = code, sorted(said.splitlines())  # threads print logs
        return found

    before, after = ends(plain), ends(installed)
    assert {code for code, _ in before.values()} == {0, 1, 2}
    assert {line: (before[line], after[line]) for line in _FOREIGN if before[line] != after[line]} == {}


def test_errors_of_ours_are_a_line(installed: Environment) -> None:
    done = installed.torchx("list", "-s", "monarch_kubernetes", exit_code=1, KUBECONFIG="/nonexistent")
    assert done.stderr.startswith("no Kubernetes cluster is configured: ") and len(done.stderr.splitlines()) == 1
    done = installed.torchx("delete", "--force", "local_cwd://torchx/x", exit_code=2)
    assert "unrecognized arguments: --force" in done.stderr


# --- components


def test_builtins_are_torchx_own_and_ours(plain: Environment, installed: Environment) -> None:
    def names(shown: str) -> set[str]:
        return {line.split(". ", 1)[1] for line in shown.splitlines() if ". " in line}

    before, after = plain.torchx("builtins"), installed.torchx("builtins")
    assert names(after.stdout) - names(before.stdout) == {
        *("monarch.spmd", "monarch.ft", "monarch.hosts", "monarch.controller")
    }
    assert names(after.stdout) >= names(before.stdout) | {"dist.torchrun", "dist.ddp", "utils.echo", "utils.python"}
    assert after.stderr == before.stderr


def test_other_schedulers_run_our_component_and_ours_runs_torchx_own(installed: Environment) -> None:
    script = installed.cwd / "train.py"
    script.write_text("")
    spmd = ["monarch.spmd", "--nproc", "2", "train.py"]
    result = installed.torchx("run", "-s", "local_cwd", "--dryrun", *spmd)
    assert "torchrun" in result.stdout
    assert "torchx_monarch" not in result.stdout
    for component in (spmd, ["dist.torchrun", "-j", "1x2", "--script", "train.py"]):
        result = installed.torchx("run", "-s", "monarch_local", "--dryrun", *component)
        assert "torchx_monarch.host" in result.stdout


def test_a_job_runs(installed: Environment) -> None:
    """With what the wheel holds, and no file of the sources."""
    (installed.cwd / "sum.py").write_text(
        "import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])"
    )
    job = ["run", "-s", "monarch_local", "-cfg", "preload=none", "--wait", "--log", "monarch.spmd", "--nproc", "2"]
    result = installed.torchx(*job, "sum.py")
    assert result.stdout.count("of 2") + result.stderr.count("of 2") == 2, f"{result.stdout}{result.stderr}"


def test_the_stable_torchx_beside_the_nightly_is_told_at_first_use(installed: Environment) -> None:
    """They overwrite each other's files. Here only the record of the stable release is there."""
    (site_packages,) = (installed.folder / "lib").glob("python*/site-packages")
    record = site_packages / "torchx-0.7.0.dist-info"
    record.mkdir()
    try:
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: torchx\nVersion: 0.7.0\n")
        used = installed.torchx("runopts", "monarch_local")
        other = installed.torchx("runopts", "local_cwd")
    finally:
        shutil.rmtree(record)
    assert "torchx 0.7.0" in used.stderr
    assert "pip uninstall -y torchx torchx-nightly && pip install torchx-nightly" in used.stderr
    assert other.stderr == ""


# --- quiet and quick


def test_nothing_is_printed_that_was_not_before(plain: Environment, installed: Environment) -> None:
    args = ("run", "--help")  # this lists what is there
    assert installed.torchx(*args).stderr == plain.torchx(*args).stderr
    before, after = (environment.torchx("runopts", "local_cwd") for environment in (plain, installed))
    assert (after.stdout, after.stderr) == (before.stdout, before.stderr)


def test_help_imports_little_more_than_before(plain: Environment, installed: Environment) -> None:
    """What it costs is what it imports: a part of this package, and nothing that TorchX has not imported anyhow."""
    code = """
import contextlib, io, sys
from torchx.cli.main import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
print(*sys.modules)
"""
    before, after = (set(environment.python(code).stdout.split()) for environment in (plain, installed))
    more = {name for name in after - before if not name.startswith("torchx_monarch")}
    print(f"{len(before)} modules without us, {len(after)} with us; of others: {sorted(more)}")
    assert len(after - before) < 40 and len(more) < 10
