"""Show runs in one HTML page: curves, health events, answers, flags and versions.

    python -m dschat_ppo.tools.report RUN [RUN ...] [--out FILE]
    python -m dschat_ppo.tools.report RUN [RUN ...] --serve [--port 8765]

RUN is the output folder of a run of any step; it may still be running. The page is one file without
network access. With one run it is written to RUN/report.html, with several to report.html in the
current folder. With --serve, a page on this machine shows the runs while they train, until Ctrl-C.

Exit code 0: the page is written, or was served until Ctrl-C; 2: it is not, and the last line says
why.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from dschat_ppo.common.exit_codes import DONE
from dschat_ppo.common.http_server import listen
from dschat_ppo.common.logging import print_line
from dschat_ppo.common.paths import REPORT
from dschat_ppo.errors import UserError, counted
from dschat_ppo.html_report.page import write_report
from dschat_ppo.tools import exit_code_of

PORT = 8765
HOST = "127.0.0.1"


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
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show the runs at an address of this machine while they train, until Ctrl-C; no file"
        " is written",
    )
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help=f"of --serve; 0 selects a free one and prints it (default: {PORT})",
    )
    args = parser.parse_args(argv)
    if args.serve or args.port is not None:
        return exit_code_of(lambda: serve_report(args))
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


def serve_report(args: argparse.Namespace) -> None:
    """Serve the page of the runs until Ctrl-C."""
    if not args.serve:
        raise UserError("--port needs --serve")
    if args.out is not None:
        raise UserError("--out: --serve writes no file; omit one of the two")
    # not at the top: a report that is written starts no server
    from dschat_ppo.html_report.live_page import LiveReport, ReportServer

    report = LiveReport(args.runs)
    port = PORT if args.port is None else args.port
    with ReportServer(report, listen(HOST, port, f"--port {port}")) as server:
        port = server.server_address[1]
        try:
            print_line(f"{counted(len(args.runs), 'run')} at http://{HOST}:{port}/ until Ctrl-C")
            print_line(
                f"from another machine: ssh -L {port}:{HOST}:{port} {platform.node()}, then the"
                " same address there"
            )
            server.serve_forever()
        except KeyboardInterrupt:
            print_line("\nstopped; the runs go on")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
