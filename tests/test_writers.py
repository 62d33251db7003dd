"""What stands in `metrics.jsonl` and `result.json`."""

import json
import math

from dschat_ppo.monitor.writers import MetricsWriter, write_result


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {"loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
        writer.write(2, {"loss": 2.0})
    first, second = (json.loads(line, parse_constant=no_constant) for line in (tmp_path / "metrics.jsonl").open())
    assert (first["step"], first["loss"], first["grad_norm"], first["lr"]) == (1, None, None, 0.5)
    assert (second["step"], second["loss"]) == (2, 2.0)


def test_result_is_json_and_leaves_nothing_partial(tmp_path):
    write_result(tmp_path, {"grad_norm_after": math.inf, "steps": 3})
    assert json.loads((tmp_path / "result.json").read_text(), parse_constant=no_constant) == {
        "grad_norm_after": None,
        "steps": 3,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
