"""Settings: defaults, precedence, and one clear line for every mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradient.settings import Address, Settings, SettingsError, load, settings_file
from gradient.settings.tables import GIB, ScoringPolicy, evaluators

HOME = {"HOME": "/home/ada"}


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "gradient.toml"
    file.write_text(text)
    return file


def test_the_defaults_of_the_seeds() -> None:
    settings = load(environ=HOME)
    assert settings == load(environ=HOME)
    assert settings.server.data_dir == Path("/home/ada/.local/state/gradient")
    assert (str(settings.server.http), str(settings.server.proto)) == ("127.0.0.1:3000", "127.0.0.1:3001")
    build = settings.build
    assert (build.default_timeout_secs, build.default_max_silent_secs) == (14400, 3600)
    assert (build.max_attempts, build.inputs_unavailable_max_loops) == (3, 3)
    assert (build.retry_backoff_secs, build.substitute_miss_escalation_threshold) == (30, 2)
    assert settings.scheduler.scoring_policy is ScoringPolicy.RESOURCE_AWARE
    assert settings.scheduler.cluster_prepare_timeout_secs == 30
    assert (settings.proto.worker_heartbeat_timeout_secs, settings.proto.max_connections) == (120, 256)
    assert settings.metrics.graph_consistency_interval_secs == 300
    gc = settings.gc
    assert (gc.interval_secs, gc.nar_ttl_hours, gc.nar_upload_grace_hours) == (3600, 336, 24)
    assert (gc.orphan_derivation_hours, gc.wedged_eval_hours, settings.eval.max_keep) == (24, 24, 30)
    assert settings.worker.log.burst_bytes_per_min == 8 * 2**20
    assert settings.worker.gcroots_dir == "/nix/var/nix/gcroots/gradient"


def test_flag_over_environment_over_file(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        [build]
        maxAttempts = 5
        retryBackoffSecs = 7
        defaultTimeoutSecs = 9
        [worker.eval]
        maxRss = 100_000_000
        """,
    )
    environ = {**HOME, "GRADIENT_BUILD__MAX_ATTEMPTS": "6", "GRADIENT_BUILD__RETRY_BACKOFF_SECS": "8"}
    settings = load(file, environ=environ, flags={"build.maxAttempts": "10", "server.http": None})
    build = settings.build
    assert (build.max_attempts, build.retry_backoff_secs, build.default_timeout_secs) == (10, 8, 9)
    assert settings.worker.eval.max_rss == 100_000_000
    assert settings.server.http.port == 3000, "a flag that was not given changes nothing"


def test_values_of_every_kind_can_be_text() -> None:
    environ = {
        **HOME,
        "GRADIENT_SERVER__HTTP": "[::1]:0",
        "GRADIENT_SERVER__DATA_DIR": "/var/lib/gradient",
        "GRADIENT_DATABASE__URL": "postgresql:///gradient",
        "GRADIENT_SCHEDULER__SCORING_POLICY": "simple",
        "GRADIENT_WORKER__BUILD__MAX_CONCURRENT": "0",
    }
    settings = load(environ=environ)
    assert settings.server.http == Address("::1", 0)
    assert settings.server.data_dir == Path("/var/lib/gradient")
    assert settings.database.url == "postgresql:///gradient"
    assert settings.scheduler.scoring_policy is ScoringPolicy.SIMPLE
    assert settings.worker.build.max_concurrent == 0


