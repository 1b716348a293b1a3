# SPDX-License-Identifier: BSD-3-Clause
"""The component by which a ``torchx run`` submits a job of a soak. TorchX reads no annotations that are strings."""

from pathlib import Path

import torchx.specs as specs

from tests.soak.plans import draw


def job(seed: int, number: int, folder: str) -> specs.AppDef:
    """One job of a soak.

    Args:
        seed: of the soak.
        number: of the job.
        folder: where its ranks leave their proofs.
    """
    return draw(seed, number).app(Path(folder))
