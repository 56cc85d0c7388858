"""llama-server's flags mean what they mean there, and what is not there is refused by name."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llamatrio.cli import environment
from llamatrio.cli.accepted import ACCEPTED
from llamatrio.cli.flags import engine_config, server_config
from llamatrio.cli.log import start_log
from llamatrio.cli.main import _parser
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
    for flags in ("--samplers top_k;temperature", "--sampler-seq kt"):
        assert server(f"--top-k 7 --top-p 0.8 {flags}").sampling == SamplingParams(top_k=7, top_p=1.0, min_p=0.0)


def test_defaults_of_requests(tmp_path: Path) -> None:
    config = serve_config(
        "-n", "64", "-r", "User:", "-r", "###", "--no-cache-prompt", "-l", "5-1.5", "--logit-bias", "7+2",
        "--chat-template-kwargs", '{"a": 1}', "--temperature", "0", "-rea", "off",
    )  # fmt: skip
    assert (config.max_tokens, config.stop, config.cache_prompt) == (64, ("User:", "###"), False)
    assert config.sampling.logit_bias == ((5, -1.5), (7, 2.0))
    assert config.sampling.temperature == 0
    assert config.template_variables == {"enable_thinking": False, "a": 1}


def serve_config(*words: str) -> ServerConfig:
    return server_config(_parser().parse_args(["serve", *words]))


@pytest.mark.parametrize("line", ["-l 5", "-l five+1", "-l 5+x", "--chat-template-kwargs [1]", "-ngl most"])
def test_malformed_values_are_refused_by_name(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert line.split()[0] in refused(line, capsys)


@pytest.mark.parametrize(
    ("flags", "device"),
    [("-dev none", "cpu"), ("-dev CUDA0", "cuda"), ("--device cuda", "cuda"), ("-dev auto", "auto")],
)
def test_devices_by_either_name(flags: str, device: str) -> None:
    assert engine(flags).device == device


@pytest.mark.parametrize("layers", ["all", "auto"])
def test_layers_by_word(layers: str) -> None:
    assert engine(f"-ngl {layers}").n_gpu_layers > 1000


def test_the_chat_template(tmp_path: Path) -> None:
    file = tmp_path / "template"
    file.write_text("{{ messages }}")
    assert engine(f"--chat-template-file {file}").chat_template == "{{ messages }}"
    assert engine("--chat-template chatml").chat_template == "chatml"
    with pytest.raises(OSError, match="nowhere"):
        engine("--chat-template-file /nowhere/template")


def test_lines_that_begin_with_a_hash_are_no_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nsecret\n  #other\n\n")
    assert server(f"--api-key-file {keys}").api_keys == ("secret",)


@pytest.mark.parametrize("flag", [flag for accepted in ACCEPTED for flag in accepted.flags.split()])
def test_every_accepted_flag_takes_its_values_and_changes_nothing(flag: str) -> None:
    values = next(accepted.values for accepted in ACCEPTED if flag in accepted.flags.split())
    takes = {"": [()], "X": [("1",)], "[X]": [(), ("on",)]}.get(str(values)) or [(value,) for value in values]
    for given in takes:
        args = _parser().parse_args(["serve", flag, *given, "-c", "64"])
        assert engine_config(args) == engine("-c 64")
        assert server_config(args) == server()


def test_values_that_would_ask_for_something_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("--spec-type ngram-mod", "--reasoning-format deepseek", "--main-gpu 1", "--sleep-idle-seconds 5"):
        assert line.split()[0] in refused(line, capsys)


# ---------------------------------------------------------------- environment


def from_environment(line: str = "", **variables: str) -> Any:
    return _parser(variables).parse_args(["serve", *line.split()])


def test_variables_stand_for_flags_and_the_command_line_goes_before_them() -> None:
    variables = {
        "LLAMA_ARG_CTX_SIZE": "4096", "LLAMA_ARG_N_PARALLEL": "2", "LLAMA_ARG_PORT": "9", "LLAMA_ARG_KV_UNIFIED": "on",
        "LLAMA_ARG_CACHE_TYPE_K": "q8_0", "LLAMA_ARG_ENDPOINT_METRICS": "1", "LLAMA_ARG_NO_ENDPOINT_SLOTS": "",
        "LLAMA_API_KEY": "one,two", "LLAMA_ARG_TEMPERATURE": "0.5", "LLAMA_ARG_MODEL": "FILE", "PATH": "/bin",
    }  # fmt: skip
    args = from_environment("--port 10", **variables)
    config, http = engine_config(args), server_config(args)
    assert (config.n_ctx, config.n_parallel, config.kv_unified, config.type_k) == (4096, 2, True, "q8_0")
    assert (http.port, http.metrics, http.slots, http.api_keys) == (10, True, False, ("one", "two"))
    assert (http.sampling.temperature, args.model) == (0.5, "FILE")


def test_every_variable_names_a_flag_that_is_there() -> None:
    args = vars(from_environment())
    assert set(environment._VALUES.values()) <= args.keys()
    assert all(args[name] in (True, False, None) for name in environment._SWITCHES.values())


def test_a_variable_with_a_wrong_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"expected LLAMA_ARG_KV_UNIFIED to be one of .*, not 'maybe'"):
        from_environment(LLAMA_ARG_KV_UNIFIED="maybe")
    with pytest.raises(ValueError, match="expected type_k"):
        engine_config(from_environment(LLAMA_ARG_CACHE_TYPE_K="q2_k"))
    with pytest.raises(SystemExit):
        from_environment(LLAMA_ARG_CTX_SIZE="many")
    assert "--ctx-size" in capsys.readouterr().err


def test_variables_of_what_is_not_there_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    from_environment(LLAMA_ARG_LORA="file", LLAMA_ARG_FLASH_ATTN="on", LLAMA_ARG_NO_PERF="1", LLAMA_ARG_NO_HOST="1")
    assert [record.args for record in caplog.records] == [("LLAMA_ARG_LORA",)]


# ---------------------------------------------------------------- log


@contextmanager
def fresh_logging() -> Iterator[None]:
    """Logging as in a new process, for a while."""
    root, ours = logging.getLogger(), logging.getLogger("llamatrio")
    kept = root.handlers[:], root.level, ours.level
    root.handlers[:] = []
    try:
        yield
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = kept[0]
        root.setLevel(kept[1])
        ours.setLevel(kept[2])
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [("", "EWI"), ("-v", "EWID"), ("-lv 1", "E"), ("-lv 2", "EW"), ("--verbosity 9", "EWID"), ("--log-disable", "")],
)
def test_the_log_shows_what_was_asked_for(flags: str, shown: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    with fresh_logging():
        start_log(parsed(f"--log-file {file} {flags}"))
        log = logging.getLogger("llamatrio.x")
        for level in (logging.ERROR, logging.WARNING, logging.INFO, logging.DEBUG):
            log.log(level, "said")
    assert file.read_text() == "".join(f"{letter} said\n" for letter in shown)


def test_lines_begin_with_their_time(tmp_path: Path) -> None:
    with fresh_logging():
        start_log(parsed(f"--log-file {tmp_path / 'log'} --log-timestamps"))
        logging.getLogger("llamatrio").warning("said")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ W said\n", (tmp_path / "log").read_text())
