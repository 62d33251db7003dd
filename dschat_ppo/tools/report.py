"""Show runs in one HTML page: curves, health events, answers, flags and versions.

    python -m dschat_ppo.tools.report RUN [RUN ...] [--out FILE]

RUN is the output folder of a run of any step; it may still be running. The page is one file without
network access. With one run it is written to RUN/report.html, with several to report.html in the
current folder.

Exit code 0: the page is written; 2: it is not, and the last line says why.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.exit_codes import DONE
from dschat_ppo.common.paths import REPORT
from dschat_ppo.errors import counted
from dschat_ppo.html_report.page import write_report
from dschat_ppo.tools import exit_code_of


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dschat_ppo.tools.report",
        description="Show or compare runs in one HTML file that needs no network.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="output folder of a run of any step, also one in progress",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"file to write (default: RUN/{REPORT}; with several runs, {REPORT} in the current"
        " folder)",
    )
    args = parser.parse_args(argv)
    path = Path(REPORT)
    if args.out is not None:
        path = args.out
    elif len(args.runs) == 1:
        path = args.runs[0] / REPORT
    code = exit_code_of(lambda: write_report(args.runs, path))
    if code == DONE:
        size = path.stat().st_size / 1024
        print(f"{path}: {counted(len(args.runs), 'run')}, {size:.0f} KiB")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
