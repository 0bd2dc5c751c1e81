"""The golden table of bytes: a pair sends no more than its features need."""

from composition.sent_bytes import MORE, SENT, SETTLED, allowed, every


def test_rows_are_those_of_features_and_pairs():
    assert SENT.keys() == {*every()}
    assert {*MORE} <= SENT.keys() and {*SETTLED} <= SENT.keys()


def test_a_pair_sends_no_more_than_its_features_need():
    pairs = {name: sent for name, sent in SENT.items() if "+" in name and sent is not None}
    more = {name: sent for name, sent in pairs.items() if sent > allowed(name)}
    assert not more, {name: (sent, allowed(name)) for name, sent in more.items()}


def test_exceptions_are_used():
    """A pair that is settled for sends more than the sum, and so does one with each feature."""
    sums = {
        name: sum(SENT[feature] or 0 for feature in name.split("+"))
        for name, sent in SENT.items()
        if "+" in name and sent is not None
    }
    over = {name for name in sums if (SENT[name] or 0) > sums[name]}
    assert {*SETTLED} <= over
    assert {*MORE} <= {feature for name in over for feature in name.split("+")}
