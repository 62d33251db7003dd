"""The tables of `step_costs.py`: all costs of one version, and a comparison of two versions."""

from __future__ import annotations

from typing import Any

from measure import markdown

MARKS = "<!-- step costs -->", "<!-- /step costs -->"


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Markdown tables, with a column for each number of ranks."""
    ranks = list(found)

    def table(title: str, names: list[str], value: Any) -> str:
        rows = [[name, *(value(found[number], name) for number in ranks)] for name in names]
        return markdown([title, *(f"{number} rank(s)" for number in ranks)], rows)

    def names_of(key: str) -> list[str]:
        return list(dict.fromkeys(name for number in ranks for name in found[number][key]))

    def seconds(one: dict[str, Any], name: str) -> str:
        phase, _, library = name.partition(": ")
        return f"{one['cpu_seconds'].get(phase, {}).get(library, 0.0):.3f}"

    def collectives(one: dict[str, Any], name: str) -> str:
        number, size = one["collectives"].get(name, (0, 0))
        return f"{number} ({size / 2**20:.2f} MiB)"

    parts = {f"{phase}: {library}" for one in found.values() for phase, named in one["cpu_seconds"].items()
             for library in named}  # fmt: skip
    return "\n\n".join([
        table("CPU seconds of the process", names_of("step_seconds"),
              lambda one, name: f"{one['step_seconds'][name]:.3f}"),
        table("collectives (phase, kind)", names_of("collectives"), collectives),
        table("calls", names_of("calls"), lambda one, name: str(one["calls"][name])),
        table("operators (phase)", names_of("operators"), lambda one, name: str(one["operators"].get(name, 0))),
        table("kernels of the optimizer", names_of("optimizer_kernels"),
              lambda one, name: str(one["optimizer_kernels"][name])),
        table("reads of a number by the host", ["all"], lambda one, _: str(one["reads"])),
        table("CPU seconds (phase: library)", sorted(parts), seconds),
    ])  # fmt: skip


def summary(found: dict[str, dict[str, Any]], before: dict[str, dict[str, Any]]) -> str:
    """The table of docs/benchmarks.md: each cost before -> now, with a column for each number of ranks."""

    def seconds(name: str) -> Any:
        return lambda one: f"{one['step_seconds'][name]:.2f} s"

    rows: dict[str, Any] = {
        "CPU seconds of a PPO step": seconds("a step"),
        "of these, arithmetic": seconds("its arithmetic"),
        "fixed costs": seconds("fixed costs"),
        "Python code (profiled)": lambda one: f"{_python_seconds(one):.2f} s",
        "collectives": lambda one: sum(calls for calls, _ in one["collectives"].values()),
        "gathers of weights": lambda one: one["calls"]["gathers of weights"],
        "module hooks of ZeRO-3": lambda one: one["calls"]["module hooks of ZeRO-3"],
        "reads of a number by the host": lambda one: one["reads"],
        "operators": lambda one: sum(one["operators"].values()),
    }
    ranks = [number for number in found if number in before]
    table = [[title, *(f"{cost(before[n])} -> {cost(found[n])}" for n in ranks)] for title, cost in rows.items()]
    return markdown(["a PPO step", *(f"{number} rank(s), before -> now" for number in ranks)], table)


def _python_seconds(one: dict[str, Any]) -> float:
    """CPU seconds of a profiled step outside C++ code of PyTorch and of this project."""
    return sum(spent for phase in one["cpu_seconds"].values() for name, spent in phase.items() if "(C++)" not in name)
