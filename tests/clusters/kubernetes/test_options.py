# SPDX-License-Identifier: BSD-3-Clause
"""What monarch_kubernetes refuses before it asks any cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torchx.runner import Runner
from torchx.specs import AppDef, InvalidRunConfigException, Role

from torchx_monarch.schedulers import monarch_kubernetes


@pytest.mark.parametrize(
    "cfg, words",
    [
        ({"mode": "jobset"}, "`mode` is 'jobset'; allowed are auto, job, volcano"),
        ({"grace": -1}, "`grace` is -1; it is a number of seconds"),
        ({"pull_timeout": -1}, "`pull_timeout` is -1; allowed is 0 or more"),
        ({"mode": "job", "queue": "a"}, "`queue` is 'a'; it is for mode=volcano"),
        ({"mode": "volcano", "kueue_queue": "a"}, "`kueue_queue` is 'a'; it is for mode=job"),
        ({"namespace": "No Such"}, "`namespace` is 'No Such'; a namespace is called by up to 63 lower-case letters"),
        ({"kueu_queue": "a"}, "kueu_queue.*kueue_queue"),
    ],
)
def test_options_that_make_no_sense_are_named(
    cfg: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nosuch"))
    app = AppDef("app", [Role("r", "image", entrypoint="true")])
    with (
        Runner("torchx", {"monarch_kubernetes": monarch_kubernetes}) as runner,
        pytest.raises(InvalidRunConfigException, match=words),
    ):
        runner.dryrun(app, "monarch_kubernetes", cfg=cfg)
