"""Imports go one way: errors, config <- model <- kv <- sched <- backends <- engine <- server <- cli.

The rule, exactly. A module imports llamatrio modules of its own layer or of layers to its left. `version`, `errors`
and `progress` stand with `config` at the left end; `info`, `evaluate`, `__main__` and the package's
`__init__` with `cli` at the right end. And `backends` see only values of kv and sched: `kv.cells` and `sched.types`,
not the code that decides. All imports count, those inside functions and for type checkers as well.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = ("config", "model", "kv", "sched", "backends", "engine", "server", "cli")
LAYER_OF = {"errors": "config", "version": "config", "progress": "config"} | dict.fromkeys(
    ("info", "evaluate", "__main__", "__init__"), "cli"
)
BACKENDS_SEE = {"llamatrio.kv.cells", "llamatrio.sched.types"}
ONLY_IN = {
    "trio": ("engine", "server", "cli"),
    "quart": ("server",),
    "quart_trio": ("server",),
    "hypercorn": ("server",),
    "cuda": ("backends.cuda",),
    "numba": ("backends.cpu",),
    "llvmlite": ("backends.cpu",),
}
"""Packages that only these parts import."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted((ROOT / "llamatrio").rglob("*.py"))}


def layer_of(module: str) -> int:
    """Index into LAYERS; a name without a place fails the test that asks."""
    part = [*module.split("."), "__init__"][1]
    layer = LAYER_OF.get(part, part)
    assert layer in LAYERS, f"{module} has no place among the layers"
    return LAYERS.index(layer)


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, by full name; `from package import module` gives the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*whole.split("."))).with_suffix(".py").exists()
                is_package = (ROOT / Path(*whole.split("."))).is_dir()
                yield whole if is_module or is_package else node.module


@pytest.mark.parametrize("module", modules())
def test_imports_go_to_the_left(module: str) -> None:
    layer = layer_of(module)
    for name in imports(modules()[module]):
        if name.split(".")[0] != "llamatrio":
            continue
        if LAYERS[layer] == "backends" and LAYERS[layer_of(name)] in ("kv", "sched"):
            assert name in BACKENDS_SEE, f"{module} imports {name}"
        assert layer_of(name) <= layer, f"{module} imports {name}"


@pytest.mark.parametrize("module", modules())
def test_packages_stay_where_they_belong(module: str) -> None:
    part = module.removeprefix("llamatrio.")
    for name in imports(modules()[module]):
        allowed = ONLY_IN.get(name.split(".")[0])
        if allowed is not None and LAYERS[layer_of(module)] not in allowed:
            assert any(part.startswith(f"{place}.") for place in allowed), f"{module} imports {name}"


@pytest.mark.parametrize(("device", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_backends_share_nothing_but_what_stands_beside_them(device: str, other: str) -> None:
    for module, path in modules().items():
        if module.startswith(f"llamatrio.backends.{device}."):
            assert not [name for name in imports(path) if name.startswith(f"llamatrio.backends.{other}")], module


def test_only_config_reads_the_environment() -> None:
    readers = {
        module
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"llamatrio.config"}


def test_the_rules_catch_what_breaks_them(tmp_path: Path) -> None:
    """A walk that finds no import would pass everything."""
    source = tmp_path / "a.py"
    source.write_text(
        "import numba.core\nfrom llamatrio.model import spec\n"
        "def f():\n    from llamatrio.engine.engine import Engine, open_engine\n"
        "if TYPE_CHECKING:\n    import trio\n"
    )
    assert set(imports(source)) == {"numba.core", "llamatrio.model.spec", "llamatrio.engine.engine", "trio"}
    assert layer_of("llamatrio") == layer_of("llamatrio.cli.flags") == layer_of("llamatrio.info")
    assert layer_of("llamatrio.errors") < layer_of("llamatrio.model.spec") < layer_of("llamatrio.server.app")
    with pytest.raises(AssertionError, match="nowhere has no place"):
        layer_of("llamatrio.nowhere")


HEAVY = ("numba", "llvmlite", "quart", "quart_trio", "hypercorn", "cuda", "tokenizers", "jinja2", "trio", "numpy")


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after `code`."""
    report = f"import sys; print(*set({HEAVY!r}).intersection(sys.modules))"
    command = [sys.executable, "-c", f"{code}\n{report}"]
    return set(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_is_light() -> None:
    assert loaded_by("import llamatrio") == set()


def test_the_command_line_loads_no_device_before_it_needs_one() -> None:
    loaded = loaded_by("import llamatrio.cli.main")
    assert not loaded & {"numba", "llvmlite", "cuda", "quart", "quart_trio", "hypercorn"}


def test_the_cpu_backend_needs_no_server_and_no_cuda() -> None:
    loaded = loaded_by("import llamatrio.backends.cpu.backend")
    assert not loaded & {"quart", "quart_trio", "hypercorn", "trio", "cuda"}
    assert "llvmlite" in loaded
