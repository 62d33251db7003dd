"""Thinned series, by hand."""

from dschat_ppo.html_report.thinning import Series, rounded, thin


def test_a_short_series_keeps_its_points_and_marks_nan():
    assert thin([(1, 0.5), (2, None), (4, 2.0)], 3) == Series([1, 2, 4], [0.5, None, 2], None, None, [2])


def test_a_long_series_keeps_mean_minimum_and_maximum_of_each_stretch():
    points = [(1, 1.0), (2, 3.0), (3, 10.0), (4, 20.0), (5, 60.0)]
    assert thin(points, 2) == Series([2, 5], [2, 30], [1, 10], [3, 60], [])


def test_nan_inside_a_stretch_is_marked_and_not_averaged():
    points = [(1, 1.0), (2, None), (3, None), (4, None)]
    assert thin(points, 2) == Series([2, 4], [1, None], [1, None], [1, None], [2, 4])


def test_twenty_thousand_steps_become_the_points_asked_for_and_keep_a_spike():
    made = thin([(step, 7.0 if step == 12345 else 1.0) for step in range(1, 20001)], 400)
    assert len(made.steps) == 400
    assert made.steps[-1] == 20000
    assert max(made.highs) == 7
    assert max(made.means) == 1.12  # 49 times 1 and once 7, over 50 steps


def test_no_points_give_no_points():
    assert thin([], 5).steps == []


def test_rounding_keeps_four_digits_and_whole_numbers():
    assert [rounded(value) for value in (0.123456, 12345.678, 999999.0, -2.0, 0.0)] == [0.1235, 12350, 999999, -2, 0]
    assert str(rounded(3.0)) == "3"
