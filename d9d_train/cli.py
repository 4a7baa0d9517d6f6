"""Arguments to a run or a plan, errors to messages and exit codes."""

import argparse
import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from d9d_ckpt.errors import CkptError, StorageError, UsageError

if TYPE_CHECKING:
    from d9d_train.parallel.pipeline.actions import Program

_INTERRUPTED = 130
_STORE_WAIT = timedelta(seconds=5)
"""What a message waits for the store that tells whether another rank has printed it."""


class _Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only when all that was asked has been done.

    SIGTERM is the run's own affair: it ends with 0 after a whole step, saved where there are checkpoints.
    """
    try:
        args = _parsed(argv)
        logging.basicConfig(
            level=args.log_level.upper(),
            stream=sys.stderr,
            format=f"%(levelname)s:%(name)s:{_rank()}%(message)s",
        )
        args.run(args)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            _say("interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever reads the output has had enough; the interpreter must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CkptError as error:
        logging.getLogger(__name__).debug("refused", exc_info=True)
        if _first_to_say(str(error)):
            _say("\n".join([str(error), *getattr(error, "__notes__", ())]))
        return error.exit_code
    except Exception as error:
        if _rank():
            error.add_note(f"on rank {os.environ['RANK']}")
        raise
    return 0


# Torch takes seconds to import; --help and a wrong option are answered without.


def _train(args: argparse.Namespace) -> None:
    from d9d_train.build import train
    from d9d_train.config import load_config

    train(load_config(args.config, args.overrides))


def _plan(args: argparse.Namespace) -> None:
    from d9d_train.config import load_config, model_config
    from d9d_train.plan import plan

    config = load_config(args.config, args.overrides)
    needs = plan(config, model_config(config.model), args.world)
    found = json.dumps(needs.to_json()) if args.json else needs.to_text()
    sys.stdout.write(found + "\n")
    sys.stdout.flush()


def _schedule(args: argparse.Namespace) -> None:
    from d9d_train.parallel.pipeline import draw
    from d9d_train.parallel.pipeline.costs import parse_costs
    from d9d_train.parallel.pipeline.simulate import simulate

    costs, title = parse_costs(args.costs), args.name or args.csv
    simulation = simulate(_program(args), costs)
    if args.html:
        _write(args.html, draw.page(simulation, title))
    if args.write_csv:
        _write(args.write_csv, f"{simulation.program.computations}\n")
    if args.json:
        found = json.dumps(simulation.to_json())
    else:
        found = f"{draw.table(simulation, title)}\n{draw.timeline(simulation)}"
    sys.stdout.write(found + "\n")
    sys.stdout.flush()


def _program(args: argparse.Namespace) -> "Program":
    """The schedule that is named or in a file."""
    from d9d_train.parallel.pipeline.schedule import build, from_csv, placement

    if args.csv:
        if (args.ranks, args.microbatches, args.stages_per_rank) != (None, None, None):
            raise UsageError(
                "--csv says it all; leave out --ranks, --microbatches and --stages-per-rank"
            )
        return from_csv(_read(args.csv))
    if args.ranks is None or args.microbatches is None:
        raise UsageError(
            "--name also needs --ranks and --microbatches; see d9d-train schedule --help"
        )
    virtual, _ = placement(args.name, args.stages_per_rank)
    return build(args.name, virtual * args.ranks, args.ranks, args.microbatches)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        raise UsageError(f"{path}: cannot read this schedule: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: cannot read this schedule: {error}") from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise StorageError(f"{path}: cannot write: {error.strerror}") from error


def _say(message: str) -> None:
    sys.stderr.write(f"d9d-train: {_rank()}{message}\n")
    sys.stderr.flush()


def _rank() -> str:
    """``rank N: `` among several."""
    return f"rank {os.environ['RANK']}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _first_to_say(message: str) -> bool:
    """Whether no other rank has printed the same message; where that cannot be known, it is printed.

    Ranks meet in the store of torchrun's agent, which outlives their process group.
    """
    if not _rank() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    digest = hashlib.blake2b(message.encode(), digest_size=16).hexdigest()
    key = f"d9d_train/said/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/{digest}"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, is_master=False, timeout=_STORE_WAIT
        )
        return bool(store.add(key, 1) == 1)
    except RuntimeError:
        return True


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments; argparse leaves overrides that come after an option to us."""
    args, left = _parser().parse_known_args(argv)
    overrides = getattr(args, "overrides", None)
    for text in left:
        if text.startswith("-") or "=" not in text or overrides is None:
            raise UsageError(f"unrecognized argument {text}; see d9d-train {args.command} --help")
        overrides.append(text)
    return args


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="d9d-train", description="Train large models on six axes.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(name: str, text: str, *, of_config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if of_config:
            sub.add_argument("config", help="TOML file")
            sub.add_argument(
                "overrides",
                nargs="*",
                metavar="section.key=value",
                help="a TOML value, or a bare word, which is a string",
            )
        sub.add_argument(
            "--log-level", default="warning", choices=("debug", "info", "warning", "error")
        )
        return sub

    sub = command("train", "Run, or resume, a training; under torchrun on all of its ranks.")
    sub.set_defaults(run=_train)

    sub = command("plan", "Parameters, bytes and memory per rank; no GPU, no weights.")
    sub.add_argument(
        "--world", type=int, metavar="N", help="ranks; more than the mesh has are further replicas"
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub.set_defaults(run=_plan)

    sub = command("schedule", "Simulate and draw a pipeline's schedule; no GPU.", of_config=False)
    which = sub.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--name", help="gpipe, 1f1b, interleaved, looped_bfs, zb1p, zbv, dualpipev, forward_only"
    )
    which.add_argument("--csv", metavar="FILE", help="a schedule of one's own, as torch writes it")
    sub.add_argument("--ranks", type=int, metavar="N", help="pipeline ranks")
    sub.add_argument("--microbatches", type=int, metavar="N", help="of a step")
    sub.add_argument("--stages-per-rank", type=int, metavar="V", help="default: as few as it takes")
    sub.add_argument(
        "--costs",
        default="F=1,I=1,W=1",
        metavar="F=1,I=1,W=1",
        help="time of a stage's forward pass and of the two parts of its backward pass",
    )
    sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
    sub.add_argument("--html", metavar="FILE", help="write a page with a picture")
    sub.add_argument("--write-csv", metavar="FILE", help="write the schedule as torch reads it")
    sub.set_defaults(run=_schedule)
    return parser
