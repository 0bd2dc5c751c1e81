"""What the programs of a wrapped module are looked up by."""

from torchgspmd.runtime.module_proxy import leaf_key


class Options:
    def __init__(self, scale, inner=None):
        self.scale, self.inner = scale, inner


def test_what_programs_are_made_for():
    """Objects of one content share a program, however deep it lies; functions do not."""
    assert leaf_key(Options(1, Options([2]))) == leaf_key(Options(1, Options([2])))
    assert (
        len(
            {
                leaf_key(Options(1, Options(inner)))
                for inner in (2, 3, [2], "2", {"a": 2}, {"a": Options(2)}, {"a": Options(3)})
            }
        )
        == 7
    )
    around = Options(1)
    around.inner = around
    assert leaf_key(around) == leaf_key(around)
    assert leaf_key(lambda: 1) != leaf_key(lambda: 1) and hash(leaf_key(len)) == hash(leaf_key(len))
