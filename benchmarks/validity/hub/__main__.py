"""Screen released checkpoints on the Hub, and hold G against their published scores.

    python -m benchmarks.validity.hub --dry-run
    python -m benchmarks.validity.hub --only datadecide
    python -m benchmarks.validity.hub page

Progress goes to standard error, the page to standard output. Results (JSON lines), the page, the stores that
a stopped run goes on from and lists of checkpoints go below --work. HF_TOKEN, HF_ENDPOINT and HF_HOME work as
in huggingface_hub. Exit status: 0 all read, 1 nothing, 2 wrong usage, 3 some missing, 130 stopped.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.validity import results
from benchmarks.validity.hub import configuration
from benchmarks.validity.hub.configuration import HubStudy
from benchmarks.validity.hub.plan import checkpoints_of
from benchmarks.validity.hub.screening import ScreenError, hours, planned, screened

CONFIGURATION = results.ROOT / "benchmarks" / "validity" / "hub.yaml"
PLAN = {
    "suite": "suite", "size": "size", "repositories": "repositories", "checkpoints": "checkpoints",
    "cached": "cached", "api": "API requests", "resolvers": "resolver requests", "MB": "MB",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study, its plan or its page; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.validity.hub",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "job", nargs="?", choices=["run", "page"], default="run", help="page: of the results that are there"
    )
    parser.add_argument(
        "--configuration",
        type=Path,
        default=CONFIGURATION,
        metavar="FILE",
        help="default: benchmarks/validity/hub.yaml",
    )
    parser.add_argument("--only", metavar="SUITE,SUITE", help="these suites (default: all)")
    parser.add_argument(
        "--limit", type=int, metavar="N", help="the first N repositories of a suite (default: all)"
    )
    parser.add_argument("--dry-run", action="store_true", help="checkpoints, requests and bytes, and stop")
    parser.add_argument(
        "--work", type=Path, default=results.ROOT / "build" / "validity-hub", metavar="FOLDER",
        help="default: build/validity-hub",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        study = configuration.read_study(args.configuration)
        names = args.only.split(",") if args.only else list(study.suites)
        if unknown := [name for name in names if name not in study.suites]:
            raise ValueError(f"--only: expected names of {', '.join(study.suites)}, got {', '.join(unknown)}")
        if args.job == "page":
            return _page(study, args.work)
        return (
            _plan(study, names, args.limit, args.work)
            if args.dry_run
            else _run(study, names, args.limit, args.work)
        )
    except (ValueError, OSError) as error:
        print(f"validity-hub: {error}", file=sys.stderr)
        return 2
    except ScreenError as error:
        print(f"validity-hub: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("validity-hub: stopped; the same command goes on from here", file=sys.stderr)
        return 130


def _plan(study: HubStudy, names: Sequence[str], limit: int | None, work: Path) -> int:
    from benchmarks.validity.markdown import markdown

    rows, missing = [], []
    for name in names:
        checkpoints, lost = checkpoints_of(study.suites[name], limit=limit)
        rows += planned(study, checkpoints, work)
        missing += lost
    total = {
        key: sum(row[key] for row in rows) for key in ("checkpoints", "api", "resolvers", "bytes", "cached")
    }
    print(
        f"{total['checkpoints']} checkpoints, about {total['resolvers']} resolver and {total['api']} API "
        f"requests, {total['bytes'] / 1e6:.0f} MB; the Hub's quotas make it about {hours(rows):.1f} hours "
        f"with a token. {total['cached']} readings are cached. Scores come on top."
    )
    print("\n" + markdown(rows, PLAN))
    if missing:
        print(
            "\n"
            + markdown([vars(one) for one in missing], {"name": "what", "error": "word", "message": "why"})
        )
    return 0 if not missing else 3 if rows else 1


def _run(study: HubStudy, names: Sequence[str], limit: int | None, work: Path) -> int:
    from benchmarks.validity.hub.rows import file_of, rows_of, write
    from benchmarks.validity.hub.scores import published

    read = lost = 0
    for name in names:
        suite = study.suites[name]
        checkpoints, missing = checkpoints_of(suite, limit=limit)
        figures, commits, failed = screened(study, checkpoints, work)
        scores, losses, unread = published(suite, checkpoints, work)
        rows = rows_of(
            study, suite, checkpoints, figures, commits, scores, losses, [*missing, *failed, *unread]
        )
        write(file_of(work / "results", name), rows)
        read += len(figures)
        lost += sum("error" in row for row in rows)
    _page(study, work)
    return 1 if not read else 3 if lost else 0


def _page(study: HubStudy, work: Path) -> int:
    from benchmarks.validity.hub.page import page

    text = page(study, work / "results")
    place = work / "hub.md"
    place.write_text(text, "utf-8")
    print(text, end="")
    print(f"validity-hub: wrote {place}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
