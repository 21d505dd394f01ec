"""Settings: every default in one place, and the files of a data directory.

Layer: rank 0. Reads a TOML file, the environment and flags; knows nothing of what the settings are for.

    tables.py    the settings, one attrs class per TOML table
    load.py      file < environment < flag, and one clear line for every mistake
    address.py   HOST:PORT, IPv6 included
    data_dir.py  which file lies where in a data directory
    program.py   how the user calls us
    secrets.py   files of mode 0600, written whole or not at all
"""

from __future__ import annotations

from gradient.settings.address import Address
from gradient.settings.data_dir import DataDir, default_data_dir
from gradient.settings.errors import InsecureSecret, SettingsError
from gradient.settings.load import load, settings_file
from gradient.settings.program import program
from gradient.settings.secrets import read_secret, write_atomically, write_secret
from gradient.settings.tables import Settings

__all__ = [
    "Address",
    "DataDir",
    "InsecureSecret",
    "Settings",
    "SettingsError",
    "default_data_dir",
    "load",
    "program",
    "read_secret",
    "settings_file",
    "write_atomically",
    "write_secret",
]
