"""Fingerprints of data rows."""

from datasets import Dataset

from dschat_ppo.data.fingerprint import fingerprint


def test_a_fingerprint_tells_rows_apart_however_they_are_stored(tmp_path):
    content = {"ids": [[1, 2], [3], []], "row": ["a", "b", "c"]}
    rows = Dataset.from_dict(content)
    expected = fingerprint(rows)
    assert len(expected) == 64 and fingerprint(Dataset.from_dict(content)) == expected
    rows.save_to_disk(str(tmp_path / "rows"), num_shards=2)
    assert fingerprint(Dataset.load_from_disk(str(tmp_path / "rows"))) == expected
    assert fingerprint(rows.select([0, 1, 2])) == expected
    assert fingerprint(rows.select([2, 1, 0]).select([2, 1, 0])) == expected
    for other in ({**content, "ids": [[1, 2], [4], []]}, {**content, "ids": [[1], [2, 3], []]}):
        assert fingerprint(Dataset.from_dict(other)) != expected
    assert fingerprint(rows.select([1, 0, 2])) != expected
    assert fingerprint(rows.select([0, 1])) != expected
