# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch drill``: let one thing after another fail in runs of a program, and compare what it computes.

The program runs undisturbed, and then once for each fault, each time in a fresh copy of its folder on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchx.runner import Runner, config, get_runner
from torchx.specs import AppDef
from torchx.specs.finder import ComponentNotFoundException, ComponentValidationException

from torchx_monarch.backends.core.errors import UserError
from torchx_monarch.cli import exit_codes
from torchx_monarch.cli.drill_run import FAULTS, Moment, Record, Run
from torchx_monarch.cli.exit_codes import CommandError
from torchx_monarch.cli.output import print_json, print_table
from torchx_monarch.cli.torchx_run import component_words
from torchx_monarch.client.hosts import say
from torchx_monarch.code_sync import upload
from torchx_monarch.code_sync.manifest import FOLDER, LINK, is_home_or_root
from torchx_monarch.code_sync.scan import ScanError, scan
from torchx_monarch.insight.rank_sample import Progress
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.monarch import scheduler_of
from torchx_monarch.schedulers.recorded_apps import LOCAL
from torchx_monarch.schedulers.run_options import with_stored
from torchx_monarch.system.termination import termination

_DEFAULT = ",".join(fault for fault in FAULTS if fault != "damage")

_NEEDED = {"save": 1, "disk": 1, "damage": 2}
"""Checkpoints that a fault needs."""

_RESTARTS = 3
"""Restarts of ranks, or of hosts, that a run with a fault may have."""

_SLACK = 2
"""Steps by which the step in which a checkpoint was seen may be more than the step that it has."""

_MEANINGS = {
    "failed": "It cannot go on from what it has saved: a torn file is taken for whole, or there is no older one.",
    "beginning": "It does not find its checkpoint, or ignores a damaged one without a word.",
    "older": "It loads another checkpoint than the newest: names are compared as text (9 after 10), or a wrong file. "
    "Or the newest was in the memory of the only host: give a smaller persist_every.",
    "end": "The step, the epoch or the end of the loop is not restored.",
    "some": "Only some ranks save what they have, such as rank 0, and the others have something else.",
    "result": "Something is not saved or not restored: the optimizer (momentum), the learning-rate schedule (it starts "
    "again), averaged weights, a random generator, the order of the data (seen twice), or the step is one off.",
    "missed": "Nothing is known of this fault: let the program run longer, save more often, or save below its folder.",
}
"""What differences usually mean."""


class Difference(NamedTuple):
    """In what a run with a fault differs from the undisturbed one; ``kind`` is a key of ``_MEANINGS``."""

    kind: str
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", default=_DEFAULT, help=f"one a run (default: {_DEFAULT}); also: damage")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "PATH"}
    parser.add_argument("--compare", **many, help="file or folder that the program leaves, and that is to be equal")
    parser.add_argument("--data", **many, help="file or folder that the program reads, to be linked and not copied")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, ranks and hosts (default: 0)")
    parser.add_argument("-cfg", "--scheduler-args", default="", metavar="CFG", help="run options, as for torchx run")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="-- COMPONENT", help="component and arguments, as for torchx run"
    )


def run(args: argparse.Namespace) -> None:
    """Run the program with all faults; exit with ``FAILED`` unless it has survived all of them with an equal result."""
    faults = args.faults.split(",")
    if wrong := [fault for fault in faults if fault not in FAULTS]:
        raise UserError(f"--faults {args.faults}: there is no fault {wrong[0]!r}; there are {', '.join(FAULTS)}")
    logging.getLogger("torchx.runner").setLevel(logging.WARNING)  # it names trackers at each submission
    termination.install()
    base, survived = Path(tempfile.mkdtemp(prefix="torchx-monarch-drill-")), True
    try:
        with contextlib.closing(get_runner(component_defaults=config.load_sections(prefix="component"))) as runner:
            drill = _Drill(runner, args, base)
            plain = drill.undisturbed()
            rows = [drill.row(fault, plain) for fault in faults]
        survived = not any(row["differences"] for row in rows)
    finally:
        if survived:
            shutil.rmtree(base, ignore_errors=True)
    if args.json:
        print_json({"survived": survived, "seed": args.seed, "handle": plain.handle, "faults": rows})
    else:
        _print(rows)
    if not survived:
        say(f"what these runs have written is in {base}")
        sys.exit(exit_codes.FAILED)


