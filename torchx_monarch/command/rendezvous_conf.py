# SPDX-License-Identifier: BSD-3-Clause
"""Parse torchrun's rendezvous options: how long hosts wait for each other, and where the ranks meet."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SUPPORTED = ("join_timeout", "last_call_timeout")

_FORM = "use KEY=VALUE,..., such as join_timeout=600,last_call_timeout=30"


@dataclass(frozen=True)
class RendezvousConf:
    """The supported keys of ``--rdzv-conf``; other keys (``close_timeout``, ``timeout``, ...) have no effect.

    Attributes:
        join_timeout: seconds in which the minimum number of hosts must join; None for the host's default.
        last_call_timeout: seconds to wait for further hosts after that.
        keys: all keys that were given, supported or not.
    """

    join_timeout: int | None = None
    last_call_timeout: int = 30
    keys: tuple[str, ...] = ()

    @property
    def unsupported(self) -> tuple[str, ...]:
        """The keys that were given and have no effect."""
        return tuple(key for key in self.keys if key not in _SUPPORTED)

    @classmethod
    def parse(cls, text: str) -> RendezvousConf:
        """Parse ``KEY=VALUE,...`` as torch's ``_parse_rendezvous_config`` does, and seconds as its c10d rendezvous.

        Raises:
            ValueError: the text has another form, or a timeout is not a whole number above 0; the message says what is
                allowed.
        """
        values: dict[str, str] = {}
        for pair in text.split(",") if text.strip() else ():
            key, _, value = (part.strip() for part in pair.partition("="))
            if not key:
                raise ValueError(_FORM)
            if not value:
                raise ValueError(f"{key} has no value; {_FORM}")
            values[key] = value
        return cls(**{key: _seconds(key, values[key]) for key in _SUPPORTED if key in values}, keys=tuple(values))


def _seconds(key: str, text: str) -> int:
    try:
        seconds = int(text)
    except ValueError:
        seconds = 0
    if seconds <= 0:
        raise ValueError(f"{key}={text} is not a whole number of seconds above 0")
    return seconds


def parse_static_endpoint(text: str) -> tuple[str, int]:
    """Parse HOST:PORT as torch's ``parse_rendezvous_endpoint`` does for its static rendezvous, which needs the port.

    Raises:
        ValueError: the text has another form; the message says what is allowed.
    """
    host, separator, port = text.strip().rpartition(":")
    if len(host) > 1 and host[0] == "[" and host[-1] == "]":
        host = host[1:-1]
    if not separator or not re.fullmatch(r"[\w.:-]+", host) or not port.isdigit() or int(port) > 65535:
        raise ValueError("use HOST:PORT with a port from 0 to 65535, such as node0:29500")
    return host, int(port)
