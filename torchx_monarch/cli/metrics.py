# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch metrics``: print the metrics of a job as Prometheus reads them."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from torchx_monarch.cli.handles import add_handle
from torchx_monarch.cli.jobs import JobFacts, opened_job
from torchx_monarch.cli.output import add_json, write_output
from torchx_monarch.client.hosts import Hosts, say
from torchx_monarch.client.rank_queries import ask_samples
from torchx_monarch.exceptions import AllocationError, RefusedError, UnreachableError
from torchx_monarch.insight.rank_sample import RankSample
from torchx_monarch.insight.timeline import Timeline
from torchx_monarch.model.role_spec import WorkloadKind
from torchx_monarch.model.state import State
from torchx_monarch.schedulers.job_status import JobStatus
from torchx_monarch.system.untrusted_text import one_line

PREFIX = "torchx_monarch_"
"""What the names of all metrics begin with."""

_OF_RANKS: tuple[tuple[str, str, Callable[[RankSample], float | None]], ...] = (
    ("cpu_seconds_total", "processor time of the ranks and their children", lambda rank: rank.cpu_seconds),
    ("resident_memory_bytes", "resident memory of the ranks and their children", lambda rank: rank.rss_bytes),
    ("collectives_total", "collectives that the ranks called", lambda rank: rank.collectives if rank.groups else None),
    (
        "gpu_memory_bytes",
        "memory that the ranks have on GPUs",
        lambda rank: sum(device.memory_bytes for device in rank.devices) if rank.devices else None,
    ),
    ("last_output_timestamp_seconds", "when the ranks printed something last", lambda rank: rank.last_output),
)
"""Name, meaning and value of the metrics that each rank has; None for a value that is not known."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_handle(parser)
    parser.add_argument("--per-rank", action="store_true", help="with metrics of each rank: as many as there are ranks")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the file to write, in one step, as node_exporter's textfile collector needs it (default: print)",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Print the metrics."""
    with opened_job(args.handle) as job:
        facts = job.read(whole_log=True)
    app_id = facts.app.app_id
    families = job_families(facts.status, facts.timeline, app_id)
    if not facts.status.has_ended:
        families += _rank_families(facts, app_id, args.per_rank)
    if args.json:
        shown = json.dumps({"metrics": [family.to_json() for family in families if family.values]}, indent=1) + "\n"
    else:
        shown = render(families)
    if args.output is None:
        print(shown, end="")
    else:
        write_output(args.output, shown)


def _rank_families(facts: JobFacts, job: str, per_rank: bool) -> list[Family]:
    """Return the metrics of the ranks of all roles; none of a role whose hosts do not answer."""
    samples: dict[str, list[RankSample]] = {}
    for role in facts.app.roles:
        name = role.spec.name
        if role.spec.workload in (WorkloadKind.RANKS, WorkloadKind.SESSION):
            try:
                samples[name], missing = ask_samples(Hosts(facts.status.handle, name))
            except (UnreachableError, RefusedError, AllocationError) as error:
                say(f"no metrics of the ranks of {one_line(name)}: {error}")
                continue
            for replica, why in missing.items():
                say(f"no metrics of the ranks of host {replica}: {one_line(why, 300)}")
    return rank_families(samples, job, per_rank)


def job_families(status: JobStatus, timeline: Timeline, job: str) -> list[Family]:
    """Return the metrics of a job as a whole, and of its roles' attempts and phases; ``job`` is the app's id."""
    label = {"job": job}
    state = Family(f"{PREFIX}job_state", "1 for the state of the job, 0 for all others")
    for job_state in State:
        state.add({**label, "state": job_state.value}, int(job_state.value == status.state))
    found = [state]
    for name, text, value in (
        ("job_submitted_timestamp_seconds", "when the job was submitted", status.submitted),
        ("job_started_timestamp_seconds", "when the job began to run", status.started),
        ("job_ended_timestamp_seconds", "when the job ended", status.ended),
        ("job_elapsed_seconds", "seconds that the job has run, or has waited to run", status.elapsed),
        ("job_exit_code", "exit code of the job that has ended", status.exit_code),
        ("job_hosts", "number of hosts of the job", status.hosts),
        ("job_ranks", "number of ranks that were started last", status.ranks),
        ("job_restarts_total", "restarts of the app, of a replica or of ranks", status.restarts),
    ):
        family = Family(PREFIX + name, text)
        family.add(label, value)
        found.append(family)
    return [*found, *_of_timeline(timeline, label)]


