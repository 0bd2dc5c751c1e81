"""The processes of tests/distributed end with the session."""

import ranks


def pytest_sessionfinish() -> None:
    ranks.close_all()
