"""What `dschat-explain` does with its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from dschat_ppo.common.atomic_files import storage_errors, write_file
from dschat_ppo.errors import UserError, counted
from dschat_ppo.features.explain.record_files import (
    FOLDER,
    RecordedRow,
    RecordedStep,
    read_step,
    recorded_steps,
)
from dschat_ppo.features.explain.terminal import row_lines, step_lines
from dschat_ppo.features.explain.token_page import page_of
from dschat_ppo.html_report.run_folder import flags_of_run


def explain(args: argparse.Namespace) -> None:
    """Print or write what the flags of the command ask for."""
    files = recorded_steps(args.run)
    if args.step is None:
        _require_record(args.run, files)
        print(f"recorded: PPO steps {_list(files)}; choose one by --step")
        return
    step = read_step(_file_of(args.run, files, args.step))
    rows = step.rows
    if args.row is not None:
        rows = [_row_of(step, args.row)]
    if args.html is not None:
        with storage_errors(args.html):
            write_file(args.html, page_of(step, rows).encode(errors="replace"))
        print(f"written: {args.html}")
    elif args.row is None:
        print("\n".join(step_lines(step)))
    else:
        _check_update(rows[0], args.update)
        positions = _slice_of(args.tokens)
        print("\n".join(row_lines(rows[0], step, positions, args.thoughts, args.update)))


def _require_record(run: Path, files: dict[int, Path]) -> None:
    """Raise `UserError` if a run has no record, with the reason."""
    if files:
        return
    if not run.is_dir():
        raise UserError(f"{run}: there is no such folder")
    config = flags_of_run(run)
    if not config:
        raise UserError(f"{run}: is not the output folder of a run")
    if "actor_model_name_or_path" not in config:
        raise UserError(f"{run} is a run of step 1 or 2; explain shows answers of step 3")
    if config.get("record_rows") == "none":
        raise UserError(f"{run} was trained with --record_rows none")
    raise UserError(
        f"{run / FOLDER} has no PPO step yet; the first one is recorded after its updates, others"
        " by --sample_interval and --record_steps"
    )


def _file_of(run: Path, files: dict[int, Path], step: int) -> Path:
    """The file of a PPO step."""
    _require_record(run, files)
    if step not in files:
        raise UserError(f"{run / FOLDER} has no step {step}; recorded: {_list(files)}")
    return files[step]


def _list(files: dict[int, Path]) -> str:
    return ", ".join(map(str, files))


def _row_of(step: RecordedStep, index: int) -> RecordedRow:
    """A recorded row by its number in the PPO step."""
    for row in step.rows:
        if row.index == index:
            return row
    recorded = ", ".join(str(row.index) for row in step.rows)
    raise UserError(f"--row {index}: step {step.step} has the recorded rows {recorded}")


def _check_update(row: RecordedRow, number: int | None) -> None:
    """Raise `UserError` for an update that the row does not have."""
    count = sum(bool(update["trained"].any()) for update in row.updates)
    if number is not None and not 1 <= number <= count:
        raise UserError(f"--update {number}: the row is in {counted(count, 'update')} of the actor")


def _slice_of(text: str) -> slice:
    """`FROM:TO` as a slice."""
    first, colon, end = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return slice(int(first) if first else None, int(end) if end else None)
    except ValueError as problem:
        raise UserError(f"--tokens {text}: expected FROM:TO, such as 0:20") from problem
