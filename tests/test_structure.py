"""Holds the shape of the project: layers, sizes, the public surface, and a proof for every op."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import topkapi

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "topkapi"
MODULES = sorted(PACKAGE.rglob("*.py"))

# Lowest first; a module may import from its own layer and from those before it.
LAYERS = (
    {"errors", "shapes", "device", "dispatch", "context", "config"},
    {"layout"},
    {"reference"},
    {"kernels"},
    {"ops"},
    {"cache"},
    {"attention"},
    {"models"},
    {"engine"},
    {"demo", "bench", "doctor", "cli_options"},
    {"server", "plugins"},
    {"cli", "__init__"},
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
VAGUE = {"util", "utils", "helper", "helpers", "misc", "common", "manager", "core", "base"}

PUBLIC = {
    "LLM",
    "SamplingParams",
    "RequestOutput",
    "attach",
    "detach",
    "DsaConfig",
    "BackendOptions",
    "NativeSparseAttnBackend",
    "NativeSparseAttnMultiStepBackend",
    "NSAMetadata",
    "NSAIndexerMetadata",
    "ForwardBatch",
    "ForwardMode",
    "ops",
    "errors",
    "__version__",
}

OP_PARAMETERS = {
    "indexer_logits": ("q", "weights", "index_cache", "context"),
    "topk": ("logits", "lengths", "k", "starts"),
    "select": ("q", "weights", "index_cache", "context", "k"),
    "sparse_mla": ("q", "kv_cache", "slots", "scale", "v_dim", "sinks", "logit_cap"),
    "write_latent": ("kv_cache", "slots", "latent", "rope"),
    "write_index_key": ("index_cache", "slots", "keys"),
    "gather_latent": ("kv_cache", "slots", "v_dim"),
}


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_layers(path: Path) -> set[str]:
    """First components below `topkapi` of everything the file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            if node.module == "topkapi":
                names = [f"topkapi.{alias.name}" for alias in node.names]
            elif node.module:
                names = [node.module]
        found |= {name.split(".")[1] for name in names if name.startswith("topkapi.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_stays_small_explained_and_in_its_layer(path: Path) -> None:
    source = path.read_text()
    relative = path.relative_to(PACKAGE)
    assert layer_of(path) in RANK, f"{relative}: not in any layer"
    assert len(source.splitlines()) <= MAX_FILE_LINES, f"{relative}: too long"
    assert not VAGUE & set(relative.with_suffix("").parts), f"{relative}: a vague name"
    tree = ast.parse(source)
    if source.strip():
        assert ast.get_docstring(tree), f"{relative}: says nowhere what question it answers"
    if layer_of(path) != "__init__":
        for other in imported_layers(path):
            assert RANK.get(other, -1) <= RANK[layer_of(path)], f"{relative} imports up: {other}"
    if layer_of(path) == "kernels":
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative}: {node.name} is {length} lines"


def test_packages_import_each_other_without_a_cycle() -> None:
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        layer = layer_of(path)
        if layer != "__init__":
            edges.setdefault(layer, set()).update(imported_layers(path) - {layer})
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in edges.get(name, ()):
                visit(other, (*trail, name))
            done.add(name)

    for name in list(edges):
        visit(name, ())


def test_the_public_surface_is_frozen() -> None:
    assert set(topkapi.__all__) == PUBLIC
    for name in PUBLIC:
        assert getattr(topkapi, name) is not None


def test_the_ops_are_frozen() -> None:
    assert set(topkapi.ops.__all__) == set(OP_PARAMETERS)
    for name, wanted in OP_PARAMETERS.items():
        parameters = inspect.signature(getattr(topkapi.ops, name)).parameters
        assert tuple(item for item in parameters if item in wanted) == wanted, name


@pytest.mark.parametrize("name", sorted(OP_PARAMETERS))
def test_every_op_has_a_reference_a_test_and_a_benchmark_case(name: str) -> None:
    reference = importlib.import_module("topkapi.reference")
    assert callable(getattr(reference, name))
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "ops").glob("test_*.py"))
    assert f"ops.{name}(" in tests or f" {name}(" in tests
    cases = importlib.import_module("topkapi.bench.ops")
    assert any(case.op == name for case in cases.CASES), f"{name}: no benchmark case"


def test_importing_the_package_is_light() -> None:
    """`import topkapi` must not pull torch or Transformers in: `topkapi --help` stays quick."""
    heavy = "torch", "transformers"
    code = f"import sys, topkapi; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_only_models_and_above_know_transformers() -> None:
    for path in MODULES:
        if RANK[layer_of(path)] >= RANK["models"]:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = getattr(node, "module", None) or ""
                names = [module, *(alias.name for alias in node.names)]
                assert not any(name.split(".")[0] == "transformers" for name in names), path
