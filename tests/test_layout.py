"""Three packages, imports in one direction, and what importing them costs and says."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("pallas_kernels", "models", "jaxserve")  # each may import those before it
MODULES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
MAX_LINES = 400


def module_name(file):
    return str(file.relative_to(ROOT))


def imported(file):
    """Absolute names of everything a module imports, wherever in it."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            yield ".".join((*base, *filter(None, [node.module])))


def python(code, *path, cwd):
    """Run code in a fresh interpreter with these directories first on sys.path, ahead of what is installed."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def test_there_is_something_to_check():
    assert {file.relative_to(ROOT).parts[0] for file in MODULES} == set(PACKAGES)
    assert len(MODULES) > 20


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_imports_go_down_only(file):
    allowed = PACKAGES[: PACKAGES.index(file.relative_to(ROOT).parts[0]) + 1]
    ours = {name.split(".")[0] for name in imported(file)} & {*PACKAGES, "bench", "tests"}
    assert ours <= set(allowed)


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_no_torch(file):
    assert not [name for name in imported(file) if name.split(".")[0] in ("torch", "torchvision")]


@pytest.mark.parametrize("file", MODULES, ids=module_name)
def test_modules_are_rooms_not_halls(file):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


FOREIGN = {
    "package": "models/__init__.py",
    "module": "models.py",
    "folder": "models/weights.txt",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_models_package_is_reported_in_one_line(kind, tmp_path):
    foreign = tmp_path / "theirs" / FOREIGN[kind]
    foreign.parent.mkdir(parents=True)
    foreign.write_text("raise RuntimeError('somebody else was imported')\n")
    ours = tmp_path / "ours"  # where an installer's finder would say that jaxserve is, and nothing else
    ours.mkdir()
    (ours / "jaxserve").symlink_to(ROOT / "jaxserve")
    result = python("import jaxserve", tmp_path / "theirs", ours, cwd=tmp_path)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jaxserve needs its own package `models`")
    assert str(tmp_path / "theirs" / "models") in last  # where the other one is
    assert "RuntimeError" not in result.stderr


def test_a_folder_of_weights_shadows_nothing_when_our_directory_is_on_the_path(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "weights.gguf").touch()
    result = python("import jaxserve, models; print(models.__file__)", tmp_path, ROOT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).parent == ROOT / "models"


def test_the_command_line_is_imported_without_jax(tmp_path):
    """`jaxserve --help` answers at once."""
    code = "import sys, jaxserve.cli; print([m for m in ('jax', 'flax', 'transformers', 'torch') if m in sys.modules])"
    result = python(code, ROOT, cwd=tmp_path)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_public_names_exist(tmp_path):
    code = "import jaxserve; [getattr(jaxserve, name) for name in jaxserve.__all__]; print(len(jaxserve.__all__))"
    result = python(code, ROOT, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 5


def test_the_engine_is_imported_without_what_takes_seconds(tmp_path):
    """transformers, and torch which it imports where there is one, wait until a tokenizer is loaded."""
    code = """import sys, jaxserve.llm, jaxserve.async_engine
print([m for m in ('torch', 'transformers') if m in sys.modules])"""
    result = python(code, ROOT, cwd=tmp_path)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr
