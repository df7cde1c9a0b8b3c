"""`aioarena relay`: a relay as a program, whose own handle is there for readers once it has its seat at the sender."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from aioarena._bench._workers import run
from aioarena._types import TEXT_PREFIX, Handle
from aioarena.exceptions import ArenaError, HandleError
from aioarena.relay import Relay

_EPILOG = """\
examples:
  aioarena relay handle --readers 4 --out /run/engine/handle   its own handle in a file, for the readers here
  ssh engine cat handle | aioarena relay - --readers 4         from a pipe, and printed
  aioarena relay handle --readers 4 --out next --remote-readers 2 --bind tcp://10.0.1.7:0

exit codes: 0 when the channel ended in good order, 130 after Ctrl-C, 143 after SIGTERM; 1 if it was lost or cannot be had;
2 for wrong arguments, which a file is that others can open, or that is no handle. One line says why.
"""


class _UsageError(Exception):
    """What the command line says cannot be meant."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add the command, with all but what other commands have, too."""
    parser = commands.add_parser(
        "relay",
        help="receive a channel from another host, for the readers on this one",
        description="Receive a channel from another host once, and be its sender to the readers on this one: one copy over "
        "the network per host. HANDLE is a file with what Handle.to_text() gave at the sender. It is a secret: the file "
        "has to be yours, and open to nobody else. Once the sender has admitted the relay, it gives out its own handle, "
        "for Handle.from_text() at the readers here. It runs until the channel ends, and takes FILE away with it.",
        epilog=_EPILOG,
    )
    parser.set_defaults(run=lambda arguments: _run(arguments, parser.error))
    parser.add_argument("handle", metavar="HANDLE", help="file with the handle of the channel, or - for standard input")
    parser.add_argument("--readers", type=int, required=True, metavar="N", help="readers on this host")
    parser.add_argument("--rank", type=int, metavar="R", help="which of the sender's readers it is (default: a free one)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the relay's handle to this file (default: print it)"
    )
    parser.add_argument(
        "--on-reader-lost",
        choices=("raise", "continue"),
        default="raise",
        help="whether the loss of a reader here ends the relay, which the sender is told (default: raise)",
    )
    parser.add_argument(
        "--backing",
        choices=("memfd", "shm"),
        default="memfd",
        help="shm: readers may be in other containers that share /dev/shm (default: memfd)",
    )
    parser.add_argument("--remote-readers", type=int, default=0, metavar="N", help="readers on further hosts")
    parser.add_argument("--bind", metavar="ADDRESS", help="where those connect, as tcp://10.0.1.7:0")
    parser.add_argument("--advertise", metavar="HOST", help="what they connect to, if another host than that")
    parser.add_argument("--any-interface", action="store_true", help="allow ADDRESS to mean all interfaces")
    return parser


def _run(arguments: argparse.Namespace, wrong: Callable[[str], NoReturn]) -> int:
    logging.basicConfig(format="aioarena: %(message)s")
    try:
        handle = _read_handle(arguments.handle)
        relay = _make(arguments, handle)
        out = _HandleFile(arguments.out) if arguments.out is not None else None
    except (_UsageError, HandleError, ValueError) as error:
        wrong(str(error))
    try:
        code: int = run(_relay(relay, handle, out), arguments.loop)
        return code
    finally:
        if out is not None:
            out.remove()


def _read_handle(name: str) -> Handle:
    if name.startswith(TEXT_PREFIX):
        raise _UsageError(
            "a handle is a secret, and everybody on this host can read command lines: pass it in a file, or on standard "
            "input"
        )
    if name == "-":
        return Handle.from_text(sys.stdin.read())
    try:
        with open(name, encoding="ascii", errors="replace") as file:
            _check_private(name, os.fstat(file.fileno()))
            return Handle.from_text(file.read())
    except OSError as error:
        raise _UsageError(f"cannot read {name}: {error.strerror or error}") from None


def _check_private(name: str, found: os.stat_result) -> None:
    # Who can write it can have us unpickle what he likes, and who can read it the channel.
    if found.st_uid not in (os.getuid(), 0):
        raise _UsageError(f"{name} belongs to another user (uid {found.st_uid}), who could put any handle there: copy it")
    if found.st_mode & 0o077:
        raise _UsageError(
            f"{name} is open to other users (mode {stat.S_IMODE(found.st_mode):04o}), and a handle is a secret: chmod 600 "
            "it, and make a new channel if somebody may have read it"
        )


def _make(arguments: argparse.Namespace, handle: Handle) -> Relay:
    if bool(arguments.remote_readers) != (arguments.bind is not None):
        raise _UsageError("--remote-readers and --bind go together: how many there are, and where they connect")
    return Relay(
        handle,
        arguments.readers,
        rank=arguments.rank,
        on_reader_lost=arguments.on_reader_lost,
        backing=arguments.backing,
        remote_readers=arguments.remote_readers,
        bind=arguments.bind,
        advertise=arguments.advertise,
        any_interface=arguments.any_interface,
    )


async def _relay(relay: Relay, handle: Handle, out: _HandleFile | None) -> int:
    assert handle.remote is not None
    async with relay:
        print(
            f"aioarena: relays channel {handle.name!r} from {handle.remote.endpoint}, as its reader {relay.rank}",
            file=sys.stderr,
            flush=True,
        )
        text = relay.handle.to_text()
        if out is None:
            print(text, flush=True)
        else:
            out.write(text)
        try:
            await relay.wait_closed()
        except ArenaError:
            return 1  # the relay has said in the log what it was
    return 0


class _HandleFile:
    """The file with the relay's handle: for this user alone, there only as a whole, and only as long as the relay is."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = -1
        try:
            # At once: where it cannot be written, the sender need not learn of a relay that goes again.
            self._fd, self._temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        except OSError as error:
            raise _UsageError(f"cannot write to {path.parent}: {error.strerror or error}") from None

    def write(self, text: str) -> None:
        try:
            with open(self._fd, "w", encoding="ascii") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.write(f"{text}\n")
            os.replace(self._temporary, self._path)
        except OSError as error:
            raise ArenaError(f"cannot write {self._path}: {error.strerror or error}") from error

    def remove(self) -> None:
        """Unless another relay has put its own there by now."""
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
