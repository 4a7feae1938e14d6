import pytest

from segspeed.types import Case, Cohort, first_line


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Task04_Hippocampus", "Task04_Hippocampus"),
        ("a/b:c ü", "a_b_c ü"),
        ("..", "_"),
        ("../../etc", ".._.._etc"),
        ("", "cohort"),
    ],
)
def test_a_cohort_cannot_name_a_folder_elsewhere(name, folder):
    assert Cohort(name, (), {}, ()).folder_name == folder


def test_a_case_without_a_patient_is_its_own():
    assert Case("c", ()).patient == "c"
    assert Case("c", (), patient="p").patient == "p"
    with pytest.raises(KeyError):
        Cohort("x", (), {}, ()).case("c")


def test_an_error_in_one_line_even_if_it_says_nothing():
    assert first_line(ValueError("a\nb")) == "a"
    assert first_line(EOFError()) == "EOFError"
    assert first_line(ValueError("x" * 300)) == "x" * 160
