# SPDX-License-Identifier: BSD-3-Clause
"""Run what stands in for a cluster's parts beside the real API server: ``stand_ins.py FOLDER PORT``; SIGTERM ends it.

FOLDER has the server's certificate and ``direct.yaml``, an administrator's kubeconfig. When all parts run, the file
``proxy.port`` in it holds the port that clients connect to.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from tests.clusters.kubernetes.api_proxy import ApiProxy
from tests.clusters.kubernetes.controllers import IndexedJobs
from tests.clusters.kubernetes.kubelet import Kubelet
from torchx_monarch.backends.kubernetes.connection import Api, KubernetesError

_PODS, _JOBS, _SERVICES = "/api/v1/pods", "/apis/batch/v1/jobs", "/api/v1/services"

_AT_MOST_EVERY, _AT_LEAST_EVERY = 0.1, 0.5
"""Seconds between two looks while objects change, and while none does, for what is due at a time."""

_WITHOUT_PODS_EVERY = 5.0
"""Seconds between two looks while there are no pods, so that nothing is due: most of a run has no use for a cluster."""


def main(folder: Path, port: int) -> None:
    ended, changed, changed_kinds = threading.Event(), threading.Event(), set[str]()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    os.environ["KUBECONFIG"] = str(folder / "direct.yaml")
    api = Api.from_environment()
    kubelet, indexed_jobs = Kubelet(api, folder), IndexedJobs(api)
    proxy = ApiProxy(folder, port)

    def look() -> None:
        """Have each part act on the objects that there are; each request costs the server a millisecond."""
        if _SERVICES in changed_kinds:
            changed_kinds.discard(_SERVICES)
            kubelet.services = api.get(_SERVICES)["items"]
        pods = api.get(_PODS)["items"]
        kubelet.look(pods)
        if _JOBS in changed_kinds:
            indexed_jobs.look(pods)

    def repeat() -> None:
        while not ended.is_set():
            changed.clear()
            try:
                look()
            except Exception:
                traceback.print_exc()
                time.sleep(0.5)
            time.sleep(_AT_MOST_EVERY)
            changed.wait((_AT_LEAST_EVERY if kubelet.pods else _WITHOUT_PODS_EVERY) - _AT_MOST_EVERY)

    def watch(path: str) -> None:
        while not ended.is_set():
            with contextlib.suppress(KubernetesError):  # the server may end first
                for _ in api.lines(path, watch="true"):
                    changed_kinds.add(path)
                    changed.set()
            changed_kinds.discard(path)
            time.sleep(_AT_LEAST_EVERY)

    for path in (_PODS, _JOBS, _SERVICES):
        threading.Thread(target=watch, args=(path,), daemon=True).start()
    looking = threading.Thread(target=repeat, daemon=True)
    looking.start()
    (folder / "proxy.port.new").write_text(str(proxy.port))
    (folder / "proxy.port.new").rename(folder / "proxy.port")
    ended.wait()
    looking.join(5)
    proxy.close()
    kubelet.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
