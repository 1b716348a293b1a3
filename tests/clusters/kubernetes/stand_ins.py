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
from collections.abc import Callable
from pathlib import Path

from tests.clusters.kubernetes.api_proxy import ApiProxy
from tests.clusters.kubernetes.controllers import VOLCANO, IndexedJobs, VolcanoJobs
from tests.clusters.kubernetes.kubelet import Kubelet
from torchx_monarch.backends.kubernetes.native import Api, KubernetesError

_WATCHED = ("/api/v1/pods", "/apis/batch/v1/jobs", f"{VOLCANO}/jobs")

_AT_MOST_EVERY, _AT_LEAST_EVERY = 0.1, 0.5
"""Seconds between two looks of one part while objects change, and while none does, for what is due at a time."""

_WITHOUT_PODS_EVERY = 5.0
"""Seconds between two looks while there are no pods, so that nothing is due: most of a run has no use for a cluster."""


def main(folder: Path, port: int) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    os.environ["KUBECONFIG"] = str(folder / "direct.yaml")
    kubelet = Kubelet(Api.from_environment(), folder)
    proxy = ApiProxy(folder, port)

    def repeat(look: Callable[[], None], changed: threading.Event) -> None:
        while not ended.is_set():
            changed.clear()
            try:
                look()
            except Exception:
                traceback.print_exc()
                time.sleep(0.5)
            time.sleep(_AT_MOST_EVERY)
            changed.wait((_AT_LEAST_EVERY if kubelet.pods else _WITHOUT_PODS_EVERY) - _AT_MOST_EVERY)

    def watch(path: str, api: Api) -> None:
        while not ended.is_set():
            with contextlib.suppress(KubernetesError):  # Volcano's kind does not exist until a test has created it
                for _ in api.lines(path, watch="true"):
                    for _, changed in looks:
                        changed.set()
            time.sleep(_AT_LEAST_EVERY)

    parts = (kubelet, IndexedJobs(Api.from_environment()), VolcanoJobs(Api.from_environment()))
    looks = [(part.look, threading.Event()) for part in parts]
    threads = [threading.Thread(target=repeat, args=look, daemon=True) for look in looks]
    watchers = [threading.Thread(target=watch, args=(path, Api.from_environment()), daemon=True) for path in _WATCHED]
    for watcher in watchers:
        watcher.start()
    for thread in threads:
        thread.start()
    (folder / "proxy.port.new").write_text(str(proxy.port))
    (folder / "proxy.port.new").rename(folder / "proxy.port")
    ended.wait()
    for thread in threads:
        thread.join(5)
    proxy.close()
    kubelet.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
