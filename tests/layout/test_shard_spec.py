"""ShardSpec: its notation there and back, local shapes, every malformed spec."""

import pytest
from helpers import message
from hypothesis import given, settings
from hypothesis import strategies as st

from torchgspmd import UNCONSTRAINED, Mesh, ShardSpec

MESH = Mesh(data=2, model=4)

PARSED = [
    ("", ShardSpec(())),
    ("_", ShardSpec(((),))),
    ("data _ model", ShardSpec((("data",), (), ("model",)))),
    ("data+model _", ShardSpec((("data", "model"), ()))),
    ("? model", ShardSpec(((), ("model",)), (True, False))),
    ("data?", ShardSpec((("data",),), (True,))),
    ("data _ sum@model", ShardSpec((("data",), ()), (), ("model",))),
    ("_ max@data+model", ShardSpec(((),), (), ("data", "model"), "max")),
    ("data:p1 ?:p2 _", ShardSpec((("data",), (), ()), (False, True, False), priorities=(1, 2, 0))),
    ("min@data", ShardSpec((), (), ("data",), "min")),
]


@pytest.mark.parametrize("text, spec", PARSED)
def test_notation(text, spec):
    assert ShardSpec.parse(text) == spec
    assert str(spec) == text


@pytest.mark.parametrize(
    "entries, text",
    [
        ((), ""),
        ((None,), "_"),
        (["data", None], "data _"),
        ((("data", "model"), None), "data+model _"),
        ((UNCONSTRAINED, "model"), "? model"),
        (((), None), "_ _"),
        ([["data"], ("model",)], "data model"),
    ],
)
def test_sequences_mean_the_same_as_strings(entries, text):
    assert ShardSpec.parse(entries) == ShardSpec.parse(text)


def test_blanks_do_not_matter():
    assert ShardSpec.parse("  data   _ ") == ShardSpec.parse("data _")
    assert ShardSpec.parse("_?") == ShardSpec.parse("?")


@st.composite
def specs(draw):
    axes = draw(st.permutations("abcdef"))
    dims, opens = [], []
    for _ in range(draw(st.integers(0, 4))):
        count = draw(st.integers(0, min(2, len(axes))))
        dims.append(tuple(axes[:count]))
        axes = axes[count:]
        opens.append(draw(st.booleans()))
    pending = tuple(axes[: draw(st.integers(0, min(2, len(axes))))])
    return ShardSpec(
        tuple(dims), tuple(opens), pending, draw(st.sampled_from(["sum", "max", "min", "prod"]))
    )


@settings(derandomize=True, deadline=None, max_examples=200)
@given(specs())
def test_parse_and_print_are_inverses(spec):
    again = ShardSpec.parse(str(spec))
    assert again == spec and hash(again) == hash(spec) and str(again) == str(spec)


def test_equal_layouts_are_equal():
    assert ShardSpec(((),), (), (), "max") == ShardSpec(((),))
    assert ShardSpec(((),), (False,)) == ShardSpec(((),))
    assert ShardSpec((("a",),)) != ShardSpec((("b",),))


def test_frozen():
    with pytest.raises(AttributeError):
        ShardSpec.parse("_").dims = ()


def test_made_from_others():
    spec = ShardSpec.parse("data? _ sum@model")
    assert str(spec.closed()) == "data _ sum@model"
    assert str(spec.with_pending(())) == "data? _"
    assert str(spec.with_pending(("model",), "max")) == "data? _ max@model"
    assert str(spec.with_dim(1, ("model",))) == "data? model sum@model"
    assert str(ShardSpec.replicated(2)) == "_ _" and str(ShardSpec.unconstrained(2)) == "? ?"
    assert [ShardSpec.parse(t).is_replicated for t in ("_ _", "? _", "data _", "_ sum@data")] == [
        True,
        True,
        False,
        False,
    ]
    assert ShardSpec.parse("data _ model+pipe sum@rest").sharding_axes == ("data", "model", "pipe")


@pytest.mark.parametrize(
    "text, shape, local",
    [
        ("data _", (8, 3), (4, 3)),
        ("data+model _", (8, 3), (1, 3)),
        ("data+model _", (9, 3), (2, 3)),
        ("_ model", (8, 3), (8, 1)),
        ("model", (5,), (2,)),
        ("model", (0,), (0,)),
        ("", (), ()),
    ],
)
def test_local_shape_is_the_same_on_every_device(text, shape, local):
    assert ShardSpec.parse(text).local_shape(shape, MESH) == local


def test_shards():
    assert ShardSpec.parse("data _ sum@model").shards(MESH) == 2
    assert ShardSpec.parse("data+model").shards(MESH) == 8


