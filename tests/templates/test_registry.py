"""Tests of the names of families."""

import resource

import pytest

from flashtune.templates.registry import families, family_names


def test_families_have_the_names_of_their_folders() -> None:
    assert family_names() == tuple(family.name for family in families())


def test_a_folder_that_cannot_be_listed_is_an_error() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Open files stay open, and no file can be opened.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            family_names.__wrapped__()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
