"""For tools that ask for a setup.py; pyproject.toml has the project."""

from setuptools import setup

setup()
