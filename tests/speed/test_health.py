from segspeed.speed.health import Health


def after(health, dice, share=0.5):
    known = [d for d in dice.values() if d is not None]
    return health.evaluated(dice, sum(known) / len(known) if known else None, share)


def test_a_class_that_stays_at_zero_is_told_once_and_by_name():
    health = Health()
    said = [after(health, {"liver": 0.8, "lesion": 0.0}) for _ in range(5)]
    assert [len(s) for s in said] == [0, 0, 1, 0, 0]
    assert said[2][0].startswith("lesion is still at Dice 0 after 50% of the run")


def test_a_class_that_comes_late_or_is_absent_is_not_dead():
    health = Health()
    assert not any(after(health, {"liver": 0.8, "lesion": d}) for d in (0.0, 0.0, 0.2, 0.0, 0.0))
    assert not any(after(Health(), {"liver": 0.8, "lesion": None}) for _ in range(9))


def test_nothing_is_expected_early():
    health = Health()
    assert not any(after(health, {"liver": 0.0}, share=0.05) for _ in range(9))


def test_a_mean_at_chance_is_told_with_its_likely_causes():
    health = Health()
    said = [after(health, {"a": 0.02, "b": 0.0}) for _ in range(4)]
    assert [len(s) for s in said] == [0, 0, 1, 0]
    assert "no better than chance" in said[2][0]
    assert "check.html" in said[2][0]


def test_a_loss_that_climbs_is_told_and_noise_is_not():
    health = Health()
    assert not any(health.step(1.0 - 0.002 * n + 0.3 * (n % 2), 0.1) for n in range(300))
    said = [text for n in range(300) for text in health.step(0.6 + 0.02 * n, 0.6)]
    assert len(said) == 1
    assert "learning rate" in said[0]