def _of_timeline(timeline: Timeline, label: dict[str, str]) -> list[Family]:
    attempts, phases = Counter[str](), defaultdict[tuple[str, str, str], float](float)
    for span in timeline.spans:
        if span.kind == "attempt":
            attempts[span.role] += 1
        elif span.kind == "phase":
            around = timeline.spans[span.parent or 0]
            attempt = str(around.number) if around.kind == "attempt" else ""
            phases[span.role, attempt, span.name] += span.seconds
    counted = Family(f"{PREFIX}attempts_total", "attempts of the role's ranks, of all runs")
    for role, count in attempts.items():
        counted.add({**label, "role": role}, count)
    spent = Family(f"{PREFIX}phase_seconds_total", "seconds in a phase; the phases of a role add up to its whole time")
    for (role, attempt, phase), seconds in phases.items():
        spent.add({**label, "role": role, "attempt": attempt, "phase": phase}, round(seconds, 3))
    return [counted, spent]


def rank_families(roles: Mapping[str, Sequence[RankSample]], job: str, per_rank: bool) -> list[Family]:
    """Return the metrics of the ranks of an app, for each role and attempt, and perhaps of each rank."""
    attempts = defaultdict[tuple[str, int], list[RankSample]](list)
    for role, samples in roles.items():
        for sample in samples:
            attempts[role, sample.attempt + 1].append(sample)
    groups = [
        ({"job": job, "role": role, "attempt": str(attempt)}, ranks) for (role, attempt), ranks in attempts.items()
    ]
    states = Family(f"{PREFIX}ranks", "number of ranks in a state")
    for labels, ranks in groups:
        for state, count in sorted(Counter(rank.state for rank in ranks).items()):
            states.add({**labels, "state": state}, count)
    found = [states]
    for name, text, value in _OF_RANKS:
        total, single = Family(f"{PREFIX}{name}", f"{text}, of all ranks"), Family(f"{PREFIX}rank_{name}", text)
        combine = max if name.endswith("_timestamp_seconds") else sum
        for labels, ranks in groups:
            measured = [(rank, number) for rank in ranks if (number := value(rank)) is not None]
            if measured:
                total.add(labels, combine(number for _, number in measured))
            for rank, number in measured:
                single.add({**labels, "rank": str(rank.rank), "host": rank.host}, number)
        found += [total, single] if per_rank else [total]
    return found


# -- the text format, as scrapers and node_exporter's textfile collector read it ---------------------------------------


@dataclasses.dataclass
class Family:
    """The values of one metric.

    Attributes:
        name: its name, which ends in its unit, and in ``_total`` if it is a counter.
        help: what it means, in one line.
        values: labels and value of each; values with equal labels would make the text invalid.
    """

    name: str
    help: str
    values: list[tuple[Mapping[str, str], float]] = dataclasses.field(default_factory=list)

    def add(self, labels: Mapping[str, str], value: float | None) -> None:
        """Add a value; none if it is None. Labels that are empty are left out, which means the same to Prometheus."""
        if value is not None:
            self.values.append(({name: text for name, text in labels.items() if text}, value))

    @property
    def type(self) -> str:
        """``counter`` or ``gauge``, as the name tells."""
        return "counter" if self.name.endswith("_total") else "gauge"

    def to_json(self) -> dict[str, object]:
        """Return the metric as JSON values."""
        values = [{"labels": dict(labels), "value": value} for labels, value in self.values]
        return {"name": self.name, "help": self.help, "type": self.type, "values": values}


def render(families: Iterable[Family]) -> str:
    """Return the metrics as text; a metric without a value is left out."""
    lines: list[str] = []
    for family in families:
        if family.values:
            lines += [f"# HELP {family.name} {_escape(family.help)}", f"# TYPE {family.name} {family.type}"]
            lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.values]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escape(_printable(text), quoted=True)}"' for name, text in labels.items())
    return f"{{{shown}}}" if shown else ""


def _printable(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))  # the format has an escape for a line feed, and none for others


def _escape(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
