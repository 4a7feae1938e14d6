from hypothesis import given
from hypothesis import strategies as st

from segspeed.speed.cadence import Cadence


@given(st.floats(0.01, 0.5), st.floats(0.1, 20.0), st.floats(0.2, 3.0))
def test_the_cost_of_evaluation_stays_within_its_share(share, cost, step):
    total, elapsed, evaluations = 600.0, 0.0, 0
    cadence = Cadence(share, cost)
    while elapsed < total:
        elapsed += step
        if cadence.due(elapsed, total - elapsed):
            elapsed += cost
            cadence.done(cost)
            evaluations += 1
    assert cadence.spent <= share * total + 1e-6
    if cost / share > 3 * step:  # one a step is all there can be
        assert evaluations >= int(share * (total - 2 * cost) / cost / 1.5) - 2, "the share is used, too"


def test_a_share_of_zero_never_evaluates_in_between():
    assert not Cadence(0.0, 1.0).due(1e9, 1e9)