def test_variables_that_are_no_settings_are_left_alone() -> None:
    environ = {**HOME, "GRADIENT_CONFIG": "/etc/x", "GRADIENT_TEST_NIX": "/bin/nix", "OTHER__BUILD": "1"}
    assert load(environ=environ) == load(environ=HOME)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[build]\nmaxAttemps = 3", "[build] maxAttemps: no such setting"),
        ("[build]\nmax_attempts = 3", "[build] max_attempts: no such setting"),
        ("[worker.build]\nretries = 3", "[worker.build] retries: no such setting"),
        ("[biuld]\n", "biuld: no such setting"),
        ("build = 3", "build: no such setting"),
        ('[build]\nmaxAttempts = "3x"', "[build] maxAttempts: expected a whole number, got '3x'"),
        ("[build]\nmaxAttempts = true", "[build] maxAttempts: expected a whole number, got True"),
        ("[build]\nmaxAttempts = 2.5", "[build] maxAttempts: expected a whole number, got 2.5"),
        ("[build]\nmaxAttempts = {}", "[build] maxAttempts: expected a whole number, got {}"),
        ("[build]\nmaxAttempts = 0", "[build] maxAttempts: expected at least 1, got 0"),
        ("[server]\nhttp = 3000", "[server] http: expected text, got 3000"),
        ("[server]\nhttp = '::1:3000'", "[server] http: an IPv6 address needs brackets: [::1]:PORT"),
        ("[server]\ndataDir = ''", "[server] dataDir: expected a path, got ''"),
        ("[scheduler]\nscoringPolicy = 'best'", "expected one of simple, resource-aware, got 'best'"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path: Path, text: str, line: str) -> None:
    file = written(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load(file, environ=HOME)
    assert str(caught.value).startswith(f"{file}: ")
    assert str(caught.value).endswith(line)
    assert "\n" not in str(caught.value)


def test_mistakes_elsewhere_name_their_source(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"^environment variable GRADIENT_BUILD__FOO: no such setting$"):
        load(environ={**HOME, "GRADIENT_BUILD__FOO": "1"})
    with pytest.raises(SettingsError, match=r"^flag server.http: expected HOST:PORT, got 'x'$"):
        load(environ=HOME, flags={"server.http": "x"})
    with pytest.raises(SettingsError, match=r"gradient\.toml: not valid TOML: "):
        load(written(tmp_path, "[build"), environ=HOME)
    with pytest.raises(SettingsError, match=r"absent\.toml: No such file"):
        load(tmp_path / "absent.toml", environ=HOME)


def test_which_file_is_read(tmp_path: Path) -> None:
    assert settings_file({"HOME": str(tmp_path)}) is None
    assert settings_file({"GRADIENT_CONFIG": "/etc/gradient.toml"}) == Path("/etc/gradient.toml")
    usual = tmp_path / ".config" / "gradient" / "gradient.toml"
    usual.parent.mkdir(parents=True)
    usual.touch()
    assert settings_file({"HOME": str(tmp_path)}) == usual
    assert settings_file({"XDG_CONFIG_HOME": str(tmp_path / ".config")}) == usual


def test_a_password_is_not_shown() -> None:
    assert "hunter2" not in repr(
        load(environ={**HOME, "GRADIENT_DATABASE__URL": "postgresql://a:hunter2@db/x"})
    )


@pytest.mark.parametrize(
    ("cores", "ram", "expected"), [(4, 64 * GIB, 4), (64, 640 * GIB, 16), (8, 8 * GIB, 3), (2, 1 * GIB, 1)]
)
def test_evaluators_fit_into_memory(cores: int, ram: int, expected: int) -> None:
    assert evaluators(cores, ram, 2 * GIB) == expected


def test_settings_can_be_made_without_loading() -> None:
    assert Settings().build.max_attempts == 3


@pytest.mark.parametrize(
    ("text", "host", "port", "url"),
    [
        ("127.0.0.1:3000", "127.0.0.1", 3000, "http://127.0.0.1:3000"),
        ("localhost:0", "localhost", 0, "http://localhost:0"),
        ("[::1]:65535", "::1", 65535, "http://[::1]:65535"),
        ("[::]:80", "::", 80, "http://[::1]:80"),
        ("0.0.0.0:80", "0.0.0.0", 80, "http://127.0.0.1:80"),
    ],
)
def test_addresses(text: str, host: str, port: int, url: str) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address), address.url()) == (host, port, text, url)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3000",
        ":3000",
        "host:",
        "host:-1",
        "host:65536",
        "host:٣",
        "::1:3000",
        "[::g]:1",
        "a b:1",
        "a/b:1",
    ],
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(text)
