# SPDX-License-Identifier: BSD-3-Clause
"""A rank with stubs in place of torch, which ``test_rank_recorder`` starts. It reads them, and then orders."""

from __future__ import annotations

import json
import pickle
import runpy
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torchx_monarch

RECORDER = str(Path(torchx_monarch.__file__).parent / "host" / "ranks" / "rank_recorder.py")


def dumping(by_backend: dict[str, list[Any]]) -> Callable[..., bytes]:
    """A function of the binding; one with several recorders has an argument for them, as pybind11 says in its text."""

    def dump(includeCollectives: bool, includeStackTraces: bool, **recorder: str) -> bytes:  # noqa: N803
        assert not includeStackTraces and (not recorder or len(by_backend) > 1)
        entries = by_backend[recorder.get("backend", "")]
        status = {str(entry["pg_id"]): {"last_enqueued_collective": entry["collective_seq_id"]} for entry in entries}
        found = {"pg_status": status, "pg_config": {}, "entries": entries}
        return pickle.dumps(found if includeCollectives else {**found, "entries": []})

    dump.__doc__ = f"_dump(includeCollectives: bool{', backend: str' * (len(by_backend) > 1)})"
    return dump


stub = json.loads(sys.stdin.readline())
groups = {name: types.SimpleNamespace(group_desc="") for name in stub["configs"]}
world = types.SimpleNamespace(
    pg_names={id(groups[name]): name for name in groups},
    pg_group_ranks={id(groups[name]): {0: 0, 1: 1} for name in groups},
    pg_backend_config={id(groups[name]): config for name, config in stub["configs"].items()},
)
c10d: Any = types.ModuleType("distributed_c10d")
c10d.__dict__.update(_update_default_pg=lambda group: None, _world=world)
binding: Any = types.ModuleType("_distributed_c10d")
binding.__dict__.update({name: dumping(recorders) for name, recorders in stub["functions"].items()})
sys.modules.update({"torch.distributed.distributed_c10d": c10d, "torch._C._distributed_c10d": binding})
send_failure = runpy.run_path(RECORDER)["watch"](stub["path"])
c10d._update_default_pg(groups["0"])
if sys.stdin.readline():
    send_failure(5)
sys.stdin.readline()
