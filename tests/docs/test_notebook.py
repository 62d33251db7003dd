"""docs/notebooks/sft-to-grpo.ipynb: what is stored of its execution, and that it runs."""

import json
import re

import pytest
from bash_blocks import ROOT

NOTEBOOK = ROOT / "docs/notebooks/sft-to-grpo.ipynb"
FOLDER = "output/notebook"  # of its outputs


def test_the_stored_notebook_has_the_outputs_of_one_execution_without_paths_of_a_machine():
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert len(text) < 300_000
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert not [output for output in outputs if output["output_type"] == "error"]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert not re.search(r"(?<![\w.])/\w+/", printed), "an absolute path"


@pytest.mark.release
def test_the_notebook_runs_and_both_policies_learn_the_rule(tmp_path):
    pytest.importorskip("ipykernel", reason='needs pip install -e ".[notebook]"')
    pytest.importorskip("matplotlib", reason='needs pip install -e ".[notebook]"')
    nbclient = pytest.importorskip("nbclient", reason='needs pip install -e ".[notebook]"')
    nbformat = pytest.importorskip("nbformat", reason='needs pip install -e ".[notebook]"')
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(FOLDER, str(tmp_path))
    nbclient.NotebookClient(
        notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": ROOT}}
    ).execute()
    for step in ("ppo", "grpo"):
        result = json.loads((tmp_path / step / "result.json").read_text())
        assert result["eval/score_after"] > result["eval/score_before"] + 0.15, step
    assert json.loads((tmp_path / "reward/result.json").read_text())["eval_accuracy_after"] > 0.95
