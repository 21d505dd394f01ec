"""What can be wrong with the database, and whose fault an error is. Layer: graph. Pure.

Three questions decide what happens to an error: is the database away (a task is restarted), may the whole
transaction succeed when it runs again, or are the values of one message at fault.
"""

from __future__ import annotations

from typing import Final

import psycopg

from gradient.nix.errors import NixError


class PostgresError(Exception):
    """PostgreSQL cannot be used as it is: the base of what this package says of the database itself."""


class DatabaseGone(PostgresError, psycopg.OperationalError):
    """The database went away."""


class DatabaseDown(DatabaseGone):
    """The database cannot be reached."""


class DatabaseInUse(PostgresError):
    """Another Gradient server uses this database."""


class GraphError(Exception):
    """The content of a message cannot be applied: it fails that message alone, in words for its sender."""


class BadDatabaseUrl(PostgresError):
    """The DSN is none; the message says where."""


# What `supervise` restarts a task on: the server stopped, refused, or cut the connection. Wrong SQL,
# broken constraints and wrong values are not among them.
DATABASE_ERRORS: Final[tuple[type[Exception], ...]] = (psycopg.OperationalError,)

# A deadlock, a serialisation failure, and a transaction that an unnoticed error had failed already.
_RETRYABLE: Final = frozenset({"40P01", "40001", "25P02"})


_CONTENT_ERRORS: Final = (
    GraphError,
    NixError,
    UnicodeEncodeError,  # psycopg's, for half of a surrogate pair
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.StatementTooComplex,
)


# Why a start may fail at the database: it goes away in the middle, or does not let its user do what we need.
START_ERRORS: Final[tuple[type[Exception], ...]] = (
    *DATABASE_ERRORS,
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.ReadOnlySqlTransaction,
)


def start_failed(error: Exception) -> PostgresError:
    """One of START_ERRORS in our words."""
    if isinstance(error, PostgresError):
        return error
    if isinstance(error, DATABASE_ERRORS):
        return DatabaseGone(f"the database went away during the start: {one_line(error)}")
    return PostgresError(f"the database does not let its user do what Gradient needs: {one_line(error)}")


def is_retryable(error: Exception) -> bool:
    """Whether the whole transaction may succeed when it is run again."""
    return isinstance(error, psycopg.Error) and error.sqlstate in _RETRYABLE


def is_content_error(error: Exception) -> bool:
    """Whether the values are at fault: refused by us, no Nix thing, out of range, against a constraint, or
    larger than PostgreSQL holds. The connection is as well as before."""
    return isinstance(error, _CONTENT_ERRORS)


def one_line(error: Exception) -> str:
    """Its message on one line."""
    return " ".join(str(error).split())
