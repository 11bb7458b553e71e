import pytest
from builders import measurement, trial_config

from pipetune.core.record import TrialRecord
from pipetune.core.study import Budget
from pipetune.search.budget import CERTIFICATION_SHARE, CHOOSING_SHARE, LEAST_ROUNDS, ROUNDS, Spending


class Clock:
    def __init__(self):
        self.now_s = 500.0

    def __call__(self):
        return self.now_s


def spending(*, seconds=None, trials=None, spent_before_s=0.0):
    clock = Clock()
    budget = Budget(seconds=seconds, trials=trials)
    return Spending(budget, spent_before_s=spent_before_s, clock=clock), clock


def records(*seconds):
    config = trial_config()
    return [
        TrialRecord(number=number, config=config, outcome=measurement(config), seconds=took)
        for number, took in enumerate(seconds)
    ]


def test_time_runs_from_what_earlier_runs_spent():
    spent, clock = spending(seconds=60.0, spent_before_s=20.0)
    clock.now_s += 5.0
    assert spent.seconds() == pytest.approx(25.0)
    assert spent.seconds_left() == pytest.approx(35.0)


def test_time_left_is_never_negative():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 1000.0
    assert spent.seconds_left() == 0.0


def test_a_budget_of_trials_has_no_time_left_to_tell():
    assert spending(trials=5)[0].seconds_left() is None


@pytest.mark.parametrize(("done", "allowed"), [(0, True), (2, True), (3, False), (4, False)])
def test_trials_are_counted(done, allowed):
    assert spending(trials=3)[0].allows_trial(records(*[7.0] * done), []) is allowed


def test_the_first_trial_is_allowed_in_any_time():
    assert spending(seconds=1.0)[0].allows_trial([], [])


def test_time_for_certification_is_kept_back():
    # GIVEN a leader and a baseline of 9 and 11 s, and 2 s to set up a fresh process
    spent, clock = spending(seconds=200.0)
    spent.set_up_s = 2.0
    done = records(9.0, 10.0, 11.0)
    pair = [spent.fresh_s(9.0), spent.fresh_s(11.0)]
    reserve_s = LEAST_ROUNDS * (9.0 + 2.0 + 11.0 + 2.0)
    # THEN a trial is allowed while it and the certification fit, and not a second longer
    clock.now_s += 200.0 - reserve_s - 10.0 - 1.0
    assert spent.allows_trial(done, pair)
    clock.now_s += 2.0
    assert not spent.allows_trial(done, pair)


def test_certification_keeps_back_no_more_than_its_share():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 60.0 * CERTIFICATION_SHARE - 11.0
    assert spent.allows_trial(records(10.0), [1010.0])
    clock.now_s += 2.0
    assert not spent.allows_trial(records(10.0), [1010.0])


def test_where_several_may_be_the_best_time_for_choosing_is_kept_back_too():
    # GIVEN a leader and a baseline of 10 s, and three that have to be compared first
    spent, clock = spending(seconds=1000.0)
    pair, finalists = [10.0, 10.0], [10.0, 10.0, 10.0]
    reserve_s = LEAST_ROUNDS * (sum(pair) + sum(finalists))
    clock.now_s += 1000.0 - reserve_s - 10.0 + 1.0
    assert not spent.allows_trial(records(10.0), pair, finalists)
    assert spent.allows_trial(records(10.0), pair)


def test_choosing_keeps_back_no_more_than_its_share():
    spent, clock = spending(seconds=1000.0)
    pair = [10.0, 10.0]
    clock.now_s += 1000.0 - LEAST_ROUNDS * sum(pair) - CHOOSING_SHARE * 1000.0 - 11.0
    assert spent.allows_trial(records(10.0), pair, [10.0] * 50)
    clock.now_s += 2.0
    assert not spent.allows_trial(records(10.0), pair, [10.0] * 50)


@pytest.mark.parametrize(
    ("left_s", "finalists"),
    [
        (200.0, 3),
        (100.0, 3),  # two rounds of 3 arms and of the pair, 10 s each
        (99.0, 2),
        (80.0, 2),
        (79.0, 1),  # the leader meets the baseline unchosen
        (0.0, 1),
    ],
)
def test_as_many_finalists_as_fit_are_compared(left_s, finalists):
    spent, clock = spending(seconds=500.0)
    clock.now_s += 500.0 - left_s
    assert spent.affordable_finalists([10.0, 10.0, 10.0], [10.0, 10.0]) == finalists


def test_without_a_limit_of_time_all_finalists_are_compared():
    assert spending(trials=5)[0].affordable_finalists([1000.0] * 9, [1000.0] * 2) == 9


def test_choosing_goes_on_while_the_pair_still_fits():
    spent, clock = spending(seconds=500.0)
    clock.now_s += 500.0 - 75.0
    assert spent.allows_choosing(30.0, [10.0, 10.0])
    assert not spent.allows_choosing(40.0, [10.0, 10.0])
    assert spending(trials=1)[0].allows_choosing(1e9, [1e9])


def test_whichever_is_spent_first_ends_the_search():
    spent, clock = spending(seconds=60.0, trials=5)
    assert not spent.allows_trial(records(*[1.0] * 5), [])
    clock.now_s += 60.0
    assert not spent.allows_trial(records(1.0), [])


def test_two_rounds_are_always_made():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 1000.0
    assert [spent.allows_verifying(done, 30.0) for done in range(4)] == [True, True, False, False]


def test_a_third_round_is_made_where_it_fits():
    spent, clock = spending(seconds=60.0)
    clock.now_s += 20.0
    assert spent.allows_verifying(2, 30.0)
    assert not spent.allows_verifying(2, 50.0)


def test_rounds_end_even_where_time_does_not():
    assert spending(trials=1)[0].allows_verifying(ROUNDS - 1, 1.0)
    assert not spending(trials=1)[0].allows_verifying(ROUNDS, 1.0)
