# SPDX-License-Identifier: BSD-3-Clause
"""The trace of a job reaches a collector, and a collector that does not answer holds no job up."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.local.hosts import Hosts
from tests.otlp_receiver import receiver
from torchx_monarch.insight import events, trace_spans

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


def job(folder: Path, script: str, endpoint: str, *words: str, **environ: str) -> Hosts:
    command = ["torchrun", "--nproc-per-node", "2", "--max-restarts", "1", script, *words]
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, **environ}
    return Hosts(folder, command, options=("--grace", "5", "--preload", ""), environ=variables).start()


def test_one_trace_with_its_attempts_and_phases_and_nothing_that_is_secret(
    folder: Path, script: Callable[[str], str]
) -> None:
    path = script("""
        print(rank)
        if rank == 1 and attempt == 0:
            raise RuntimeError("hunter2 in the message")
    """)
    with receiver() as collector:
        events.append(folder / "events.jsonl", "submitted", "hunter2 is submitted", seconds=0.5)
        hosts = job(
            folder, path, collector.endpoint, "--password", "hunter2", SECRET="hunter2", OTEL_EXPORTER_OTLP_TIMEOUT="60"
        )
        assert hosts.wait() == [0], hosts.err()
        spans = {span.name: span for span in collector.spans}
        bodies = b"".join(collector.bodies)
    assert {span.trace_id for span in collector.spans} == {trace_spans.trace_id("app").to_bytes(16, "big")}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    [root] = [span for span in collector.spans if not span.parent_span_id]
    assert root is spans["job"]
    assert {span.parent_span_id for span in collector.spans} - {b""} <= {span.span_id for span in collector.spans}
    assert {"job", "attempt 1", "attempt 2", "submit", "queue", "ranks", "running"} <= spans.keys()
    assert spans["attempt 1"].status.code == 2 and spans["attempt 2"].status.code == 0 == root.status.code
    types = {attribute.key: attribute.value.string_value for attribute in spans["attempt 1"].attributes}
    assert types["error.type"] == "exit code 1" and types["torchx.role"] == "trainer"
    for secret in (b"hunter2", path.encode(), socket.gethostname().encode()):
        assert secret not in bodies


@pytest.mark.parametrize("answers", ["refused", "never"])
def test_a_dead_collector_changes_nothing(folder: Path, script: Callable[[str], str], answers: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if answers == "never":
            listener.listen()
        hosts = job(folder, script("print(rank)"), f"http://127.0.0.1:{listener.getsockname()[1]}")
        assert hosts.wait() == [0]
    assert "SUCCEEDED" in hosts.err()