WORDS = "  fix   write one word per dimension: '_', '?', an axis, or axes joined by '+'"
ENTRIES = "use None, an axis name, a tuple of axis names or UNCONSTRAINED"
WHERE = "\n  where test_shard_spec.py:N"
MALFORMED = [
    ("a++b", f"'a++b' in spec 'a++b' is not an axis name{WHERE}\n{WORDS}"),
    ("_ a+", f"'a+' in spec '_ a+' is not an axis name{WHERE}\n{WORDS}"),
    ("_+a", f"'_+a' in spec '_+a' is not an axis name{WHERE}\n{WORDS}"),
    ("1a", f"'1a' in spec '1a' is not an axis name{WHERE}\n{WORDS}"),
    ("a-b", f"'a-b' in spec 'a-b' is not an axis name{WHERE}\n{WORDS}"),
    ("a, b", f"'a,' in spec 'a, b' is not an axis name{WHERE}\n{WORDS}"),
    ("a??", f"'a?' in spec 'a??' is not an axis name{WHERE}\n{WORDS}"),
    ("?a", f"'?a' in spec '?a' is not an axis name{WHERE}\n{WORDS}"),
    ("sum@m a", f"'sum@m' in spec 'sum@m a' is not an axis name{WHERE}\n{WORDS}"),
    (
        "a ave@m",
        f"'ave' in spec 'a ave@m' is not a reduction; use one of sum, max, min, prod{WHERE}",
    ),
    ("a @m", f"'' in spec 'a @m' is not a reduction; use one of sum, max, min, prod{WHERE}"),
    (
        "a sum@",
        f"'' in spec 'a sum@' is not an axis name{WHERE}\n"
        "  fix   write an axis behind '@', or axes joined by '+'",
    ),
    (
        "a sum@m+",
        f"'m+' in spec 'a sum@m+' is not an axis name{WHERE}\n"
        "  fix   write an axis behind '@', or axes joined by '+'",
    ),
    (
        "a sum@_",
        f"'_' in spec 'a sum@_' is not an axis name{WHERE}\n"
        "  fix   write an axis behind '@', or axes joined by '+'",
    ),
    (3, f"a spec is a string such as 'data _' or a tuple such as ('data', None), not 3{WHERE}"),
    (
        None,
        f"a spec is a string such as 'data _' or a tuple such as ('data', None), not None{WHERE}",
    ),
    (
        {"a": 1},
        f"a spec is a string such as 'data _' or a tuple such as ('data', None), not {{'a': "
        f"1}}{WHERE}",
    ),
    (("a", 3), f"3 is not an entry of a spec; {ENTRIES}{WHERE}"),
    ((("a", None),), f"('a', None) is not an entry of a spec; {ENTRIES}{WHERE}"),
    (("data model",), f"'data model' is not an entry of a spec; {ENTRIES}{WHERE}"),
    (("data+model",), f"'data+model' is not an entry of a spec; {ENTRIES}{WHERE}"),
    (("_", "data"), f"'_' is not an entry of a spec; {ENTRIES}{WHERE}"),
    (("", "data"), f"'' is not an entry of a spec; {ENTRIES}{WHERE}"),
    ((("data", "_"),), f"('data', '_') is not an entry of a spec; {ENTRIES}{WHERE}"),
]


@pytest.mark.parametrize("spec, text", MALFORMED, ids=[repr(spec) for spec, _ in MALFORMED])
def test_malformed(spec, text):
    assert message(lambda: ShardSpec.parse(spec)) == text


UNFIT = [
    (
        "data _ _",
        (4, 8),
        f"spec 'data _ _' has 3 entries, but the tensor has 2 dimensions [4, 8]{WHERE}\n"
        "  fix   write one entry per dimension, such as 'data _'",
    ),
    (
        "data",
        (),
        f"spec 'data' has 1 entries, but the tensor has 0 dimensions []{WHERE}\n"
        "  fix   write one entry per dimension, such as ''",
    ),
    (
        "data data",
        (4, 8),
        f"'data' occurs twice in spec 'data data'{WHERE}\n"
        "  why   an axis shards at most one dimension of a tensor\n"
        "  fix   remove one of the two",
    ),
    (
        "data+data _",
        (4, 8),
        f"'data' occurs twice in spec 'data+data _'{WHERE}\n"
        "  why   an axis shards at most one dimension of a tensor\n"
        "  fix   remove one of the two",
    ),
    (
        "data _ sum@data",
        (4, 8),
        f"'data' occurs twice in spec 'data _ sum@data'{WHERE}\n"
        "  why   an axis shards at most one dimension of a tensor\n  fix   remove one of the two",
    ),
    ("data modl", (4, 8), f"mesh data=2,model=4 has no axis 'modl'; did you mean 'model'?{WHERE}"),
    (
        "data _ sum@x",
        (4, 8),
        f"mesh data=2,model=4 has no axis 'x'; use one of 'data', 'model'{WHERE}",
    ),
]


@pytest.mark.parametrize("spec, shape, text", UNFIT, ids=[spec for spec, _, _ in UNFIT])
def test_specs_that_do_not_fit(spec, shape, text):
    assert message(lambda: ShardSpec.parse(spec).check(MESH, shape)) == text


def test_check_returns_the_spec():
    spec = ShardSpec.parse("data? model")
    assert spec.check(MESH, (4, 8)) is spec


@pytest.mark.parametrize("entries", [{"open": (True,)}, {"windows": (None,)}, {"parts": (2,)}])
def test_each_dimension_has_an_entry(entries):
    with pytest.raises(ValueError, match="has no entry for each of 2 dimensions"):
        ShardSpec((("data",), ()), **entries)


def test_a_stack_has_one_more_dimension():
    spec = ShardSpec((("data",), ()), open=(True, False), priorities=(1, 0), parts=(1, 2))
    assert spec.stacked() == ShardSpec(
        ((), ("data",), ()), open=(False, True, False), priorities=(0, 1, 0), parts=(1, 1, 2)
    )
