"""Advantages worked by hand."""

import pytest

from tmax.train.advantage import centred, has_spread


def test_advantages_are_centred_and_not_divided_by_the_spread() -> None:
    assert centred([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]
    assert centred([1.0, 1.0]) == [0.0, 0.0]


def test_equal_rewards_have_no_spread_even_where_their_deviation_is_not_zero() -> None:
    assert not has_spread([0.1] * 10)
    assert not has_spread([])
    assert has_spread([0.0, 1.0])


def test_an_empty_group_is_refused() -> None:
    with pytest.raises(ValueError, match="empty group"):
        centred([])
