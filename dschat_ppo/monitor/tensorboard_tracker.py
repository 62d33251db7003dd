"""TensorBoard: event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dschat_ppo.monitor.trackers import Answer, Histogram, Start, StepFigures, Tracking


class TensorBoardTracker:
    """Writes event files with scalars, histograms, texts, and the flags for the HParams tab.

    A resumed run writes another event file; TensorBoard drops the points of earlier files from `first_step` on
    (`purge_step`).
    """

    failures: tuple[type[Exception], ...] = (OSError,)  # also those of the thread that writes the file

    def __init__(self, tracking: Tracking, start: Start):
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._writer = SummaryWriter(str(tracking.tensorboard), purge_step=start.first_step)
        # Without an experiment summary, the HParams tab finds flags and metrics itself: all scalars, the last value.
        flags = {name: _hparam(value) for name, value in tracking.flags.items()}
        _, began, self._ended = hparams(flags, {})
        self._writer._get_file_writer().add_summary(began)
        self._writer.flush()

    def write(self, step: int, metrics: Mapping[str, float], figures: StepFigures) -> None:
        """See `Tracker`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, histogram in figures.histograms.items():
            self._add_histogram(name, histogram, step)
        if figures.answers:
            self._writer.add_text("samples/answers", "\n\n".join(map(_markdown, figures.answers)), step)

    def _add_histogram(self, name: str, histogram: Histogram, step: int) -> None:
        """The sums, which no chart shows, are those of values in the middle of their buckets."""
        edges, counts = histogram.edges, list(histogram.counts)
        middles = [(low + high) / 2 for low, high in zip(edges, edges[1:], strict=False)]
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(middle * count for middle, count in zip(middles, counts, strict=True)),
            sum_squares=sum(middle**2 * count for middle, count in zip(middles, counts, strict=True)),
            bucket_limits=list(edges[1:]),
            bucket_counts=counts,
            global_step=step,
        )

    def close(self, succeeded: bool) -> None:
        """See `Tracker`. TensorBoard marks a run as finished, and has no mark for a failed one."""
        if succeeded:
            self._writer._get_file_writer().add_summary(self._ended)
        self._writer.close()


def _hparam(value: Any) -> float | str:
    """A flag as a number or a text; `hparams` would make numbers of True and False."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _markdown(answer: Answer) -> str:
    """Indented lines are shown as they are."""
    shown = [f"**score {answer.score:.4g}**, {answer.tokens} tokens"]
    for title, text in (("prompt", answer.prompt), ("answer", answer.answer)):
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        shown.append(f"{title}:\n\n{lines}")
    return "\n\n".join(shown)
