"""The command line: the demo, the benchmarks, relays, and looking at channels and machines."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aioarena
from aioarena import _relay_command
from aioarena._bench import compare, copying, faults, memory, placement, remote, small
from aioarena._bench._result import Result
from aioarena._bench._scenarios import SCENARIOS
from aioarena._bench._text import Progress
from aioarena._bench._workers import WorkerError, run
from aioarena._demo import DemoOptions, demo
from aioarena._look import arguments as looking
from aioarena._look import completion
from aioarena._look.channels import LookError
from aioarena._picture import GRAIN, PictureError
from aioarena.exceptions import ArenaError

_EPILOG = """\
examples:
  aioarena demo                     send a 4096 x 4096 picture to 4 worker processes, with the arena and without
  aioarena bench small              messages per second, and what one costs
  aioarena ps                       all channels of this user, their readers and who is behind
  aioarena top                      the same, live
  aioarena inspect engine           header, cursors and spans of the channel named engine
  aioarena doctor                   what this machine allows, and what to do where it does not
  aioarena clean                    what dead processes left; --yes removes it
  aioarena relay handle --readers 4
                                    a channel of another host, for 4 readers on this one
  aioarena COMMAND --help           more examples

`python -m aioarena` is the same command.

exit codes:
  0    done
  1    it failed: one line on stderr says why and what helps; or its output was not read to the end
  2    wrong arguments
  130  ended by Ctrl-C
  143  ended by SIGTERM
"""


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, and leaves lists of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return "".join(indent + line for line in text.splitlines(keepends=True))
        return super()._fill_text(text, width, indent)


class _Parser(argparse.ArgumentParser):
    """A parser, and the class of those of its commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0, or 1 when something failed, 130 after Ctrl-C. Wrong arguments exit with 2.
    """
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.run(arguments)
        sys.stdout.flush()
    except (ArenaError, LookError, PictureError, WorkerError, compare.InvariantError) as error:
        print(f"aioarena: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aioarena: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"aioarena: error: {error}", file=sys.stderr)
        return 1
    return code


# Commands ---------------------------------------------------------------------------------------------------------


def _run_demo(arguments: argparse.Namespace) -> int:
    return demo(
        DemoOptions(
            image=arguments.image,
            readers=arguments.readers,
            size=arguments.size,
            pictures=arguments.pictures,
            loop=arguments.loop,
        )
    )


def _run_bench(arguments: argparse.Namespace) -> int:
    progress = Progress()
    try:
        result: Result = arguments.measure(arguments, progress)
    finally:
        progress.clear()
    print(result.json() if arguments.json else result.text())
    return 0


def _run_completion(arguments: argparse.Namespace) -> int:
    print(completion.script(_parser(), arguments.shell))
    return 0


def _measure_small(arguments: argparse.Namespace, progress: Progress) -> Result:
    runs = 1 if arguments.quick else arguments.runs
    options = small.SmallOptions(tuple(arguments.readers), runs, arguments.quick, arguments.loop)
    result: Result = run(small.measure(options, progress), arguments.loop)
    return result


def _measure_copy(arguments: argparse.Namespace, progress: Progress) -> Result:
    result: Result = run(copying.measure(copying.CopyOptions(arguments.quick), progress))
    return result


def _measure_placement(arguments: argparse.Namespace, progress: Progress) -> Result:
    options = placement.PlacementOptions(arguments.readers, arguments.quick)
    result: Result = run(placement.measure(options, progress))
    return result


def _measure_faults(arguments: argparse.Namespace, progress: Progress) -> Result:
    options = faults.FaultsOptions(1 if arguments.quick else arguments.runs, arguments.quick)
    result: Result = run(faults.measure(options, progress))
    return result


def _measure_memory(arguments: argparse.Namespace, progress: Progress) -> Result:
    options = memory.MemoryOptions(arguments.readers, 1 if arguments.quick else arguments.runs, arguments.quick)
    result: Result = run(memory.measure(options, progress))
    return result


def _measure_remote(arguments: argparse.Namespace, progress: Progress) -> Result:
    quick = arguments.quick
    options = remote.RemoteOptions(
        hosts=arguments.hosts,
        readers=2 if quick else arguments.readers,
        mib=4 if quick else arguments.mib,
        runs=1 if quick else arguments.runs,
        namespaces=arguments.namespaces,
    )
    result: Result = run(remote.measure(options, progress))
    return result


def _measure_compare(arguments: argparse.Namespace, progress: Progress) -> Result:
    options = compare.CompareOptions(
        readers=tuple(dict.fromkeys(arguments.readers)),
        runs=1 if arguments.quick else arguments.runs,
        quick=arguments.quick,
        scenarios=tuple(dict.fromkeys(arguments.scenarios)),
        alternatives=tuple(dict.fromkeys(arguments.alternatives)),
        limit=arguments.limit,
        svg=arguments.svg,
    )
    result: Result = run(compare.measure(options, progress))
    return result


# Arguments --------------------------------------------------------------------------------------------------------


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {value}")
        return value

    parse.__name__ = "number"  # what argparse calls it when it is none
    return parse


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="aioarena",
        description="An asyncio broadcast channel through shared memory: see it work, measure it, look at it.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"aioarena {aioarena.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_benches(commands)
    looking.add(commands)
    _add_loop(_relay_command.add_parser(commands))
    _add_completion(commands)
    return parser


def _add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "demo",
        help="send a picture to worker processes, with the arena and without, and say what it took",
        description="Send a picture, preprocessed as for a vision-language model, to worker processes, with the arena and "
        "without it, and print what it took.",
        epilog="""\
