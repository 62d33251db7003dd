"""The outputs of `--validate_only`."""

import json
import math

from dschat_ppo.html_report.run_folder import read_run
from dschat_ppo.monitor.writers import is_finished
from dschat_ppo.session.validation import VALIDATION, write_validation


def test_a_validation_is_a_run_of_step_0_that_does_not_finish_the_training_around_it(tmp_path):
    folder = tmp_path / VALIDATION
    (folder / "eval").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval/score": 9.0}\n')  # of an earlier validation
    metrics = {"eval/score": 0.5, "eval/kl_ref_k1": math.nan}
    found = write_validation(folder, metrics, 1.234)
    assert found == {**metrics, "world_size": 1, "seconds": 1.23}
    expected = {"eval/score": 0.5, "eval/kl_ref_k1": None, "world_size": 1, "seconds": 1.23}
    assert json.loads((folder / "result.json").read_text()) == expected
    run = read_run(folder, "a")
    assert (run.steps, run.metrics) == ([0], {"eval/score": [(0, 0.5)], "eval/kl_ref_k1": [(0, None)]})
    assert "<html" in (folder / "report.html").read_text()
    assert not is_finished(tmp_path) and [path.name for path in tmp_path.iterdir()] == [VALIDATION]
