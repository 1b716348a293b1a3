# SPDX-License-Identifier: BSD-3-Clause
"""``torchx monarch compare``: two jobs, their curves over each other, and in what they differ."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Mapping, Sequence

from torchx_monarch.cli.arguments import HELP, resolve
from torchx_monarch.cli.explain import mask, submitted_differences
from torchx_monarch.cli.jobs import JobFacts, opened_job
from torchx_monarch.cli.output import STDOUT, print_json, write_output
from torchx_monarch.cli.status import facts_by_title, headline
from torchx_monarch.insight.metrics import sparklines
from torchx_monarch.insight.report_page import CURVE_SIZE, curves, templates
from torchx_monarch.schedulers.job_metrics import last_series
from torchx_monarch.system.untrusted_text import one_line

_WIDTH = 48
"""Characters of a curve."""

_COMPARED = (
    "cause",
    "raised",
    "hang",
    "exit code",
    "restarts",
    "hosts",
    "excluded",
    "last failure",
    "steps",
    "goodput",
)
"""The facts of a status that are compared."""

Jobs = tuple[JobFacts, JobFacts]

Difference = tuple[str, str, str]
"""In what two jobs differ, and what it is of each."""

ByStep = Mapping[str, Mapping[int, float]]
"""The values of each metric by step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("handle", metavar="A", help=HELP)
    parser.add_argument("other", metavar="B", help="the other app, named in the same way")
    parser.add_argument("-o", "--output", metavar="FILE", help="write a page to this file; - for stdout")


def run(args: argparse.Namespace) -> None:
    jobs = read_both(args.handle, resolve(args.other))
    differing = [*differences(*jobs)]
    if args.output:
        write_output(args.output, page_of(jobs))
    if args.json and args.output not in STDOUT:
        print_json(
            {
                "jobs": [job.status.to_json() for job in jobs],
                "metrics": [
                    {"name": name, "step": step, "values": values}
                    for name, (step, values) in _at_last_step(*map(_values, jobs)).items()
                ],
                "differences": [{"what": what, "values": values} for what, *values in differing],
            }
        )
    elif not args.output:
        print("\n".join(_lines(jobs, differing)))


def read_both(handle: str, other: str) -> Jobs:
    with opened_job(handle) as first, opened_job(other) as second:
        return first.read(), second.read()


def differences(one: JobFacts, other: JobFacts) -> Iterator[Difference]:
    """Yield in what two jobs differ, with the texts of both: how they went, where, and what was submitted."""
    texts: list[Mapping[str, str]] = []
    for job in (one, other):
        machines = dict.fromkeys(replica.host for replica in job.status.replicas or () if replica.host)
        texts.append({**facts_by_title(job.status, on_page=True), "machines": ", ".join(machines)})
    for title in (*_COMPARED, "machines"):
        first, second = (stated.get(title, "") for stated in texts)
        if first != second:
            yield title, mask(first), mask(second)
    several = len(one.status.roles) > 1
    for role, what, first, second in submitted_differences(one.app, other.app):
        yield one_line(f"{role} {what}" if several else what), first, second


# -- curves ------------------------------------------------------------------------------------------------------------


def _values(job: JobFacts) -> ByStep:
    """Return what a job has reported; the values of the last attempt count."""
    found: dict[str, dict[int, float]] = {}
    for point in itertools.chain(*last_series(job.metrics)):
        for name, (_, _, last) in point.metrics.items():
            found.setdefault(name, {})[point.step] = last
    return found


def _at_last_step(one: ByStep, other: ByStep) -> dict[str, tuple[int, list[float | None]]]:
    """Return the last step to which both jobs have come, and their values there, for each metric that both have."""
    steps = {name: min(max(one[name]), max(other[name])) for name in one if name in other}
    return {name: (step, [_until(values[name], step) for values in (one, other)]) for name, step in steps.items()}


def _until(values: Mapping[int, float], step: int) -> float | None:
    """Return the value at a step, or at the last one before it; None without one."""
    return values[max(found)] if (found := [at for at in values if at <= step]) else None


# -- for people --------------------------------------------------------------------------------------------------------


def _lines(jobs: Jobs, differing: Sequence[Difference]) -> Iterator[str]:
    yield from (f"{letter}  {headline(job.status)}" for letter, job in zip("AB", jobs, strict=True))
    rows = [*_curves(jobs), *differing]
    width = max((len(title) for title, _, _ in rows), default=0)
    for title, first, second in rows:
        yield f"  {one_line(title).ljust(width)}  A  {first}".rstrip()
        yield f"  {''.ljust(width)}  B  {second}".rstrip()
    if not differing:
        yield "  nothing else differs that is known of both"


def _curves(jobs: Jobs) -> Iterator[Difference]:
    """Yield for each metric the curves of both jobs, over the same steps and on one scale."""
    values = [*map(_values, jobs)]
    common = _at_last_step(*values)
    for name in dict.fromkeys((*values[0], *values[1])):
        of_jobs = [found.get(name, {}) for found in values]
        steps = [*of_jobs[0], *of_jobs[1]]
        first, last = min(steps), max(steps)
        width = min(_WIDTH, last - first + 1)
        ends = [first + (last - first + 1) * (at + 1) // width - 1 for at in range(width)]
        drawn = sparklines([[_until(own, end) if own and end <= max(own) else None for end in ends] for own in of_jobs])
        texts = []
        for at, own in enumerate(of_jobs):
            text = f"{drawn[at]}  {own[max(own)]:.4g} at step {max(own)}" if own else ""
            if name in common and (found := common[name][1][at]) is not None and common[name][0] < max(own):
                text += f", {found:.4g} at step {common[name][0]}"
            texts.append(text)
        yield name, texts[0], texts[1]


def page_of(jobs: Jobs) -> str:
    return (
        templates()
        .get_template("compare.html")
        .render(
            jobs=[{"state": job.status.state, "text": headline(job.status)} for job in jobs],
            curves=curves(*(last_series(job.metrics) for job in jobs)),
            curve_size=CURVE_SIZE,
            differences=[*differences(*jobs)],
        )
    )