examples:
  aioarena demo                              a picture that is made here, to 4 workers, 6 times each way
  aioarena demo --image cat.png --readers 2  a picture of yours, to 2 workers
  aioarena demo --size 1024 --loop uvloop    a smaller one, on uvloop

exit codes: 0; 1 if the picture cannot be read, a worker failed, or bytes did not arrive as they were sent.
""",
    )
    parser.set_defaults(run=_run_demo)
    parser.add_argument(
        "--image",
        type=Path,
        metavar="PATH",
        help="a picture of yours (PPM, PGM and PNG, others need Pillow); without it, one is made",
    )
    parser.add_argument("--readers", type=_at_least(1), default=4, metavar="N", help="worker processes (default: 4)")
    parser.add_argument(
        "--size",
        type=_at_least(GRAIN),
        default=4096,
        metavar="PIXELS",
        help="longer side that the picture is brought to (default: 4096)",
    )
    parser.add_argument(
        "--pictures", type=_at_least(1), default=6, metavar="N", help="how often it is sent each way (default: 6)"
    )
    _add_loop(parser)


def _add_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loop", choices=("asyncio", "uvloop"), default="asyncio", help="event loop (default: asyncio)")


def _add_benches(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = commands.add_parser(
        "bench",
        help="measure",
        description="Measure this machine, and the library on it.",
        epilog="""\
examples:
  aioarena bench small --readers 1 8              messages per second to one reader, and to eight
  aioarena bench placement --json                 where buffers should go, for programs to read
  aioarena bench memory --quick                   a short form that only shows that it works
  aioarena bench compare --svg compare.svg        beside other ways of sending the same, drawn
  aioarena bench compare --scenarios small --readers 2 --runs 3
  aioarena bench remote --namespaces              to readers on other hosts, with relays and without

exit codes: 0; 1 if a worker failed, or a run broke a promise of the library.
""",
    )
    bench.set_defaults(run=_run_bench)
    benches = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")

    parser = benches.add_parser("small", help="small messages: how many a second, and what one costs")
    parser.set_defaults(measure=_measure_small)
    parser.add_argument(
        "--readers",
        type=_at_least(1),
        nargs="+",
        default=[1, 2, 4],
        metavar="N",
        help="numbers of readers to measure (default: 1 2 4)",
    )
    _add_runs(parser)
    _add_loop(parser)
    _add_output(parser)

    parser = benches.add_parser("copy", help="copying on the event loop against handing the copy to threads")
    parser.set_defaults(measure=_measure_copy)
    _add_output(parser)

    parser = benches.add_parser("placement", help="which buffers belong in the arena, and how large a slot should be")
    parser.set_defaults(measure=_measure_placement)
    parser.add_argument("--readers", type=_at_least(1), default=4, metavar="N", help="readers (default: 4)")
    _add_output(parser)

    parser = benches.add_parser("memory", help="what fresh pages cost, and what prefault and lent memory save")
    parser.set_defaults(measure=_measure_memory)
    parser.add_argument("--readers", type=_at_least(1), default=2, metavar="N", help="readers (default: 2)")
    _add_runs(parser)
    _add_output(parser)

    parser = benches.add_parser("faults", help="how soon each side learns that the other died, left or closed")
    parser.set_defaults(measure=_measure_faults)
    _add_runs(parser)
    _add_output(parser)

    parser = benches.add_parser("remote", help="a large tensor to readers on other hosts, with a relay on each and without")
    parser.set_defaults(measure=_measure_remote)
    parser.add_argument("--hosts", type=_at_least(1), default=2, metavar="N", help="hosts beside the sender's (default: 2)")
    parser.add_argument("--readers", type=_at_least(1), default=4, metavar="N", help="readers on each (default: 4)")
    parser.add_argument("--mib", type=_at_least(1), default=200, metavar="MIB", help="size of the tensor (default: 200)")
    parser.add_argument(
        "--namespaces", action="store_true", help="give each host a network of its own, which takes root and ip"
    )
    _add_runs(parser)
    _add_output(parser)

    parser = benches.add_parser("compare", help="this library beside other ways of sending the same messages")
    parser.set_defaults(measure=_measure_compare)
    parser.add_argument(
        "--readers", type=_at_least(1), nargs="+", default=[2, 4], metavar="N", help="numbers of readers (default: 2 4)"
    )
    for what, names in (("scenarios", SCENARIOS), ("alternatives", compare.ALTERNATIVES)):
        listed = ", ".join(names)
        parser.add_argument(
            f"--{what}", nargs="+", choices=tuple(names), default=[], metavar="NAME", help=f"only these: {listed}"
        )
    parser.add_argument(
        "--limit",
        type=_at_least(1),
        default=60,
        metavar="SECONDS",
        help="time for one alternative in one scenario, after which it is left out (default: 60)",
    )
    parser.add_argument("--svg", type=Path, metavar="PATH", help="draw the results into this file")
    _add_runs(parser)
    _add_output(parser)


def _add_completion(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "completion",
        help="a script with which your shell completes this command (needs the extra cli)",
        description="Print what a shell needs to complete commands and options.",
        epilog="""\
examples:
  aioarena completion bash > ~/.local/share/bash-completion/completions/aioarena
  aioarena completion zsh > ~/.zfunc/_aioarena     with ~/.zfunc in $fpath, before compinit
  aioarena completion tcsh > ~/.aioarena.tcsh      and source it in ~/.tcshrc

exit codes: 0; 1 without shtab.
""",
    )
    parser.set_defaults(run=_run_completion)
    parser.add_argument("shell", choices=completion.SHELLS, help="which shell")


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=_at_least(1), default=5, metavar="N", help="runs to take the median of (default: 5)")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a short form that only shows that it works")
    parser.add_argument("--json", action="store_true", help="print JSON: seconds and bytes, not rounded")
