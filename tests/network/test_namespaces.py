# SPDX-License-Identifier: BSD-3-Clause
"""That the machines of a test go with it."""

from __future__ import annotations

import os

import pytest

from tests.network.namespaces import Network, requires_namespaces

pytestmark = requires_namespaces


def test_a_network_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    add = Network._add

    def noted(self: Network, name: str) -> None:
        made.append(name)
        add(self, name)

    monkeypatch.setattr(Network, "_add", noted)
    monkeypatch.setattr(Network, "address", lambda self, machine: "10.99.0.1" if machine == 0 else "nonsense")
    with pytest.raises(AssertionError, match="nonsense"):
        Network(2)
    assert len(made) == 3
    assert not [name for name in made if os.path.exists(f"/run/netns/{name}")]


def test_a_network_is_gone_after_its_removal() -> None:
    network = Network(2)
    names = [network.namespace(machine) for machine in (0, 1)]
    assert all(os.path.exists(f"/run/netns/{name}") for name in names)
    network.remove()
    assert not [name for name in names if os.path.exists(f"/run/netns/{name}")]
