"""Arguments to api, results to text or JSON, errors to exit codes."""

import argparse
import importlib
import importlib.util
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from d9d_ckpt import api
from d9d_ckpt.errors import CheckError, CkptError, UsageError
from d9d_ckpt.report import graph, inspect, outcome, steps
from d9d_ckpt.report.progress import Progress
from d9d_ckpt.run.ranks import launched

_INTERRUPTED = 130
_FLAGS = (
    "layout",
    "model",
    "hf_experts",
    "dtype",
    "codec",
    "dequantize",
    "copy_tied",
    "max_shard_size",
    "memory",
    "workers",
    "verify",
    "resume",
    "take_over",
    "overwrite",
    "step",
)


class _Parser(argparse.ArgumentParser):
    """Refuses in one line."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only when all that was asked has been done."""
    debug = "debug" in (sys.argv[1:] if argv is None else argv)
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler)
    try:
        args = _parser().parse_args(argv)
        logging.basicConfig(level=args.log_level.upper(), stream=sys.stderr)
        _work(args)
    except KeyboardInterrupt:
        sys.stderr.write("d9d-ckpt: interrupted; nothing is left that looks whole and is not\n")
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever reads the output has had enough; the interpreter must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except CkptError as error:
        if debug:
            logging.getLogger(__name__).debug("refused", exc_info=True)
        sys.stderr.write(f"d9d-ckpt: {error}\n")
        return error.exit_code
    return 0


def _work(args: argparse.Namespace) -> None:
    for option in ("html",):
        if getattr(args, option, None):
            raise UsageError(f"--{option} is not available yet")
    args.run(args)


def _inspect(args: argparse.Namespace) -> None:
    opened = api.open(args.url, step=args.step, storage_options=_storage(args)).opened
    found = inspect.as_json(opened, args.tensors or ())
    _print(found, inspect.as_text(found), args)


def _convert(args: argparse.Namespace) -> None:
    _move(args, args.to)


def _reshard(args: argparse.Namespace) -> None:
    _move(args, None)


def _move(args: argparse.Namespace, to: str | None) -> None:
    progress = Progress()
    watch = None if args.quiet else progress
    try:
        if to is None:
            report = api.reshard(args.src, args.dst, watch=watch, **_settings(args))
        else:
            report = api.convert(args.src, args.dst, watch=watch, to=to, **_settings(args))
    finally:
        if watch is not None:
            progress.close()
    if launched() and os.environ["RANK"] != "0":
        return
    found = asdict(report)
    if args.json or not args.quiet:
        _print(found, outcome.converted(found), args)


def _plan(args: argparse.Namespace) -> None:
    if args.load and args.to:
        raise UsageError("--load plans a resume, --to a conversion; give one of them")
    settings = _settings(args)
    found = asdict(api.plan(args.src, load=args.load, to=args.to or "sharded", **settings))
    _print(found, outcome.planned(found), args)


def _graph(args: argparse.Namespace) -> None:
    if args.format == "svg":
        raise UsageError("--format svg is not available yet; dot can be drawn by Graphviz")
    to = args.to
    if to is None:
        to = (
            "sharded"
            if api.open(args.src, step=args.step, storage_options=_storage(args)).format
            == "huggingface"
            else "huggingface"
        )
    node, names = api.graph(args.src, args.tensor, to=to, **_settings(args))
    draw = graph.as_dot if args.format == "dot" else graph.as_text
    sys.stdout.write(draw(args.tensor, node, names) + "\n")


def _verify(args: argparse.Namespace) -> None:
    progress = Progress()
    watch = None if args.quiet else progress
    try:
        result = api.verify(
            args.url,
            step=args.step,
            workers=args.workers,
            storage_options=_storage(args),
            watch=watch,
        )
    finally:
        if watch is not None:
            progress.close()
    found = {"ok": result.ok, **asdict(result)}
    _print(found, outcome.verified(found), args)
    if not result.ok:
        raise CheckError(f"{args.url}: {result.reason or f'{len(result.damaged)} damaged'}")


def _diff(args: argparse.Namespace) -> None:
    result = api.diff(
        args.a,
        args.b,
        rtol=args.rtol,
        atol=args.atol,
        step=args.step,
        storage_options=_storage(args),
    )
    found = {"equal": result.equal, **asdict(result)}
    _print(found, outcome.compared(found), args)
    if not result.equal:
        raise CheckError(f"{args.a} and {args.b} differ")


def _list(args: argparse.Namespace) -> None:
    found = steps.as_json(api.list_steps(args.url, storage_options=_storage(args)))
    _print(found, steps.listed(found), args)


def _prune(args: argparse.Namespace) -> None:
    result = api.prune(
        args.url,
        keep_last=args.keep_last,
        keep_every=args.keep_every,
        dry_run=args.dry_run,
        storage_options=_storage(args),
    )
    found = asdict(result)
    if args.json or args.dry_run or not args.quiet:
        _print(found, steps.pruned(found), args)


def _print(found: dict[str, Any], text: str, args: argparse.Namespace) -> None:
    sys.stdout.write((json.dumps(found) if args.json else text) + "\n")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {flag: getattr(args, flag) for flag in _FLAGS}
    settings["storage_options"] = _storage(args)
    settings["mapping"] = _mapping(args.mapping) if args.mapping else None
    return settings


