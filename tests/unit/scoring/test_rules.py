import pytest

from hpc_rlhf.errors import UserError
from hpc_rlhf.scoring.rules import make_rule

NUMBER = r"(-?[\d.,]*\d)"


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("8", "8", 1.0),
        (" 8\n", "8", 1.0),
        ("8.", "8", 0.0),
        ("08", "8", 0.0),  # without a pattern the text itself is the answer
        ("18", "8", 0.0),
        ("", "8", 0.0),
    ],
)
def test_exact_match_of_the_whole_completion(completion: str, answer: str, reward: float) -> None:
    assert make_rule("exact", None, None)(completion, answer, {}) == reward


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("He sells 3, so it is 1,234 dollars.", "1234", 1.0),
        ("It is 1234.00", "1,234", 1.0),
        ("It is -5", "-5", 1.0),
        ("It is 18. No, 19", "18", 0.0),  # the last one counts
        ("I do not know", "18", 0.0),
        ("It is 0.5", ".50", 1.0),
    ],
)
def test_exact_match_of_a_number_in_the_completion(
    completion: str, answer: str, reward: float
) -> None:
    assert make_rule("exact", NUMBER, None)(completion, answer, {}) == reward


@pytest.mark.parametrize(
    ("given", "answer", "reward"),
    [
        ("$1,000", "1000", 1.0),
        ("50%", "50", 1.0),
        ("x", "x", 1.0),
        ("X", "x", 0.0),
        ("nan", "nan", 1.0),  # as text: no number equals itself less than this one
        ("1e3", "1000", 1.0),
    ],
)
def test_numbers_are_compared_as_numbers_and_text_as_text(
    given: str, answer: str, reward: float
) -> None:
    assert make_rule("exact", r"answer: (\S+)", None)(f"answer: {given}", answer, {}) == reward


def test_an_optional_group_that_did_not_match_is_a_wrong_answer() -> None:
    assert make_rule("exact", r"answer(?:: (\d+))?", None)("answer", "8", {}) == 0.0


def test_exact_match_without_an_answer_is_a_failure_not_a_zero() -> None:
    with pytest.raises(ValueError, match=r"data\.answer_field"):
        make_rule("exact", None, None)("8", None, {})


def test_regex() -> None:
    rule = make_rule("regex", r"<think>.*</think>", None)
    assert rule("<think>3+5</think>8", None, {}) == 1.0
    assert rule("8", None, {}) == 0.0


@pytest.mark.parametrize(
    ("name", "pattern", "function", "message"),
    [
        ("regex", None, None, r"reward\.name=regex needs reward\.pattern"),
        ("regex", "(", None, r"reward\.pattern='\(': not a regular expression"),
        ("exact", "(", None, r"reward\.pattern='\(': not a regular expression"),
        ("python", None, None, r"needs reward\.function, package\.module:function"),
        ("python", None, "json.loads", r"json\.loads: expected package\.module:function"),
        ("python", None, "no.such:f", "cannot import it: ModuleNotFoundError.*PYTHONPATH"),
        ("python", None, "json:no_such", "cannot import it: AttributeError"),
        ("python", None, "json:__name__", "it is a str, not callable"),
        (
            "python",
            None,
            "tests.unit.scoring.reward_functions:of_completion",
            r"called as function\(completion, answer, fields\), and it is of_completion\(completion",
        ),
        (
            "python",
            None,
            "tests.unit.scoring.reward_functions:asynchronous",
            "it is an async function",
        ),
    ],
)
def test_rules_that_cannot_be(
    name: str, pattern: str | None, function: str | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_rule(name, pattern, function)
