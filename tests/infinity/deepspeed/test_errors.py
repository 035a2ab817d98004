"""The page of errors is what scripts say that cannot work: each names what it is about and what to do."""

from __future__ import annotations

from tests.infinity.deepspeed.errors import PAGE, SCRIPTS, page, said


def test_the_page_says_what_scripts_say() -> None:
    answers = said()
    assert answers.keys() == SCRIPTS.keys()
    assert PAGE.read_text() == page(answers)
    for answer in answers.values():
        kind, _, text = answer.partition(": ")
        assert kind in ("ConfigError", "ImportError", "AttributeError", "WeightsError", "EngineStateError")
        assert ":" in text  # what is wrong, and the remedy behind it