def _storage(args: argparse.Namespace) -> dict[str, str]:
    out = {}
    for item in args.storage_option or ():
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--storage-option {item}: must be KEY=VALUE")
        out[key] = value
    return out


def _mapping(where: str) -> api.UserMapping:
    """The function that ``path.py:function`` or ``package.module:function`` names."""
    module_name, colon, function = where.rpartition(":")
    if not colon:
        raise UsageError(f"--mapping {where}: must be path.py:function or package.module:function")
    try:
        module = (
            _loaded(module_name)
            if module_name.endswith(".py")
            else importlib.import_module(module_name)
        )
    except (Exception, SystemExit) as error:  # whatever the user's module does when it is run
        raise UsageError(f"--mapping {where}: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"--mapping {where}: {module_name} has no function {function}")
    mapping: api.UserMapping = found
    return mapping


def _loaded(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="d9d-ckpt", description="Convert, reshard and inspect checkpoints of large models."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)

    def command(
        name: str, run: Any, text: str, *, one_step: bool = True
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument(
            "--storage-option", action="append", metavar="K=V", help="passed to fsspec"
        )
        if one_step:
            sub.add_argument(
                "--step", type=int, help="step of a run directory; default: the latest"
            )
        sub.add_argument("--quiet", action="store_true", help="no progress, no report")
        sub.add_argument("--json", action="store_true", help="one JSON object on stdout")
        sub.add_argument(
            "--log-level", default="warning", choices=("debug", "info", "warning", "error")
        )
        return sub

    sub = command("inspect", _inspect, "What a checkpoint holds.")
    sub.add_argument("url")
    sub.add_argument("--html", metavar="FILE", help="not available yet")
    sub.add_argument("--tensors", action="append", metavar="GLOB", help="list tensors as well")

    sub = command("convert", _convert, "Write a checkpoint in another format.")
    sub.add_argument("src")
    sub.add_argument("dst")
    sub.add_argument("--to", required=True, metavar="FORMAT", help="huggingface or sharded")
    _add_settings(sub)

    sub = command("reshard", _reshard, "Write a sharded checkpoint on another layout.")
    sub.add_argument("src")
    sub.add_argument("dst")
    _add_settings(sub)

    sub = command(
        "plan", _plan, "What a conversion would read and write, rank by rank; no data moves."
    )
    sub.add_argument("src")
    sub.add_argument("--to", metavar="FORMAT", help="huggingface or sharded (default)")
    sub.add_argument("--load", action="store_true", help="what each rank would read at resume")
    _add_settings(sub)

    sub = command("graph", _graph, "How one target tensor is made of source tensors.")
    sub.add_argument("src")
    sub.add_argument("--to", metavar="FORMAT", help="default: the other format")
    sub.add_argument("--tensor", required=True, metavar="NAME")
    sub.add_argument("--format", default="text", choices=("text", "dot", "svg"))
    _add_settings(sub)

    sub = command("verify", _verify, "Read everything back against its checksums.")
    sub.add_argument("url")
    sub.add_argument("--workers", type=int)

    sub = command(
        "diff", _diff, "Compare two checkpoints by value, whatever their formats and layouts."
    )
    sub.add_argument("a")
    sub.add_argument("b")
    sub.add_argument("--rtol", type=float, default=0.0)
    sub.add_argument("--atol", type=float, default=0.0)

    sub = command("list", _list, "The steps of a run directory.", one_step=False)
    sub.add_argument("url", metavar="run_url")

    sub = command("prune", _prune, "Delete old steps of a run directory.", one_step=False)
    sub.add_argument("url", metavar="run_url")
    sub.add_argument(
        "--keep-last", type=int, required=True, metavar="N", help="the newest whole steps that stay"
    )
    sub.add_argument("--keep-every", type=int, metavar="N", help="steps divisible by N stay too")
    sub.add_argument("--dry-run", action="store_true", help="only say what would go")
    return parser


def _add_settings(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--layout", help="pp=2,dp_shard=2,tp=2,ep=4 (missing axes are 1), or a YAML file"
    )
    sub.add_argument(
        "--model", default="auto", help="family name; default: from config or manifest"
    )
    sub.add_argument("--mapping", metavar="WHERE", help="path.py:function, your own graph")
    sub.add_argument("--hf-experts", choices=("split", "fused"), help="of a huggingface target")
    sub.add_argument("--dtype", default="keep", help="cast floats to this torch dtype")
    sub.add_argument("--dequantize", action="store_true", help="fp8 with scales to --dtype or bf16")
    sub.add_argument(
        "--copy-tied", action="store_true", help="write a tied head as a second, real tensor"
    )
    sub.add_argument("--codec", default="none", help="none, zstd or zstd:LEVEL (sharded targets)")
    sub.add_argument("--max-shard-size", default="5GB", help="of a huggingface file (5GB)")
    sub.add_argument("--memory", default="1GiB", help="tensor bytes in flight per process (1GiB)")
    sub.add_argument("--workers", type=int, help="local processes; default: one per core")
    sub.add_argument("--verify", action="store_true", help="read the destination back")
    sub.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    sub.add_argument("--take-over", action="store_true", help="resume what another host began")
    sub.add_argument("--overwrite", action="store_true", help="replace a complete destination")
