# SPDX-License-Identifier: BSD-3-Clause
"""Call a function in each rank of a run, and leave what it returns in a file: ``python -m torchx_monarch.function``.

The arguments are the name of the function, for listings, and the path of a file with a pickle of the function, its
arguments and its encoding of results. ``client.function`` makes the pickle; the host (``host.rank_runs``) writes it to
that file, and sends to the client what ranks write beside it: ``value_N`` for rank N, a line with the kind of the
value, and its data.

Functions and classes of the client's ``__main__`` are put into that of the rank, where pickle looks for them. A process
that ``multiprocessing`` spawns executes this module as its ``__mp_main__``, and gets them, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
from typing import Any, Literal

MODULE = "torchx_monarch.function"

Encoding = Literal["pickle", "json"]
"""How the values of ranks travel to the client. ``pickle``: any value that cloudpickle can pickle, and exceptions;
``json``: values that JSON has, of which the client unpickles nothing."""

MAX_CALL_BYTES = 4 << 20
"""Maximum size of a function with its arguments, as a pickle. As base64 it is part of a message to each host
(``transport.messages.MAX_MESSAGE``)."""

MAX_VALUE_BYTES = 16 << 20
"""Maximum size of what a rank returns, as a pickle or JSON. All of it passes through replica 0."""

VALUE = "value_"
"""The name of the file with a rank's value, without the rank."""

_FILE = "MONARCH_FUNCTION"
"""The variable by which spawned processes find the file with the function."""


def encode_value(value: object, encoding: Encoding) -> bytes:
    """Return the content of a rank's file: the encoded value, or of kind ``none`` the reason why there is none."""
    import cloudpickle

    what = f"a {type(value).__name__} that cannot be sent as {'JSON' if encoding == 'json' else 'a pickle'}"
    try:
        data: bytes = json.dumps(value).encode() if encoding == "json" else cloudpickle.dumps(value)
    except Exception as error:  # whatever a method of the value raises
        return f"none\n{what}: {error}".encode(errors="replace")
    if len(data) > MAX_VALUE_BYTES:
        limit = f"the limit is {MAX_VALUE_BYTES >> 20} MiB. Save it to a file, and return the path"
        return f"none\na {type(value).__name__} of {len(data) / (1 << 20):.1f} MiB; {limit}".encode()
    return f"{encoding}\n".encode() + data


def main(path: str) -> None:
    """Call the function in the file ``path``, and write its value or its exception beside the file."""
    value_path = os.path.join(os.path.dirname(path), f"{VALUE}{os.environ.get('RANK', '0')}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(value_path)  # of an earlier attempt
    os.environ[_FILE] = path
    try:
        function, args, kwargs, encoding, sys.argv, names = _load(path)
        vars(sys.modules["__main__"]).update(names)
        encoded = encode_value(function(*args, **kwargs), encoding)
    except Exception as error:
        content = encode_value(error, "pickle")
        if content.startswith(b"pickle\n"):
            _write(value_path, b"exception\n" + content.partition(b"\n")[2])
        raise
    _write(value_path, encoded)


def _load(path: str) -> Any:
    """Return the function, its arguments, its encoding of results, ``sys.argv``, and what is put into ``__main__``."""
    with open(path, "rb") as file:
        data = file.read()
    # Two pickles: the second has code of a Python version, and needs the modules of its script's folder.
    version, folder, call = pickle.loads(data)
    if version != sys.version_info[:2]:
        raise RuntimeError(f"Python {version[0]}.{version[1]} has sent this function: use it for the ranks, too")
    if folder:
        sys.path.insert(0, os.path.abspath(folder))
    try:
        return pickle.loads(call)
    except ModuleNotFoundError as error:
        error.msg = f"{error}. Ranks import it from the workspace, or from a package that their Python has"
        error.args = (error.msg,)
        raise


def _write(path: str, content: bytes) -> None:
    with open(f"{path}.tmp", "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(content)
    os.replace(f"{path}.tmp", path)


if __name__ == "__main__":
    # That of another module object: the client's names replace those of this one.
    from torchx_monarch import function

    function.main(sys.argv[-1])
elif __name__ == "__mp_main__":
    globals().update(_load(os.environ[_FILE])[-1])
