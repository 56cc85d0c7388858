"""llama-server's flags mean what they mean there, and what is not there is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamatrio.cli import _parser
from llamatrio.cli_flags import engine_config, server_config
from llamatrio.config import EngineConfig
from llamatrio.sched.types import SamplingParams
from llamatrio.server.settings import ServerConfig

LINE = "-m FILE -ngl 99 -fa on -ctk q8_0 -ctv q8_0 -np 8 -kvu -c 20480 --cache-idle-slots -v"


def parsed(line: str) -> Any:
    return _parser().parse_args(["serve", *line.split()])


def engine(line: str = "") -> EngineConfig:
    return engine_config(parsed(line))


def server(line: str = "") -> ServerConfig:
    return server_config(parsed(line))


def refused(line: str, capsys: pytest.CaptureFixture[str], command: str = "serve") -> str:
    with pytest.raises(SystemExit) as caught:
        _parser().parse_args([command, *line.split()])
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_issues_command_line_means_what_it_says() -> None:
    args = parsed(LINE)
    assert (args.model, args.verbose) == ("FILE", True)
    config = engine_config(args)
    assert config == EngineConfig(
        n_ctx=20480,
        n_parallel=8,
        kv_unified=True,
        type_k="q8_0",
        type_v="q8_0",
        n_gpu_layers=99,
        cache_idle_slots=True,
    )
    assert server_config(args) == ServerConfig()


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ("-c 20480", "n_ctx", 20480),
        ("--ctx-size 100", "n_ctx", 100),
        ("-np 8", "n_parallel", 8),
        ("--parallel 2", "n_parallel", 2),
        ("-ctk q8_0", "type_k", "q8_0"),
        ("--cache-type-v q8_0", "type_v", "q8_0"),
        ("-ngl 0", "n_gpu_layers", 0),
        ("--n-gpu-layers 5", "n_gpu_layers", 5),
        ("-b 64", "n_batch", 64),
        ("-ub 32", "n_ubatch", 32),
        ("-t 3", "n_threads", 3),
        ("-t -1", "n_threads", 0),
        ("-cram 0", "cache_ram_mib", 0),
        ("--cache-ram -1", "cache_ram_mib", -1),
        ("--no-cache-idle-slots", "cache_idle_slots", False),
        ("--cache-scope all", "cache_scope", "all"),
        ("--seed 5", "seed", 5),
        ("-s -1", "seed", None),
        ("--device cpu", "device", "cpu"),
    ],
)
def test_one_flag_changes_one_field(flags: str, field: str, value: Any) -> None:
    config, default = engine(flags), engine()
    assert getattr(config, field) == value
    changed = {name for name in EngineConfig.__dataclass_fields__ if getattr(config, name) != getattr(default, name)}
    also = {"kv_unified"} if field == "n_parallel" else set()
    assert changed <= {field} | also


@pytest.mark.parametrize(
    ("flags", "n_parallel", "is_unified"),
    [
        ("", 4, True),
        ("-np 8", 8, False),
        ("-np 8 -kvu", 8, True),
        ("-np 1", 1, False),
        ("-np -1", 4, True),
        ("-np 8 --no-kv-unified", 8, False),
        ("--no-kv-unified", 4, False),
        ("--kv-unified", 4, True),
    ],
)
def test_slots_share_the_context_unless_their_number_is_given(flags: str, n_parallel: int, is_unified: bool) -> None:
    config = engine(flags)
    assert (config.n_parallel, config.kv_unified) == (n_parallel, is_unified)


def test_defaults_are_llama_servers() -> None:
    assert engine() == EngineConfig()
    assert engine().cache_ram_mib == 8192
    assert server() == ServerConfig()
    assert (server().host, server().port, server().timeout) == ("127.0.0.1", 8080, 3600)


@pytest.mark.parametrize(
    "flags",
    ["-fa", "-fa on", "-fa auto", "-cb", "-nocb", "--jinja", "--mlock", "--no-mmap", "--no-webui", "-tb 4"],
)
def test_what_needs_no_flag_here_is_accepted_and_changes_nothing(flags: str) -> None:
    assert engine(flags) == engine()
    assert server(flags) == server()


@pytest.mark.parametrize(
    "flags",
    [
        "--no-such-flag",
        "--draft-max 4",
        "--lora file",
        "--mmproj file",
        "-ctk q4_0",
        "-c many",
        "--device tpu",
        "stray",
        "--cache-ra 5",  # no abbreviations: they would take the flags of other features
    ],
)
def test_what_is_not_there_is_refused_by_name(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert flags.split()[0] in refused(flags, capsys)


@pytest.mark.parametrize("line", ["-np 0 -c -5", "-cram -2", "-b 0"])
def test_values_out_of_range_are_named(line: str) -> None:
    with pytest.raises(ValueError, match=r"expected (n_ctx|cache_ram_mib|n_batch) >="):
        engine(line)


def test_the_http_side(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("three\n\nfour\n")
    config = server(
        f"--host 0.0.0.0 --port 0 -a name --api-key one,two --api-key-file {keys} --api-prefix /llm --metrics "
        "--no-slots --ssl-cert-file c --ssl-key-file k --grace 5 -to 9 --cors-origins http://a,http://b"
    )
    assert (config.host, config.port, config.alias, config.api_prefix) == ("0.0.0.0", 0, "name", "/llm")
    assert config.api_keys == ("one", "two", "three", "four")
    assert (config.metrics, config.slots, config.tls) == (True, False, True)
    assert (config.grace, config.timeout) == (5, 9)
    assert config.cors.origins == ("http://a", "http://b")
    with pytest.raises(OSError, match="nowhere"):
        server("--api-key-file /nowhere/keys")
    with pytest.raises(ValueError, match="ssl_cert_file and ssl_key_file together"):
        server("--ssl-cert-file c")


def test_sampling_defaults() -> None:
    line = (
        "--temp 0.5 --top-k 7 --top-p 0.8 --min-p 0.1 --repeat-penalty 1.1 --repeat-last-n 9 "
        "--presence-penalty 0.2 --frequency-penalty 0.3 --ignore-eos"
    )
    assert server(line).sampling == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.8,
        min_p=0.1,
        repeat_penalty=1.1,
        repeat_last_n=9,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        ignore_eos=True,
    )
    assert server().sampling == SamplingParams()
