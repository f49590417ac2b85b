"""Commands that need no cluster: exit codes, messages, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.commands.verify import _kinds, _splits
from cli.tree import app
from wire.errors import UsageError

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DCNR_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DCNR_ORCHESTRATOR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(*arguments: str, code: int = 0) -> str:
    result = RUNNER.invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result.output


@pytest.mark.parametrize(
    "command",
    [["ps"], ["status"], ["attach", "x"], ["logs", "x"], ["infer", "x", "--text", "a"], ["generate", "x"], ["gc"]],
)
def test_without_a_cluster_one_line_says_what_to_do(command: list[str]) -> None:
    shown = call(*command, code=69)
    assert "no cluster is running here" in shown
    assert "dcnr up" in shown
    assert len(shown.splitlines()) == 2


def test_nobody_listens(own_home: Path) -> None:
    shown = call("ps", "--orchestrator", "127.0.0.1:1", code=69)
    assert "no orchestrator at tcp://127.0.0.1:1: Connection refused" in shown


@pytest.mark.parametrize(
    "arguments",
    [
        ["ps", "--orchestrator", "nonsense"],
        ["train", "mlp-digits", "--set", "steps"],
        ["train", "mlp-digits", "--local", "-d"],
        ["train", "mlp-digits", "--bad-option"],
        ["nothing"],
        ["net", "types", "lineal"],
        ["net", "new", "../evil"],
        ["verify", "mlp-digits", "--placements", "best"],
        ["verify", "mlp-digits", "--microbatches", "1,x"],
        ["demo", "--resume", "--fresh"],
        ["generate", "x", "--top-p", "0"],
        ["infer", "x"],
    ],
)
def test_wrong_arguments_are_exit_code_2(arguments: list[str]) -> None:
    call(*arguments, code=2)


def test_a_bad_file_is_exit_code_65(own_home: Path) -> None:
    bad = own_home / "bad.yaml"
    bad.write_text("version: 1\nname: bad\nnodes:\n  - {id: a, type: rellu}\n")
    shown = call("net", "validate", str(bad), code=65)
    assert "bad.yaml:4" in shown
    assert "relu" in shown
    assert "no network is called" in call("net", "show", "gpt-chat", code=65)


def test_net_commands(own_home: Path) -> None:
    names = {entry["network"] for entry in json.loads(call("net", "ls", "-o", "json"))}
    assert {"mlp-digits", "gpt-char"} <= names
    assert "wrote" in call("net", "new", "mine")
    assert "exists already" in call("net", "new", "mine", code=2)
    found = json.loads(call("net", "show", "mine.yaml", "-o", "json"))
    assert found["network"] == "mine"
    assert found["parameters"] == 26_122
    assert found["nodes"][0]["id"] == "flat"
    assert found["edges"][0]["size_bytes"] > 0
    assert found["edge_bytes"] == sum(edge["size_bytes"] for edge in found["edges"])
    shown = call("net", "show", "mine.yaml")
    assert "26,122 parameters (104.5 kB)" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert any(row[:3] == ["fc1", "linear", "flat"] for row in rows)
    assert "fine" in call("net", "validate", "mine.yaml")
    assert json.loads(call("net", "schema"))["$schema"].startswith("http://json-schema.org/draft-07")
    assert any(entry["type"] == "linear" for entry in json.loads(call("net", "types", "-o", "json")))
    assert "in" in call("net", "types", "linear")


def test_contexts() -> None:
    call("context", "use", "lab", "h:1")
    entries = json.loads(call("context", "ls", "-o", "json"))
    assert entries == [
        {"name": "local", "address": "", "current": False},
        {"name": "lab", "address": "tcp://h:1", "current": True},
    ]
    assert "no context 'x'" in call("context", "rm", "x", code=2)
    call("context", "rm", "lab")


def test_down_without_a_cluster_is_fine() -> None:
    assert "no cluster is running" in call("down")
    assert json.loads(call("down", "-o", "json")) == {"ended": [], "killed": []}


def test_doctor_without_a_cluster(own_home: Path) -> None:
    store = own_home / "store"
    found = {entry["what"]: entry for entry in json.loads(call("doctor", "-o", "json", "--store", str(store)))}
    assert found["Python"]["state"] == "ok"
    assert found["torch"]["state"] == "ok"
    assert found["store"]["state"] == "ok", found["store"]
    assert found["orchestrator"]["state"] == "skip"


def test_doctor_says_how_to_mend() -> None:
    shown = call("doctor", "--orchestrator", "127.0.0.1:1", code=1)
    assert "BAD" in shown
    assert "dcnr up" in shown


def test_training_in_one_process(own_home: Path) -> None:
    lines = call("train", "mlp-digits", "--local", "--steps", "3", "-o", "json", "--save", "out").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["start", "step", "step", "step", "end"]
    assert events[-1]["verdict"] == "finished"
    from safetensors.torch import load_file

    weights = load_file(own_home / "out" / "weights.safetensors")
    assert tuple(weights["fc1.weight"].shape) == (128, 64)
    assert sum(tensor.numel() for tensor in weights.values()) == 26_122
    assert "26,122 parameters" in (own_home / "out" / "README.md").read_text()
    assert "is not empty" in call("train", "mlp-digits", "--local", "--steps", "3", "--save", "out", code=2)


def test_verify_options() -> None:
    assert _kinds("planner, random:20") == ["planner", "random:20"]
    assert _splits("1,2,4") == [1, 2, 4]
    assert _splits("") == []
    with pytest.raises(UsageError):
        _kinds("random:0")


def test_text_for_a_network_that_is_made_for_a_data_set(own_home: Path) -> None:
    (own_home / "some.txt").write_text("some text")
    shown = call("train", "mlp-digits", "--local", "--data", "some.txt", code=2)
    assert "mlp-digits is made for the data set 'digits'" in shown
    assert "--from gpt-char" in shown


def test_the_text_to_go_on_from_is_given_once() -> None:
    assert "given twice" in call("generate", "x", "a", "--prompt", "b", code=2)
