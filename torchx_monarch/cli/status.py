# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch status`` and ``wait``: what is known of a job, for people, once or until its end."""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torchx_monarch.cli.arguments import add_address, add_handle
from torchx_monarch.cli.jobs import PATIENCE, SAMPLE_PAUSE_S, JobFacts, check_roles, opened_job
from torchx_monarch.cli.output import Screen, print_json, print_record
from torchx_monarch.insight.account import Account
from torchx_monarch.insight.rank_sample import RankView
from torchx_monarch.insight.stacks import ranges
from torchx_monarch.insight.summary import raised_at, show_duration, show_restarts
from torchx_monarch.insight.timeline import PHASES, Moment
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import JobStatus, LiveState, ReplicaState
from torchx_monarch.system.untrusted_text import one_line

_INTERVAL_S = 1.0
"""Time between two readings of a job, if its backend does not want more."""

_INDENT = " " * 15
"""What stands before the facts of a status."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("-w", "--watch", action="store_true", help="show it again and again until the job has ended")
    parser.add_argument("--roles", default="", metavar="ROLES", help="only replicas and commands of these roles: a,b")
    add_address(parser)


def run(args: argparse.Namespace) -> None:
    """Print the status of a job; with ``--watch`` each time that it changes, until its end."""
    names = [name.strip() for name in args.roles.split(",") if name.strip()]
    with opened_job(args.handle, address=args.address, timeout=PATIENCE) as job:
        later = job.watch(_INTERVAL_S, SAMPLE_PAUSE_S)
        first = job.say_problem(next(later))
        if args.watch:
            watch((only_roles(facts, names) for facts in itertools.chain([first], later)), args.json)
            return
    status = only_roles(first, names)
    print_json(status.to_json()) if args.json else print(render(status))


def only_roles(job: JobFacts, names: Sequence[str]) -> JobStatus:
    """Return the status with the roles and replicas of these names alone; with all of them for no name."""
    status = job.status
    check_roles(status.handle, job.app, names)
    if not names:
        return status
    return replace(
        status,
        roles=[role for role in status.roles if role.role in names],
        replicas=[replica for replica in status.replicas or () if replica.role in names],
    )


def watch(found: Iterator[JobStatus], as_json: bool) -> None:
    """Show a status whenever it changes; on a terminal every time, in place of the one before."""
    in_place = not as_json and sys.stdout.isatty()
    shown, screen = "", Screen()
    for status in found:
        # The facts without those that change with the clock alone.
        live = status.live and replace(status.live, idle=0)
        facts = repr(replace(status, elapsed=None, last_output=None, live=live, activity=None))
        if in_place:
            width = max(2 * len(_INDENT), shutil.get_terminal_size().columns)
            lines = render(status).split("\n")
            if not status.has_ended:  # what the terminal wraps would not be erased
                wrapped = (
                    textwrap.wrap(line, width, subsequent_indent=_INDENT, break_on_hyphens=False) for line in lines
                )
                lines = [line for parts in wrapped for line in parts]
            screen.show(lines, whole=status.has_ended)
        elif facts != shown:
            print_record(status.to_json()) if as_json else print(render(status), end="\n\n", flush=True)
        shown = facts


class CmdWait:
    """Implement ``torchx monarch wait``: wait for the end of a job, and exit with its exit code."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        add_handle(parser)

    def run(self, args: argparse.Namespace) -> None:
        """Wait, print the status, and exit with the job's exit code; with 1 for a job that failed without one."""
        with opened_job(args.handle) as job:
            job.scheduler.apps.wait(job.app_id, math.inf)
            status = job.read().status
        print_json(status.to_json()) if args.json else print(render(status))
        sys.exit(status.exit_code if status.exit_code is not None else int(status.state != "SUCCEEDED"))


# -- as text -----------------------------------------------------------------------------------------------------------

_MAX_SHOWN = 5
"""How many of the last runs and failures are shown, and of the metrics, breakpoints and ranks that do not run."""

_MIN_HANG_S = 5.0
"""Time for which others wait for a rank until it is named."""

_MIN_QUIET_S = 15.0
"""Time for which no rank has printed or called anything until it is said."""

_MAX_ALIKE = 8
"""Replicas of a role in the same state that have a line each; more of them share one."""


def render(status: JobStatus, now: float | None = None) -> str:
    """Return the status as lines without the last line end; a fact that is not known has no line."""
    lines, last = [headline(status)], ""
    for title, text in facts(status, now):
        lines.append(f"  {'' if title == last else title:<13}{text}")
        last = title
    return "\n".join(lines)


def headline(status: JobStatus) -> str:
    return f"{one_line(status.handle)}: {state_and_time(status)}"


def state_and_time(status: JobStatus) -> str:
    """Return the state of a job, and how long it took: ``FAILED after 12.0 s``."""
    word = "after" if status.has_ended else "for"
    return status.state + ("" if status.elapsed is None else f" {word} {show_duration(status.elapsed)}")


