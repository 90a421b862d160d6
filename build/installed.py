"""Which versions of other distributions are installed, without importing them."""

from __future__ import annotations

from importlib import metadata


def installed_version(name: str) -> str:
    """The version of the distribution `name`; empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