def _print(rows: Sequence[dict[str, Any]]) -> None:
    shown = []
    for row in rows:
        back = "" if row["back"] is None else f"{row['back']:.1f} s"
        steps = ["" if row[name] is None else str(row[name]) for name in ("step", "redone")]
        verdict = ", ".join(sorted({difference["kind"] for difference in row["differences"]})) or "survived, equal"
        shown.append([row["fault"], *steps, back, f"{row['seconds']:.1f} s", str(len(row["left"])), verdict])
    print_table(["FAULT", "STEP", "REDONE", "BACK AFTER", "TOOK", "FILES LEFT", "RESULT"], shown)
    for row in rows:
        for found in row["differences"]:
            print(f"\n{row['fault']}: {found['text']}\n  {found['meaning']}")


class _Drill:
    """The runs of a drill, in folders below ``base``."""

    def __init__(self, runner: Runner, args: argparse.Namespace, base: Path) -> None:
        self._runner, self._args, self._base, self._count = runner, args, base, 0
        self._apps = scheduler_of(LOCAL, runner).apps
        self._cfg = with_stored(runner.scheduler_run_opts(LOCAL).cfg_from_str(args.scheduler_args), LOCAL)
        words = args.command[args.command[:1] == ["--"] :]
        if not words:
            raise UserError("nothing says what to run: torchx monarch drill -- monarch.spmd -j 2x2 train.py")
        component, *rest = component_words(words, LOCAL)
        try:
            dryrun: Any = runner.dryrun_component(component, rest, LOCAL, self._cfg)
        except (ComponentValidationException, ComponentNotFoundException, ValueError) as error:
            raise UserError(f"{words[0]}: {error}") from None
        if not any(role.runs_ranks for role in dryrun.submitted.roles):
            raise UserError(f"{words[0]} runs no ranks here; use a component with torchrun, such as monarch.spmd")
        if outside := [path for path in args.compare if os.path.isabs(path) or ".." in Path(path).parts]:
            raise UserError(f"--compare {outside[0]}: give a path relative to the folder, of which each run has a copy")
        self._app: AppDef = dryrun.app
        _copy_workspace(self._app, base / "workspace", args.data)
        self._least, self._is_repeatable = 0, False

    def undisturbed(self) -> Record:
        """Run the program without a fault; raise CommandError if it fails, or has nothing that can be compared."""
        found = self._run("", Moment(), math.inf)
        if found.state is not State.SUCCEEDED:
            reason = f"the program fails undisturbed, in a copy of its folder: {found.reason}"
            raise CommandError(f"{reason}. Its log: torchx log {found.handle}", exit_codes.FAILED)
        compared = map(Path, self._args.compare)
        if missing := [path for path in compared if not any(Path(file).is_relative_to(path) for file in found.results)]:
            raise CommandError(f"--compare {missing[0]}: the program has not written it", exit_codes.USAGE)
        if not found.results and not any(progress.digest for progress in found.final.values()):
            advice = "name what the program writes at its end (--compare PATH), or call progress(step, digest=…) in it"
            raise CommandError(f"there is nothing to compare: {advice}", exit_codes.USAGE)
        self._least = max(1, max(found.written.values(), default=0) // 2)
        return found

    def row(self, fault: str, plain: Record) -> dict[str, Any]:
        """Run the program with a fault, and return what the table and JSON say of it."""
        found = plain
        for moment in self._moments(fault, plain):
            found = self._run(fault, moment, 60 + 5 * plain.seconds)
            if found.struck is not None and (found.restarts or fault == "disk"):
                break
        differences = differ(plain, found, fault)
        if any(difference.kind in ("end", "some", "result") for difference in differences) and not self._is_repeatable:
            if changing := differ(plain, self._run("", Moment(), math.inf)):
                reason = f"two undisturbed runs differ ({changing[0].text}), so nothing can be said of the others"
                raise CommandError(f"{reason}: seed the program, or compare what is always equal", exit_codes.USAGE)
            self._is_repeatable = True
        return {
            "fault": fault,
            "handle": found.handle,
            "step": found.struck if plain.final else None,
            "redone": found.redone if plain.final else None,
            "back": found.back,
            "seconds": found.seconds,
            "left": sorted({*found.written} - {*plain.written}),
            "differences": [{**one._asdict(), "meaning": _MEANINGS[one.kind]} for one in differences],
        }

    def _moments(self, fault: str, plain: Record) -> Iterator[Moment]:
        """Yield the moment of a fault, and an earlier one in case the program ends before it.

        None is yielded for a fault that needs a checkpoint, if the program has written none before its last step.
        """
        draw, ranks = random.Random(f"{self._args.seed} {fault}"), plain.final.values()
        first, last = (min((getattr(rank, name) for rank in ranks), default=0) for name in ("first_step", "step"))
        begun = min((rank.first_time for rank in ranks), default=plain.started)
        part, load, victim = draw.uniform(0.4, 0.8), draw.uniform(0, begun - plain.started), draw.random()
        saves = [save for save in plain.saves if save[1] < last or not ranks]
        if len(saves) < _NEEDED.get(fault, 0):
            return
        for earlier in (part, part / 2):
            yield Moment(
                step=round(first + earlier * (last - first)) if ranks else None,
                seconds=earlier * (plain.ended - plain.started),
                saves=max(_NEEDED.get(fault, 0), min(1, len(saves))),
                load=load,
                victim=victim,
            )

    def _run(self, fault: str, moment: Moment, timeout: float) -> Record:
        folder = self._base / f"{self._count}_{fault or 'undisturbed'}"
        self._count += 1
        shutil.copytree(self._base / "workspace", folder, symlinks=True)
        app = copy.deepcopy(self._app)
        for role in app.roles:
            role.image = str(folder)
            if fault in ("host", "term"):
                role.max_retries = max(role.max_retries, _RESTARTS)
            elif fault:
                role.env.setdefault("PET_MAX_RESTARTS", str(_RESTARTS))
        dryrun = self._runner.dryrun(app, LOCAL, self._cfg)
        handle = self._runner.schedule(dryrun)
        say(f"{fault or 'undisturbed'}: {handle}")
        try:
            found = Run(self._apps, handle, folder, self._least).watch(fault, moment, timeout)
        except BaseException:
            self._runner.cancel(handle)
            raise
        found.results = dict(_digests(folder, self._args.compare))
        return found


def differ(plain: Record, found: Record, fault: str = "") -> list[Difference]:
    if fault and (found.struck is None or not (found.restarts or fault == "disk")):
        return [Difference("missed", "the program ended before its moment had come")]
    if found.state is not State.SUCCEEDED:
        return [Difference("failed", f"the program did not end well: {found.state}: {found.reason}")]
    differences = [*_lost_work(plain, found)]
    expected, final = plain.final, found.final
    ends = {key: final[key].step if key in final else None for key in expected}
    if wrong := next((key for key in expected if ends[key] != expected[key].step), None):
        text = f"rank {wrong[1]} ended with step {ends[wrong]}, not {expected[wrong].step}"
        return [*differences, Difference("end", text)]
    unequal = [key for key in expected if final[key].digest != expected[key].digest]
    if unequal:
        ranks = ", ".join(str(rank) for _, rank in unequal[:8])
        kind = "some" if len(unequal) < len(expected) else "result"
        differences.append(Difference(kind, f"the digest of rank {ranks} differs{_first_difference(plain, found)}"))
    if files := [path for path, digest in plain.results.items() if found.results.get(path) != digest]:
        differences.append(Difference("result", f"{files[0]} differs, or is missing{_first_difference(plain, found)}"))
    return differences


def _lost_work(plain: Record, found: Record) -> Iterator[Difference]:
    """Yield whether the program has gone on with another checkpoint than the newest."""
    for key, before, after in found.resumptions():
        begun, first = after.first_step, plain.final[key].first_step if key in plain.final else 0
        text = f"after step {before.step} rank {key[1]} went on with step {begun}"
        saved = f", and there was a checkpoint of about step {found.expected}" if found.expected is not None else ""
        if begun <= first < before.step:
            yield Difference("beginning", f"{text}, its first{saved}")
            return
        if found.expected is not None and begun <= found.expected - _SLACK:
            yield Difference("older", f"{text}{saved}")
            return


def _first_difference(plain: Record, found: Record) -> str:
    """Return the first step, of those that were seen, in which a digest or a number differs, and the first such number.

    Numbers that differ before the fault, such as a speed, do not count.
    """
    begun = min((after.first_step for _, _, after in found.resumptions()), default=0)
    pairs = [(key[1], plain.reports[key], found.reports[key]) for key in {*plain.reports} & {*found.reports}]
    noise = {name for step, one, other in pairs if step < begun for name in _unequal(one, other)}
    for step, one, other in sorted(pairs, key=lambda pair: pair[0]):
        names = [name for name in _unequal(one, other) if name not in noise]
        if step >= begun and (names or one.digest != other.digest):
            value = f": {names[0]} is {other.metrics.get(names[0])}, not {one.metrics[names[0]]}" if names else ""
            return f", first seen in step {step}{value}"
    return ""


def _unequal(one: Progress, other: Progress) -> list[str]:
    return [name for name, value in one.metrics.items() if other.metrics.get(name) != value]


def _is_in(path: str, parent: str) -> bool:
    return path == parent or path.startswith(f"{parent.rstrip('/')}/")


def _digests(folder: Path, results: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the files that are to be equal, with their digests."""
    for result in results:
        for path in sorted([folder / result, *(folder / result).rglob("*")]):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    yield str(path.relative_to(folder)), upload.copy(file.read, lambda data: None)


def _copy_workspace(app: AppDef, target: Path, data: Sequence[str]) -> None:
    """Copy the folder in which the app would run, without what is ignored, and link the data in it."""
    image = app.roles[0].image
    source = os.path.abspath(image) if image and os.path.isdir(image) else os.getcwd()
    if is_home_or_root(source):
        raise UserError(f"{source} holds more than a program, and the drill copies it: run it in the program's folder")
    if named := [word for role in app.roles for word in role.args if source in word]:
        raise UserError(f"{named[0]} is not in the copy in which the program runs: give a relative path")
    try:
        entries = scan(source).entries
    except ScanError as error:
        raise UserError(f"{error}, and what the program reads of it with --data") from None
    target.mkdir()
    for path, entry in entries.items():
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        if entry.kind == FOLDER:
            place.mkdir()
        elif entry.kind != LINK:
            shutil.copy2(os.path.join(source, path), place)
        elif not os.path.isabs(entry.content) and _is_in(os.path.realpath(os.path.join(source, path)), source):
            place.symlink_to(entry.content)
        elif path not in data:
            reason = "the program could write there. If it only reads it"
            raise UserError(f"{path} is a link to {entry.content}, and {reason}: --data {path}")
    for path in data:
        original, place = os.path.normpath(os.path.join(source, path)), target / path
        if not os.path.exists(original) or not _is_in(original, source) or place.exists():
            raise UserError(f"--data {path}: it is not a path of {source} that is left out of the copy")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.path.realpath(original))