def facts(status: JobStatus, now: float | None = None, *, on_page: bool = False) -> list[tuple[str, str]]:
    """Return what is known of a job beside its state, as titles and texts.

    Args:
        on_page: whether somebody reads this later, so that times are not relative. Nor are those of an ended job.
    """
    now = time.time() if now is None else now
    since = None if on_page or status.has_ended else now
    activity, message = status.activity or (), status.cause or status.message
    failure, not_copied = (
        moment if moment is not None and moment.message not in message else None
        for moment in (status.last_failure, status.persist_failure)
    )
    live = [] if status.live is None else [*_live(status.live, now)]
    command = "command of {}: " if len(status.roles) > 1 else "command"
    found = [
        ("cause" if status.state == State.FAILED else "message", message),
        ("raised", raised_at(status.traceback)),
        ("log", one_line(status.log or "") if status.log != status.log_folder else ""),
        ("phase", PHASES.get(status.phase or "", "")),
        ("exit code", "" if status.exit_code is None else str(status.exit_code)),
        ("attempt", _attempt(status)),
        ("restarts", str(status.restarts or "")),
    ]
    found += [("replicas", line) for line in _replicas(status.replicas or ())]
    found += [("hosts", shape_of(status, " (world size {})")), ("spares", one_line(", ".join(status.spares)))]
    if status.checkpoint_bytes is not None:
        found.append(("checkpoints", f"{status.checkpoint_bytes / (1 << 30):.2f} GiB of the memory of each host"))
    found += [("persist", _with_time(not_copied, since))]
    found += [("excluded", exclusion.message) for exclusion in status.excluded]
    found += [("last failure", _with_time(failure, since)), ("hang", _with_time(status.hang, since))]
    found += [("slow", status.slow.message.removeprefix("slow "))] if status.slow is not None else []
    found += [("silent", status.silent.message)] if status.silent is not None else []
    found += [("breakpoint", _with_time(waiting, since)) for waiting in status.breakpoints[:_MAX_SHOWN]]
    found += [
        ("last output", show_when(status.last_output, since) if status.last_output else ""),
        ("progress", _progress(activity) or (f"step {status.step}" if status.step is not None else "")),
    ]
    found += [("trend", text) for text in trend_lines(status)]
    found += account_facts(status.account)
    found += [
        ("collectives", _collectives(activity, status.handle)),
        ("each rank", _resource_use(activity)),
        *live,
        ("logs", one_line(status.log_folder or "")),
    ]
    found += [(command.format(role.role), role.command) for role in status.roles]
    found += [("next", one_line(command)) for command in status.next]
    return [(title, text) for title, text in found if text]


def facts_by_title(status: JobStatus, *, on_page: bool = False) -> dict[str, str]:
    """Return what ``facts`` does, with the texts of one title together."""
    found: dict[str, str] = {}
    for title, text in facts(status, on_page=on_page):
        found[title] = f"{found[title]}; {text}" if title in found else text
    return found


def account_facts(account: Account | None) -> list[tuple[str, str]]:
    """Return what is known of the steps of a job, and of the time of its hosts, as titles and texts."""
    if account is None or account.goodput is None:
        return []
    steps = f"{account.steps:,} done, {account.redone:,} redone"
    ends = [show_duration(seconds) for seconds in account.since_checkpoint if seconds is not None]
    shown = ", ".join(ends[-_MAX_SHOWN:])
    steps += f"; {shown} from the last checkpoint to each failure" if shown else ""
    lost = ", ".join(f"{cause} {show_duration(seconds)}" for cause, seconds in account.lost.items() if seconds >= 0.05)
    return [("steps", steps), ("goodput", f"{account.goodput:.1%}" + (f"; the rest: {lost}" if lost else ""))]


def _replicas(replicas: Sequence[ReplicaState]) -> Iterator[str]:
    """Yield the state of each replica; of many in the same state together."""
    alike: dict[tuple[str, str, int | None, int], list[ReplicaState]] = {}
    for replica in replicas:
        alike.setdefault((replica.role, replica.state, replica.exit_code, replica.restarts), []).append(replica)
    for (role, state, code, restarts), group in alike.items():
        text = state + (f" with code {code}" if code else "") + (f", {show_restarts(restarts)}" if restarts else "")
        if len(group) > _MAX_ALIKE:
            yield f"{role}/{ranges([replica.replica for replica in group])} {text}"
        else:
            yield from (
                f"{role}/{replica.replica} {text}" + (f" on {replica.host}" if replica.host else "")
                for replica in group
            )


def _attempt(status: JobStatus) -> str:
    allowed = "" if status.attempts is None else f" of {status.attempts}"
    return "" if status.attempt is None else f"{status.attempt}{allowed}"


