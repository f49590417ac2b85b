"""Nothing received or stored is ever executed: no code of ours can reach a pickle, `torch.load`, eval or a shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from storage import CorruptError
from storage.tensors import decode_tensors

ROOT = Path(__file__).parents[3]
PACKAGES = ("wire", "storage", "networks", "pnode", "orchestrator", "cli")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib", "runpy", "jsonpickle"}
CALLS = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {
    ("torch", "load"), ("torch", "save"), ("torch", "jit"), ("np", "load"), ("numpy", "load"), ("yaml", "load"),
    ("yaml", "unsafe_load"), ("yaml", "full_load"), ("os", "system"), ("os", "popen"),
}  # fmt: skip


def violations(source: str) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names if alias.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found.append(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=left), attr=right), keywords=keywords) if (
                left,
                right,
            ) in ATTRIBUTES:
                safe = [word for word in keywords if word.arg == "allow_pickle" or word.arg == "Loader"]
                if not (left in ("np", "numpy", "yaml") and right == "load" and safe):
                    found.append(f"{left}.{right}")
            case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                found.append("shell=True")
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append("allow_pickle=True")
    return found


def test_no_code_of_ours_can_execute_data() -> None:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 20
    found = {str(path.relative_to(ROOT)): bad for path in files if (bad := violations(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "eval('1')", "exec('1')",
        "np.load('x')", "np.load('x', allow_pickle=True)", "subprocess.run('x', shell=True)", "os.system('x')",
        "yaml.load(x)", "def f():\n    import dill",
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
