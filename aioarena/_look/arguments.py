"""Arguments of the commands that look, for the command line's parser."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from aioarena._look import commands

_Commands = Any  # argparse's _SubParsersAction, whose type has no public name

# Seconds between two looks: fewer show the looking more than the channel, more are a mistake.
_LEAST, _MOST = 0.05, 3600.0


def add(parsers: _Commands) -> None:
    """Add ``ps``, ``top``, ``inspect``, ``doctor`` and ``clean``."""
    _add_ps(parsers)
    _add_top(parsers)
    _add_inspect(parsers)
    _add_doctor(parsers)
    _add_clean(parsers)


def _add_ps(parsers: _Commands) -> None:
    parser = parsers.add_parser(
        "ps",
        help="all channels of this user: their readers, and how far behind they are",
        description="List all channels of this user on this machine, found through /proc, with their readers. Only looks: "
        "it takes no part and holds nobody up. Rates are what changes between two looks.",
        epilog="""\
examples:
  aioarena ps                  all channels, rates over a quarter of a second
  aioarena ps --interval 5     rates over five seconds
  aioarena ps --json | jq '.channels[] | {name, messages_per_second}'

exit code: 0, also if there are no channels.
""",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    _add_interval(parser, 0.25, "seconds between the two looks that rates are taken from")
    parser.set_defaults(run=lambda arguments: commands.ps(as_json=arguments.json, interval=arguments.interval))


def _add_top(parsers: _Commands) -> None:
    parser = parsers.add_parser(
        "top",
        help="the same, live, with ring and slots drawn (needs the extra cli)",
        description="Show all channels of this user, or some of them, live: who is behind, what is in ring and arena, how "
        "fast it goes, and whom a send waits for. q or Ctrl-C ends it.",
        epilog="""\
examples:
  aioarena top                       all channels, a picture each second
  aioarena top engine                those named engine
  aioarena top 4242 --interval 0.2   those that process 4242 takes part in, five pictures a second
  aioarena top --once > picture      one picture, for a file or a pipe

in the picture:
  ring     the ring from its first byte to its last: > is where the sender writes, a digit is the reader of that rank
           (* is one from 10 on, or several), what lies between them is not received yet
  slots    the arena as far as it was ever used: how much of each piece is in use

exit codes: 0 after q or --once, 130 after Ctrl-C, 143 after SIGTERM or SIGHUP; 1 if there is nothing of that pid or name,
or no terminal. The terminal is put back in any case.
""",
    )
    _add_which(parser, nargs="?", help="only channels that this process takes part in, or of this name")
    parser.add_argument("--once", action="store_true", help="print one picture and end; no terminal is needed")
    _add_interval(parser, 1.0, "seconds between two pictures")
    parser.set_defaults(run=_run_top)


def _run_top(arguments: argparse.Namespace) -> int:
    from aioarena._look.top import top  # says so if rich is not there

    return top(arguments.which, interval=arguments.interval, once=arguments.once)


def _add_inspect(parsers: _Commands) -> None:
    parser = parsers.add_parser(
        "inspect",
        help="one channel: its header, its cursors, and every span of the arena with who holds it",
        description="Print all there is to see of the channels that a process takes part in, or of those of a name: "
        "header, cursors, and every span of the arena with its slots, generation, age, and the ranks that have not "
        "released it. Only looks, and only at channels of the same user.",
        epilog="""\
examples:
  aioarena inspect engine      channels of that name
  aioarena inspect 4242        channels that process 4242 takes part in, as sender or reader
  aioarena inspect engine --json | jq '.[].spans[] | select(.age > 60)'

exit codes: 0; 1 if there is no such process or name, or it is another user's.
""",
    )
    _add_which(parser, help="process that takes part, or name of the channel")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: commands.inspect(arguments.which, as_json=arguments.json))


def _add_doctor(parsers: _Commands) -> None:
    parser = parsers.add_parser(
        "doctor",
        help="what this machine allows, and the remedy where it does not",
        description="Try out what channels need, and say what is missing or slower than it has to be.",
        epilog="""\
examples:
  aioarena doctor                         in the container, and as the user, that channels will run in
  aioarena doctor --json | jq '.[] | select(.grade != "ok")'

exit codes: 0, also with warnings; 1 where no channel can be made.
""",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda arguments: commands.doctor(as_json=arguments.json))


def _add_clean(parsers: _Commands) -> None:
    parser = parsers.add_parser(
        "clean",
        help="remove what dead processes left; only lists it without --yes",
        description="List shared memory and sockets that dead processes of this user left behind. Senders remove them too "
        "when they start.",
        epilog="""\
examples:
  aioarena clean               list what there is, remove nothing
  aioarena clean --yes         remove it

exit codes: 0, also if there was something; 1 if some of it could not be removed.
""",
    )
    parser.add_argument("--yes", action="store_true", help="remove them")
    parser.set_defaults(run=lambda arguments: commands.clean(yes=arguments.yes))


def _add_which(parser: argparse.ArgumentParser, **options: Any) -> None:
    parser.add_argument("which", metavar="PID|NAME", **options)


def _add_interval(parser: argparse.ArgumentParser, default: float, help: str) -> None:
    parser.add_argument(
        "--interval", type=_seconds(), default=default, metavar="SECONDS", help=f"{help} (default: {default:g})"
    )


def _seconds() -> Callable[[str], float]:
    def parse(text: str) -> float:
        value = float(text)
        if math.isnan(value) or not _LEAST <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"must be from {_LEAST:g} to {_MOST:g}, not {text}")
        return value

    parse.__name__ = "number"  # what argparse calls it when it is none
    return parse
