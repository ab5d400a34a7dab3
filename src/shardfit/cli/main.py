"""The command `shardfit`: a verb, its arguments, one report, an exit status."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence

from shardfit import __version__
from shardfit.cli import parity
from shardfit.errors import EXIT_USAGE, ShardfitError

EXIT_INTERRUPTED = 130
_VERBS = {"parity": parity}

_EPILOG = """\
exit status: 0 clean, 1 findings, 2 wrong usage, 3 could not run, 130 interrupted
`shardfit VERB --help` has the options of a verb and an example.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status.

    Args:
        argv: without the program's name. None: those of this process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    # argparse would take a script's options for ours.
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    arguments, script_args = arguments[:cut], arguments[cut + 1 :]
    parser = _parser()
    if arguments and not arguments[0].startswith("-") and arguments[0] not in _VERBS:
        return _unknown_verb(arguments[0])
    try:
        options = parser.parse_args(arguments, argparse.Namespace(script_args=script_args))
    except SystemExit as done:
        return int(done.code or 0)
    if options.verb is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        return int(_VERBS[options.verb].run(options))
    except ShardfitError as error:
        print(f"shardfit: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("shardfit: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone; nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shardfit",
        description="Take your own PyTorch training script to fully sharded training, and prove that it "
        "still trains the same.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardfit {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for name, verb in _VERBS.items():
        verb.add_arguments(
            verbs.add_parser(
                name,
                usage=verb.USAGE,
                help=verb.SUMMARY,
                description=verb.DESCRIPTION,
                epilog=verb.EPILOG,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )
    return parser


def _unknown_verb(verb: str) -> int:
    near = difflib.get_close_matches(verb, _VERBS, n=1)
    print(
        f"shardfit: there is no verb {verb!r}; "
        + (f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(_VERBS)}"),
        file=sys.stderr,
    )
    return EXIT_USAGE
