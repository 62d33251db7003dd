"""Data sets as flags name them."""

import re

import pytest

from dschat_ppo.data.parts import kind_of
from dschat_ppo.data.sources import is_hub_name, parse_sources
from dschat_ppo.errors import UserError


def parse(*specs: str, flag: str = "--data_path", taken=()):
    return parse_sources(specs, flag, taken)


@pytest.mark.parametrize(
    ("spec", "location", "config", "split", "weight", "samples"),
    [
        ("openai/gsm8k", "openai/gsm8k", None, None, None, None),
        ("openai/gsm8k:main", "openai/gsm8k", "main", None, None, None),
        ("openai/gsm8k:main[train]", "openai/gsm8k", "main", "train", None, None),
        ("openai/gsm8k[train]", "openai/gsm8k", None, "train", None, None),
        ("openai/gsm8k:0.3", "openai/gsm8k", None, None, 0.3, None),
        ("openai/gsm8k:2", "openai/gsm8k", None, None, 2.0, None),
        ("cnn_dailymail:3.0.0", "cnn_dailymail", "3.0.0", None, None, None),
        ("cnn_dailymail:3.0.0:1e-1", "cnn_dailymail", "3.0.0", None, 0.1, None),
        ("org/name:2[train]", "org/name", "2", "train", None, None),
        ("org/name:cfg[train[:10%]]:0.5", "org/name", "cfg", "train[:10%]", 0.5, None),
        ("org/name[train[:10%]+test[5:]]@20", "org/name", None, "train[:10%]+test[5:]", None, 20),
        ("data.jsonl:0.3", "data.jsonl", None, None, 0.3, None),
        ("folder@5000", "folder", None, None, None, 5000),
        ("./folder:main[test]", "./folder", "main", "test", None, None),
    ],
)
def test_the_parts_of_a_name(spec, location, config, split, weight, samples):
    (found,) = parse(spec)
    assert (found.location, found.config, found.split) == (location, config, split)
    assert (found.weight, found.samples) == (weight, samples)
    assert (found.spec, found.flag) == (spec, "--data_path")


@pytest.mark.parametrize("name", ["a:0.3", "b@7", "c[train]", "d:x[train]@5", "e:1.jsonl"])
def test_what_exists_is_that_path(tmp_path, name):
    (tmp_path / name).write_text("")
    path = str(tmp_path / name)
    for ending, weight, samples, split in [
        ("", None, None, None), (":0.5", 0.5, None, None), ("@9", None, 9, None), ("[test]", None, None, "test"),
    ]:  # fmt: skip
        (found,) = parse(path + ending)
        assert (found.location, found.weight, found.samples) == (path, weight, samples)
        assert (found.config, found.split) == (None, split)
    (found,) = parse(f"{path}:cfg[x]:2")
    assert (found.location, found.config, found.split, found.weight) == (path, "cfg", "x", 2.0)


def test_the_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").write_text("")
    assert parse("~/a.jsonl:0.5")[0].location == str(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("specs", "names"),
    [
        (["a/x.jsonl", "b/x.jsonl.gz", "x.csv", "x_2"], ["x", "x_2", "x_3", "x_2_2"]),
        (["openai/gsm8k:main[train]", "openai/gsm8k:socratic"], ["gsm8k", "gsm8k_2"]),
        (["./my data (1)/", "./a.b.parquet"], ["my_data_1", "a.b"]),
        (["/", "./.."], ["data", None]),
    ],
)
def test_names_are_short_unique_and_fit_for_metrics(specs, names):
    found = [source.name for source in parse(*specs)]
    assert all(name in (None, got) for name, got in zip(names, found, strict=True))
    assert len(set(found)) == len(found) and all(" " not in name and "/" not in name for name in found)


def test_names_differ_from_those_of_other_flags():
    assert [source.name for source in parse("org/a", "org/b", taken=["a", "c"])] == ["a_2", "b"]


@pytest.mark.parametrize(
    ("specs", "words"),
    [
        (["a.jsonl:0"], "the weight '0' must be a finite number above 0"),
        (["a.jsonl:-1"], "weight '-1'"),
        (["a.jsonl:nan"], "weight 'nan'"),
        (["a.jsonl:inf"], "weight 'inf'"),
        (["org/a:1e999"], "weight '1e999'"),
        (["org/a@0"], "rows '0' must be a whole number above 0"),
        (["org/a@2.5"], "rows '2.5'"),
        (["org/a@-3"], "rows '-3'"),
        *(
            ([name], f"'{re.escape(name)}': no such file or folder, and no name of a data set")
            for name in (
                "org/a@main",
                "org/a[]",
                "org/a]",
                "[train]",
                ":cfg",
                "org/a:",
                "",
                "https://huggingface.co/datasets/org/a",
            )
        ),
        (["a.jsonl:0.5", "b.jsonl"], r"'a.jsonl:0.5' has a weight and 'b.jsonl' has none"),
        (["a.jsonl@5", "b.jsonl", "c.jsonl:1"], "'c.jsonl:1' has a weight and 'b.jsonl' has none"),
    ],
)
def test_wrong_names_are_rejected_with_their_flag(specs, words):
    with pytest.raises(UserError, match=f"^--data_path.*{words}") as problem:
        parse(*specs)
    assert "\n" not in str(problem.value)


def test_data_sets_with_a_number_of_rows_need_no_weight():
    assert [source.weight for source in parse("a.jsonl:0.5", "b.jsonl@7", "c.jsonl:2")] == [0.5, None, 2.0]
    assert [source.weight for source in parse("a.jsonl", "b.jsonl@7")] == [None, None]


def test_paths_and_hub_names_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("org/name") and is_hub_name("wikitext")
    assert not any(map(is_hub_name, ["./x", "/x", "~/x", "a/b/c", "x.jsonl", "org/x.CSV.gz"]))
    (tmp_path / "wikitext").mkdir()
    assert not is_hub_name("wikitext")


def test_compressed_names_are_data_files():
    assert all(map(kind_of, ["a.jsonl", "a.tsv.gz", "a.JSON.ZST", "a.arrow", "a.txt"]))
    assert not any(map(kind_of, ["a.gz", "a.md", "jsonl", "a.zip"]))
