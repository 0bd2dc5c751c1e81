"""A module of Python that test_reads.py reads, and functions of which it calls."""

SCALE, TABLE, CALLS, PRODUCT, LAST = 1.0, {"scale": 1.0}, [0, 0], 1.0, None


def scaled(y):
    return y * SCALE


class Options:
    scale = 1.0

    @staticmethod
    def scaled(y):
        return y * Options.scale


class Named:
    options = Options()
