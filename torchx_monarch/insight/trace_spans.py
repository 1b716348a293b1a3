# SPDX-License-Identifier: BSD-3-Clause
"""The spans of a job for OpenTelemetry: its timeline with ids, attributes and categories of failures.

They hold names of phases and of the role, numbers, exit codes and times. They hold no message, argument, value of a
variable, path, or name of a machine: readers of traces need not be allowed to read the job's log.
"""

from __future__ import annotations

import dataclasses
import hashlib
import signal
from collections.abc import Mapping, Sequence

from torchx_monarch.insight import timeline
from torchx_monarch.insight.events import Event
from torchx_monarch.insight.timeline import Span

_KINDS = frozenset({"job", "run", "attempt", "phase", "import"})
"""The kinds of the timeline's spans that are exported. There is no span for each rank: a job may have thousands."""

_SENT = ("attempt", "code", "failed_at", "rank", "replica", "run", "waited")
"""The fields of events that spans need, all numbers."""

_RESTARTS = frozenset({"restart", "requeue"})
"""The kinds of events after which the hosts of a role start again."""


@dataclasses.dataclass(frozen=True)
class TraceSpan:
    """A span of a trace; its name is ``job``, ``run 3``, ``attempt 2``, or that of the phase.

    Attributes:
        attributes: its attributes, with OpenTelemetry's names where it has some.
        error: category of the failure; empty if it has not failed.
    """

    name: str
    id: int
    parent: int | None
    start: float
    end: float
    attributes: Mapping[str, str | int]
    error: str = ""


def trace_id(app: str) -> int:
    """Return the trace id of an app, of 128 bits, which depends on nothing but the app's id."""
    return int.from_bytes(_digest("trace", app)[:16], "big") or 1


def reduce(kind: str, time: float, seconds: float | None, fields: Mapping[str, object]) -> Event:
    """Return what spans need of an event, so that nothing else reaches the process that sends them."""
    event: Event = {"time": time, "kind": kind, "message": ""}
    if seconds is not None:
        event["seconds"] = seconds
    event.update({name: fields[name] for name in _SENT if isinstance(fields.get(name), (int, float))})
    hosts = fields.get("hosts")
    if isinstance(hosts, (list, tuple)):
        mappings = [host for host in hosts if isinstance(host, Mapping)]
        event["hosts"] = [{name: host[name] for name in ("replica", "imported") if name in host} for host in mappings]
    return event


def since_last_restart(happened: Sequence[Event], role: str) -> list[Event]:
    """Return the events, reduced, from the last start of a role's hosts on; of other roles none."""
    ours = [event for event in happened if event.get("role") in (None, role)]
    begun = max((at for at, event in enumerate(ours) if event["kind"] in _RESTARTS), default=0)
    return [reduce(event["kind"], event["time"], event.get("seconds"), event) for event in ours[begun:]]


def build(happened: Sequence[Event], app: str, role: str, restart: int, *, end: float) -> list[TraceSpan]:
    """Return the spans of one start of a role's hosts, parents before their children.

    Args:
        end: when the hosts ended, or a time after that of the last event: what has not ended ends then.
    """
    ids: dict[int, int] = {}
    found: list[TraceSpan] = []
    spans = timeline.build(happened, [role], end=end).spans
    for at, span in enumerate(spans):
        if span.kind not in _KINDS:
            continue
        parent = span.parent
        while parent is not None and parent not in ids:
            parent = spans[parent].parent
        name = f"{span.kind} {span.number}" if span.kind in ("run", "attempt") else span.name
        place = ids[parent] if parent is not None else restart
        # The times of spans that have begun never change, as events are only added.
        ids[at] = _span_id(app, role, str(place), span.kind, name, str(span.number), f"{span.start:.6f}")
        found.append(
            TraceSpan(
                name,
                ids[at],
                None if parent is None else ids[parent],
                span.start,
                span.end,
                _attributes(span, app, role, restart),
                _error(span, happened),
            )
        )
    return found


def _attributes(span: Span, app: str, role: str, restart: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {"torchx.app.id": app, "torchx.role": role, "torchx.restart": restart}
    if span.kind in ("run", "attempt"):
        found[f"torchx.{span.kind}"] = span.number
    if span.kind == "import":
        found["torchx.replica"] = span.number
    if span.code is not None:
        found["process.exit.code"] = span.code
    return found


def _error(span: Span, happened: Sequence[Event]) -> str:
    """Return the category of the failure with which a span ended; empty for none."""
    if span.kind == "run":
        return _of_code(span.code)
    if span.kind == "job":
        last = next((event for event in reversed(happened) if event["kind"] == "result"), None)
        return _of_code(last.get("code")) if last is not None else ""
    return _error_of_attempt(span, happened) if span.kind == "attempt" else ""


def _error_of_attempt(attempt: Span, happened: Sequence[Event]) -> str:
    inside = [event for event in happened if attempt.start <= event["time"] <= attempt.end]
    failed = next((event for event in inside if event["kind"] in ("failure", "preempted")), None)
    if failed is None:
        return ""
    if failed["kind"] == "preempted":
        return "preempted"
    hangs = [event["kind"] for event in inside[: inside.index(failed)] if event["kind"] in ("hang", "hang_end")]
    if hangs and hangs[-1] == "hang":
        return "hang"
    if "rank" not in failed:
        return "host failure"
    # The event that follows has the exit code of the rank that failed first.
    decided = (event for event in happened if event["time"] >= failed["time"] and "code" in event)
    return _of_code(next((event["code"] for event in decided), None)) or "rank failure"


def _of_code(code: object) -> str:
    """Return the category of an exit code: ``exit code 1``, ``SIGKILL`` for -9 and for 137; empty for 0 and None."""
    if not isinstance(code, int) or code == 0:
        return ""
    number = -code if code < 0 else code - 128
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit code {code}"


def _span_id(*words: str) -> int:
    return int.from_bytes(_digest("span", *words)[:8], "big") or 1


def _digest(*words: str) -> bytes:
    return hashlib.sha256("\0".join(("torchx-monarch", *words)).encode()).digest()
