"""Nothing received or stored is ever executed: no code of ours can reach a pickle, `torch.load`, eval or a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from storage import CorruptError
from storage.tensors import decode_tensors

ROOT = Path(__file__).parents[3]
PACKAGES = ("wire", "storage", "networks", "pnode", "orchestrator", "cli")
MODULES = {
    "pickle", "cPickle", "_pickle", "pickletools", "dill", "cloudpickle", "shelve", "marshal", "joblib", "runpy",
    "jsonpickle", "code", "codeop", "imp", "copyreg", "xmlrpc", "multiprocessing.connection",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
LOADERS = {
    "load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all", "Loader", "UnsafeLoader",
    "FullLoader", "CLoader", "CUnsafeLoader", "CFullLoader", "add_constructor", "add_multi_constructor",
}  # fmt: skip
"""Of PyYAML: only events of a safe loader are read."""

ATTRIBUTES = {
    "torch": {"load", "save", "jit", "compile", "package", "hub", "serialization"},
    "np": {"load", "fromregex", "lookfor"},
    "numpy": {"load"},
    "yaml": LOADERS,
    "os": {"system", "popen", "execv", "execve", "execvp", "execvpe", "execl", "execlp", "spawnl", "spawnv", "spawnvp"},
    "builtins": CALLS,
    "subprocess": {"getoutput", "getstatusoutput"},
    "asyncio": {"create_subprocess_shell"},
    "importlib": {"import_module", "reload", "util", "machinery"},
    "sys": {"modules"},
}
STARTS = {("cli/processes.py", "Popen"), ("pnode/main.py", "os.execv")}
"""Where programs are started: our own modules, by a list of arguments."""


def violations(source: str, name: str = "") -> list[str]:
    found: list[str] = []
    known: dict[str, str] = {}
    """Other names of modules: `import os as o`."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                known |= {alias.asname: alias.name for alias in names if alias.asname}
            case ast.ImportFrom(module=str(module), names=names) if module in ATTRIBUTES:
                bad = [alias.name for alias in names if alias.name in ATTRIBUTES[module]]
                found += [f"{module}.{attribute}" for attribute in bad]
            case _:
                pass
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name in MODULES or _top(alias.name) in MODULES]
            case ast.ImportFrom(module=str(module)) if module in MODULES or _top(module) in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=call)) if call in CALLS:
                found.append(call)
            case ast.Name(id=call, ctx=ast.Load()) if call in ("eval", "exec", "__import__"):
                found.append(call)  # also when it is only handed on
            case ast.Attribute(value=ast.Name(id=left), attr=right) if (
                right in ATTRIBUTES.get(known.get(left, left), ())
                and (name, f"{known.get(left, left)}.{right}") not in STARTS
            ):
                found.append(f"{known.get(left, left)}.{right}")
            case ast.Call(
                func=ast.Name(id="getattr"), args=[ast.Name(id=left), ast.Constant(value=str(right)), *_]
            ) if right in ATTRIBUTES.get(known.get(left, left), ()):
                found.append(f"{known.get(left, left)}.{right}")
            case ast.keyword(arg="shell", value=value) if not _is(value, False):
                found.append("shell=True")
            case ast.keyword(arg="allow_pickle", value=value) if not _is(value, False):
                found.append("allow_pickle=True")
            case ast.keyword(arg="weights_only", value=value) if not _is(value, True):
                found.append("weights_only=False")
            case ast.Attribute(attr="Popen") if (name, "Popen") not in STARTS:
                found.append("Popen")
    return list(dict.fromkeys(found))


def _top(module: str) -> str:
    return module.partition(".")[0]


def _is(value: ast.expr, what: bool) -> bool:
    return isinstance(value, ast.Constant) and value.value is what


def test_no_code_of_ours_can_execute_data() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 20
    found = {
        str(path.relative_to(ROOT)): bad
        for path in files
        if (bad := violations(path.read_text(), str(path.relative_to(ROOT))))
    }
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "eval('1')", "exec('1')",
        "np.load('x')", "np.load('x', allow_pickle=True)", "subprocess.run('x', shell=True)", "os.system('x')",
        "yaml.load(x)", "def f():\n    import dill", "import os as o\no.system('x')", "from os import popen",
        "from yaml import Loader", "yaml.load(x, Loader=yaml.CLoader)", "getattr(yaml, 'CLoader', None)(x)",
        "map(eval, x)",
        "subprocess.run('x', shell=flag)", "np.load(x, allow_pickle=flag)", "import torch as t\nt.load(x)",
        "import importlib\nimportlib.import_module(name)", "subprocess.Popen('x')", "f(x, weights_only=False)",
        "import builtins\nbuiltins.eval('1')", "asyncio.create_subprocess_shell('x')", "yaml.add_constructor('!x', f)",
    ],
)  # fmt: skip
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    assert violations(source)


def test_a_stored_pickle_is_never_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    evil = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    for data in (evil, b"\x80\x04" + evil, b"PK\x03\x04" + evil):
        with pytest.raises(CorruptError, match="not safetensors"):
            decode_tensors(data, key="weights.safetensors")
    assert not marker.exists()
