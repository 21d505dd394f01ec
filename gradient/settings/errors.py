"""What is wrong with the settings, in words that say where and what to do."""

from __future__ import annotations


class SettingsError(Exception):
    """A setting that cannot be used; the text is one line that names file, table and key."""


class InsecureSecret(SettingsError):
    """A secret that others on this machine may read."""
