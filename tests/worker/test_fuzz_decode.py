"""The fuzz target and its corpus, for a fixed number of records; `make faults` goes on for longer."""

import random

import pytest

from tests.fuzz_decode import DECODERS, NOW_MS, NoEvent, NotSaid, check, corpus, expected, poll
from worker.events import ITEM_REASONS, Reason

SHORT = {reason for reason in Reason if reason != Reason.TOO_LARGE and reason not in ITEM_REASONS}


@pytest.mark.parametrize("name", corpus())
def test_every_record_of_the_corpus_ends_where_its_name_says(name: str) -> None:
    record, (outcome, _, _) = corpus()[name], name.partition(".")
    decoded = DECODERS[0].decode([record], [NOW_MS])
    found = decoded.rejected[0].reason if decoded.rejected else "accepted"
    assert found == outcome
    check([record])


def test_the_corpus_has_a_record_for_every_reason_that_a_short_one_can_have() -> None:
    outcomes = {name.partition(".")[0] for name in corpus()}
    assert outcomes == {"accepted", *SHORT}


def test_the_second_reading_of_the_contract_agrees_with_the_names() -> None:
    """Otherwise it would test nothing."""
    for name, record in corpus().items():
        try:
            expected(record)
            assert name.startswith("accepted"), name
        except NoEvent:
            assert not name.startswith("accepted"), name
        except NotSaid:
            assert "deep" in name or "nested" in name, name


def test_mutated_records_are_read_as_the_contract_says_and_nothing_raises() -> None:
    rng, seeds = random.Random(0), list(corpus().values())
    outcomes = sum((check(poll(rng, seeds)) for _ in range(1500)), start=check([]))
    assert outcomes["accepted"] > 500
    assert all(outcomes[reason] for reason in SHORT)