def _with_time(moment: Moment | None, now: float | None) -> str:
    return "" if moment is None else f"{show_when(moment.time, now)}: {moment.message}"


def show_when(seconds: float, now: float | None) -> str:
    """Return how long ago a time was; with ``now`` as None, the time as ``2026-11-22 14:30:00 UTC``."""
    if now is not None:
        return f"{show_duration(now - seconds)} ago"
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(seconds))


def _collectives(ranks: Sequence[RankView], handle: str) -> str:
    running = [rank for rank in ranks if rank.state != "ended"]
    rates = [rank.collectives_per_second for rank in ranks if rank.collectives_per_second is not None]
    awaited, missing = max(((rank.waited_for or 0.0, rank.rank) for rank in ranks), default=(0.0, 0))
    quiet = min((rank.quiet or 0.0 for rank in running), default=0.0)
    text = ""
    if awaited < _MIN_HANG_S and quiet >= _MIN_QUIET_S:
        return f"no rank has called one or printed anything for {show_duration(quiet)}: torchx monarch stacks {handle}"
    if awaited >= _MIN_HANG_S:
        text = f"; others wait for rank {missing}, for {show_duration(awaited)}"
    return f"{_from_to(rates, '{:.1f}')} a second{text}" if rates else ""


def _resource_use(ranks: Sequence[RankView]) -> str:
    running = [rank for rank in ranks if rank.state != "ended"]
    if not running:
        return ""
    cpus = [rank.cpu for rank in running if rank.cpu is not None]
    busy = [device.busy * 100 for rank in running for device in rank.devices]
    parts = [
        f"CPU {_from_to(cpus, '{:.2f}')} cores" if cpus else "",
        f"memory {_from_to([rank.rss_bytes / (1 << 30) for rank in running], '{:.2f}')} GiB",
        f"GPU {_from_to(busy, '{:.0f}')} %" if busy else "",
    ]
    not_running = [f"rank {rank.rank} is {rank.state}" for rank in running if rank.state != "running"]
    more = ["…"] if len(not_running) > _MAX_SHOWN else []
    return "; ".join([", ".join(filter(None, parts)), *not_running[:_MAX_SHOWN], *more])


def _progress(ranks: Sequence[RankView]) -> str:
    reported = [(rank.progress, rank.seconds_left) for rank in ranks if rank.progress is not None]
    if not reported:
        return ""
    progress, seconds_left = min(reported, key=lambda report: report[0].step)
    parts = [f"step {progress.step}" + (f" of {progress.total}" if progress.total is not None else "")]
    if seconds_left is not None:
        parts.append(f"{show_duration(seconds_left)} left")
    if progress.checkpoint is not None:
        parts.append(f"checkpoint of step {progress.checkpoint}")
    parts += [f"{name} {value:.4g}" for name, value in progress.metrics.items()]
    return one_line(", ".join(parts), 200)


def trend_lines(status: JobStatus) -> list[str]:
    """Return a line for each metric that a rank has reported, with how it has changed."""
    shown = [metric for metric in status.metrics if metric.trend]
    width = max((len(metric.name) for metric in shown[:_MAX_SHOWN]), default=0)
    return [f"{one_line(m.name).ljust(width)} {m.trend} {m.last:.4g}" for m in shown[:_MAX_SHOWN]]


def _from_to(values: Sequence[float], form: str) -> str:
    """Return ``0.90`` or ``0.90-1.02``."""
    return "-".join(dict.fromkeys(form.format(value) for value in (min(values), max(values))))


def _live(live: LiveState, now: float) -> Iterator[tuple[str, str]]:
    runs = f"{live.runs} so far"
    if live.run is not None:
        runs += f", run {live.run} runs"
    if live.queued:
        runs += f", {live.queued} queued"
    yield "runs", runs
    for run in live.last_runs[-_MAX_SHOWN:]:
        code = f" with code {run['exit_code']}" if run["exit_code"] else ""
        took = show_duration((run["ended"] or now) - run["started"]) if run["started"] else ""
        time_of = f" {'after' if run['ended'] else 'for'} {took}" if took else ""
        command = " ".join(run["command"].split())
        yield "runs", one_line(f"run {run['run']} {run['state']}{code}{time_of}: {command}", 200)
    if live.run is None:
        limit = f" of {show_duration(live.idle_timeout)}" if live.idle_timeout else ""
        yield "idle", f"{show_duration(live.idle)}{limit}"


def shape_of(status: JobStatus, world: str = "") -> str:
    """Return the number of hosts, and of ranks on each: ``2x4``, and ``world`` with that of all ranks in its ``{}``."""
    if status.hosts is None or status.ranks is None:
        return str(status.hosts or "")
    several = f"{status.hosts} with {status.ranks} ranks"
    size = several if status.ranks % status.hosts else f"{status.hosts}x{status.ranks // status.hosts}"
    return size + world.format(status.ranks)
