# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run what stands in for a cluster's parts beside the real API server: ``stand_ins.py FOLDER PORT``; SIGTERM ends it.

FOLDER has the server's certificate and ``direct.yaml``, an administrator's kubeconfig. When all parts run, the file
``proxy.port`` in it holds the port that clients connect to.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.clusters.kubernetes.api_proxy import ApiProxy
from tests.clusters.kubernetes.controllers import IndexedJobs, VolcanoJobs
from tests.clusters.kubernetes.kubelet import Kubelet
from torchx_monarch.backends.kubernetes.native import Api

_EVERY = 0.1


def main(folder: Path, port: int) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    os.environ["KUBECONFIG"] = str(folder / "direct.yaml")
    kubelet = Kubelet(Api.from_environment(), folder)
    proxy = ApiProxy(folder, port)

    def repeat(look: Callable[[], None]) -> None:
        while not ended.is_set():
            try:
                look()
            except Exception:
                traceback.print_exc()
                time.sleep(0.5)
            time.sleep(_EVERY)

    looks = (kubelet.look, IndexedJobs(Api.from_environment()).look, VolcanoJobs(Api.from_environment()).look)
    threads = [threading.Thread(target=repeat, args=(look,), daemon=True) for look in looks]
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
