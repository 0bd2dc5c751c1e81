"""Sentences of rules: bound to shapes, printed, malformed."""

import pytest
import torch

from torchgspmd.rules import Call, LocalForm, describe, make_rule
from torchgspmd.rules.notation import Sentence


def bind(text, operands, results, **keywords):
    tensors, made = (
        tuple(torch.empty(s, device="meta") for s in shapes) for shapes in (operands, results)
    )
    return Sentence.parse(text).bind(Call(None, (), {}, tensors, made), **keywords)


def test_matrix_product():
    rule = bind("m k, k n -> m n", [(2, 3), (3, 5)], [(2, 5)], reduce="k", contraction=True)
    assert rule.operands == ((("m",), ("k",)), (("k",), ("n",))) and rule.results == (
        (("m",), ("n",)),
    )
    assert (
        dict(rule.sizes) == {"m": 2, "k": 3, "n": 5}
        and rule.reduce == {"k": "sum"}
        and rule.contraction
    )
    assert str(rule) == "m k, k n -> m n"


def test_ellipsis_stands_for_any_leading_dimensions():
    rule = bind("v e, ... -> ... e", [(7, 3), (2, 5)], [(2, 5, 3)], local=LocalForm(when="v"))
    assert rule.operands == ((("v",), ("e",)), (("_0",), ("_1",))) and rule.results == (
        (("_0",), ("_1",), ("e",)),
    )
    assert bind("... d -> ... d", [(4,)], [(4,)]).operands == ((("d",),),)


def test_dimension_of_several_factors():
    rule = bind("(h d) -> h d", [(6,)], [(2, 3)], sizes={"h": 2, "d": 3})
    assert rule.operands == ((("h", "d"),),) and dict(rule.sizes) == {"h": 2, "d": 3}


def test_size_one_carries_no_factor():
    assert bind("n 1 -> n", [(4, 1)], [(4,)]).operands == ((("n",), ()),)
    rule = bind("n k -> n", [(4, 1)], [(4,)], reduce="k", replicated="n")
    assert dict(rule.sizes) == {"n": 4} and rule.reduce == {} and rule.replicated == {"n"}


def test_no_operands():
    rule = bind("-> n", [], [(4,)])
    assert rule.operands == () and rule.results == ((("n",),),)


def test_fill_is_the_identity_of_the_reduction():
    rule = make_rule(
        [[("a",), ("b",), ("c",)]],
        [[]],
        {"a": 2, "b": 2, "c": 2},
        reduce={"a": "sum", "b": "max", "c": "prod"},
        local=LocalForm(when="c"),
    )
    assert [rule.fill(f) for f in "abc"] == [0.0, float("-inf"), None]


def test_describe():
    assert describe([[("h", "d"), ()], [("d",)]], [[("h",)]]) == "(h d) 1, d -> h"


MALFORMED = [
    ("m k", "rule 'm k' needs exactly one '->'"),
    ("m -> k -> n", "rule 'm -> k -> n' needs exactly one '->'"),
    ("1 1 -> 1 1x", "'1x' in rule '1 1 -> 1 1x' is not a factor"),
    ("m-k -> m", "'m-k' in rule 'm-k -> m' is not a factor"),
    ("... m ... -> m", "'... m ...' in rule '... m ... -> m' has more than one '...'"),
    ("a b) -> a", "'a b)' in rule 'a b) -> a' has nested or unpaired parentheses"),
    ("(a (b)) -> a", "'(a (b))' in rule '(a (b)) -> a' has nested or unpaired parentheses"),
    ("(a, b) -> a", "'(a' in rule '(a, b) -> a' has nested or unpaired parentheses"),
    ("a b a -> b", "'a b a' in rule 'a b a -> b' has a factor twice"),
    ("() -> a", "rule '() -> a' names no factor"),
    ("(a 2b) -> a", "'(a 2b)' in rule '(a 2b) -> a' is not a factor"),
]


@pytest.mark.parametrize("text, error", MALFORMED)
def test_malformed(text, error):
    with pytest.raises(ValueError) as caught:
        Sentence.parse(text)
    assert str(caught.value) == error


UNFIT = [
    (
        "m k -> m",
        [(2, 3, 4)],
        [(2,)],
        "'m k' describes 2 dimensions, the tensor has shape [2, 3, 4]",
    ),
    ("m, m -> m", [(2,), (3,)], [(2,)], "factor 'm' has sizes 2 and 3"),
    ("(h d) -> h", [(6,)], [(2,)], "the size of factor 'h' in '(h d)' is not known"),
]


@pytest.mark.parametrize("text, operands, results, error", UNFIT)
def test_shapes_that_do_not_fit(text, operands, results, error):
    with pytest.raises(ValueError) as caught:
        bind(text, operands, results)
    assert str(caught.value) == error


def test_number_of_tensors_must_fit():
    with pytest.raises(ValueError):
        bind("m, m -> m", [(2,)], [(2,)])
