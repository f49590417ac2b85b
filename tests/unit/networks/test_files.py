"""Whole files: every kind of fault at its place, with a hint, and all of a file's faults in one run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from networks.diagnostics import Diagnostic, NetworkFileError
from networks.load import load, locate, read_recipe, shipped
from tests.unit.networks.files import MLP, Files, changed
from wire.errors import BadFileError


def test_the_small_file_loads(files: Files) -> None:
    network = files.load(MLP)
    assert network.id == "mlp"
    assert network.parameters == 8 * 16 + 16 + 16 * 4 + 4
    assert [str(edge) for edge in network.graph.edges] == [
        "x -> fc1.x", "fc1.y -> act.x", "act.y -> fc2.x", "fc2.y -> loss.logits", "targets -> loss.targets",
    ]  # fmt: skip
    assert network.graph.loss == "loss"
    assert [node.line for node in network.graph.nodes] == [8, 9, 10, 11]
    assert network.recipe.optimizer.lr == 1e-3


def test_an_error_shows_place_line_caret_and_hint(files: Files) -> None:
    with pytest.raises(NetworkFileError) as caught:
        files.load(changed(("type: relu", "type: rellu")))
    assert str(caught.value) == (
        f"{files.path}:9:21: unknown node type 'rellu'\n"
        "      - {id: act, type: rellu}\n"
        "                        ^\n"
        "    hint: did you mean 'relu'? (dcnr net types)"
    )
    assert caught.value.exit_code == 65


def test_a_shape_error_names_both_nodes(files: Files) -> None:
    text = changed(("in: 16, out: 4", "in: 256, out: 4"))
    assert files.errors(text) == ["10:5: 'fc2' expects (batch, 256), got (batch, 16) from 'act' | "]


def test_all_errors_come_in_one_run(files: Files) -> None:
    text = changed(
        ("type: relu", "type: rellu"),
        ("in: 16, out: 4", "in: 16, out: four"),
        ("targets -> loss.targets", "targets -> loss.target"),
        ("logits: fc2", "logits: fc3"),
        ("lr: 1e-3", "lr: fast"),
        ("vars: {d: 8}", "vars: {d: $(8/0)}"),
    )
    found = files.errors(text)
    assert [one.split(":")[0] for one in found] == ["3", "9", "10", "14", "15", "19"]


BAD_NUMBERS = [
    ("lr: '1e-3'", "text '1e-3'", "remove the quotes"),
    ('lr: "0.1"', "text '0.1'", "remove the quotes"),
    ("lr: 12:30:45", "text '12:30:45'", ""),
    ("lr: 010", "text '010'", "write 10"),
    ("lr: 1_000", "text '1_000'", "write 1000"),
    ("lr: fast", "text 'fast'", ""),
    ("lr: [0.1]", "a list", ""),
    ("lr: {a: 0.1}", "a mapping", ""),
    ("lr: true", "true", ""),
    ("lr:", "nothing", ""),
    ("lr: yes", "text 'yes'", ""),
    ("lr: 1e", "text '1e'", ""),
    ("lr: 0,001", "text '0,001'", ""),
]


@pytest.mark.parametrize(("field", "got", "hint"), BAD_NUMBERS)
def test_what_is_no_number_is_refused_with_its_value(files: Files, field: str, got: str, hint: str) -> None:
    optimizer = "\n    ".join(["optimizer:", "type: adamw", field])
    found = files.errors(changed(("optimizer: {type: adamw, lr: 1e-3, betas: [0.9, 0.99]}", optimizer)))
    assert len(found) == 1
    assert found[0].startswith("21:")
    assert f"'train.optimizer.lr' must be a number, got {got} | {hint}" in found[0]


@pytest.mark.parametrize("text", [".nan", ".inf", "-.INF", "1e999"])
def test_numbers_are_finite(files: Files, text: str) -> None:
    assert "is not a finite number" in files.errors(changed(("lr: 1e-3", f"lr: {text}")))[0]


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "0.001", ".001", "1.0e-3", "+1e-3", "$(1/1000)", "'$(1/1000)'"])
def test_usual_forms_of_a_number_are_read(files: Files, text: str) -> None:
    assert files.load(changed(("lr: 1e-3", f"lr: {text}"))).recipe.optimizer.lr == 0.001


def test_numbers_in_lists(files: Files) -> None:
    recipe = files.load(changed(("[0.9, 0.99]", "[9e-1, 99E-2]"))).recipe
    assert recipe.optimizer.type == "adamw"
    assert recipe.optimizer.betas == (0.9, 0.99)
    found = files.errors(changed(("[0.9, 0.99]", "[0.9, '1e-4']")))
    assert found == ["19:51: 'train.optimizer.betas.1' must be a number, got text '1e-4' | remove the quotes"]
    assert files.errors(changed(("[0.9, 0.99]", "[0.9]")))[0].startswith("19:")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2e3", "'train.batch' must be a whole number, got 2e3 | write 2000"),
        ("1.5", "'train.batch' must be a whole number, got 1.5 | "),
        ("$(d/2)", "'train.batch' must be a whole number, got 4.0 from '$(d/2)' | '//' divides whole numbers"),
        ("0", "'train.batch' must be at least 1, got 0 | "),
        ("true", "'train.batch' must be a whole number, got true | "),
        ("99999999999999999999", "99999999999999999999 is too large | whole numbers stay below 2**63"),
        ("$(dd)", "no variable is called 'dd' in '$(dd)' | did you mean 'd'?"),
    ],
)
def test_whole_numbers(files: Files, value: str, text: str) -> None:
    found = files.errors(changed(("batch: 4\n", f"batch: {value}\n")))
    assert [one.split(": ", 1)[1] for one in found] == [text]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([("id: act,", "id: fc1,")], "'fc1' is already the name of a node, on line 8"),
        ([("id: act,", "id: x,")], "'x' is already the name of a input, on line 5"),
        ([("in: 8,", "in: 8, in: 9,")], "key 'in' appears twice; the first is on line 8"),
        ([("in: 8,", "")], "'in' is missing in 'fc1' | in: size of the input's last dimension"),
        ([("in: 8,", "inn: 8,")], "'fc1.inn' is not known here | did you mean 'in'?"),
        ([("in: 8,", "in: -8,")], "'fc1.in' must be greater than 0, got -8"),
        ([("type: relu}", "type: relu, repeat: 2}")], "'act.repeat' needs 'type: block'"),
        ([("{id: act, type: relu}", "{type: relu}"), ("-> act ", "")], "'id' is missing in 'nodes'"),
        ([("{id: act, type: relu}", "{id: act}"), ("-> act ", "")], "'type' is missing in 'act'"),
        ([("{id: act, type: relu}", "relu"), ("-> act ", "")], "a node is a mapping such as"),
        ([("type: relu}", "type: block}")], "does not say which block"),
        ([("type: relu}", "type: block, block: b}")], "no block is called 'b'"),
        ([("-> act ->", "-> acr ->")], "no node or input is called 'acr' | did you mean 'act'?"),
        ([("-> act ->", "-> act.z ->")], "'act' has no input port 'z' | it has x"),
        ([("-> act ->", "-> -> act ->")], "a name is missing in edge"),
        ([("-> act ->", "-> a b ->")], "'a b' is not a name in edge"),
        ([("-> act ->", "-> x ->")], "'x' is an input; nothing can lead to it"),
        ([("- x -> fc1", "- x.y -> fc1")], "input 'x' has no ports"),
        ([("- targets -> loss.targets", "- targets")], "'targets' is not an edge"),
        ([("- targets -> loss.targets", "- [targets, loss]")], "an edge is text such as"),
        ([("  - targets -> loss.targets\n", "")], "'loss' gets nothing at 'targets'"),
        ([("  - targets -> loss.targets\n", "")], "input 'targets' is never used"),
        ([("  - targets ->", "  - fc1 -> fc2\n  - targets ->")], "'fc2' already gets 'act', on line 13"),
        ([("loss.targets\n", "loss.targets\n  - x -> loss\n")], "'loss.targets' already gets 'targets'"),
        ([("loss: loss}", "loss: fc2}")], "output 'loss' must be a single number, got float32(batch, 4) from 'fc2'"),
        ([("loss: loss}", "lost: loss}")], "'train' needs an output called 'loss'"),
        ([("loss: loss}", "loss: loss.y}")], "'loss' has no output port 'y' | it has loss"),
        ([("name: mlp\n", "")], "'name' is missing"),
        ([("version: 1", "version: 2")], "'version' must be 1, got 2"),
        ([("version: 1", "version: one")], "'version' must be 1, got text 'one'"),
        ([("vars: {d: 8}", "var: {d: 8}")], "'var' is not known here | did you mean 'vars'?"),
        ([("vars: {d: 8}", "vars: [d]")], "'vars' must be a mapping, got a list"),
        ([("vars: {d: 8}", "vars: {d: [8]}")], "'vars.d' must be a number, text, true or false, got a list"),
        ([("vars: {d: 8}", "vars: {'d-d': 8}")], "'d-d' can't name a variable"),
        ([("vars: {d: 8}", "place: {fc3: p1}")], "no node is called 'fc3' | did you mean 'fc2'?"),
        ([("vars: {d: 8}", "place: {fc1: ../p1}")], "a PNode's name must be 1 to 63 of"),
        ([("float32", "float33")], "'inputs.x.dtype' must be"),
        ([("[batch, 8]", "[8, 8]")], "'inputs.x.shape': the first extent is the word batch"),
        ([("[batch, 8]", "[batch, 0]")], "extents are whole numbers from 1"),
        ([("[batch, 8]", "[batch, ten]")], "extents are whole numbers from 1"),
        ([("type: adamw, ", "")], "'train.optimizer' has no 'type' | there are adamw, sgd"),
        ([("type: adamw,", "type: adam,")], "'train.optimizer' has no type 'adam' | did you mean 'adamw'?"),
        ([("type: adamw,", "type: sgd,")], "'train.optimizer.betas' is not known here"),
        ([("  steps: 10\n", "")], "'steps' is missing in 'train' | steps: optimizer updates in the whole run"),
        ([("  steps: 10\n", "  steps: 10\n  microbatches: 8\n")], "8 microbatches of a batch of 4 would be empty"),
        ([("  steps: 10\n", "  steps: 10\n  precision: bf61\n")], "got text 'bf61' | did you mean 'bf16'?"),
        ([("  steps: 10\n", "  steps: 10\n  data: {text: a, dataset: digits}\n")], "exactly one of 'text' and"),
        ([("nodes:\n", "nodes: 5\nx:\n")], "'nodes' must be a list, got 5"),
    ],
)  # fmt: skip
def test_each_fault_is_named(files: Files, pairs: list[tuple[str, str]], expected: str) -> None:
    found = files.errors(changed(*pairs))
    assert any(expected in one for one in found), found


def test_a_broken_node_brings_no_errors_of_what_follows(files: Files) -> None:
    assert len(files.errors(changed(("type: relu", "type: rellu")))) == 1
    assert len(files.errors(changed(("in: 8,", "in: eight,")))) == 1
    assert len(files.errors(changed(("-> act ->", "-> acr ->")))) == 1


def test_cycles_print_their_path(files: Files) -> None:
    found = files.errors(
        changed(("  - x -> fc1 -> act -> fc2 -> loss.logits", "  - act -> fc2 -> act\n  - x -> fc1 -> loss.logits"))
    )
    assert found == ["13:19: the edges form a cycle: act -> fc2 -> act | a network has no way back to an earlier node"]


def test_a_long_cycle_and_one_through_blocks(files: Files) -> None:
    text = MLP.replace(
        "nodes:\n", "blocks:\n  b: {inputs: [i], nodes: [{id: r, type: add}], edges: [i -> r], output: r}\nnodes:\n"
    )
    text = text.replace(
        "{id: act, type: relu}", "{id: act, type: block, block: b}\n  - {id: m, type: add}\n  - {id: n, type: relu}"
    )
    text = text.replace("fc1 -> act -> fc2", "fc1 -> m -> act -> n -> m\n  - n -> fc2")
    assert "the edges form a cycle: act.r -> n -> m -> act.r" in files.errors(text)[0]


IDS = [
    "../../other", "a/b", ".", "..", "%2e%2e", "x" * 64, "x" * 300, "", "-a", "_a", "A", "a.b", "а", "ａ", "a\u200b",
    "a b", "/etc/passwd", "a\\b", "con:", "é", "\u202ea",
]  # fmt: skip


@pytest.mark.parametrize("name", IDS)
def test_ids_are_plain_words(files: Files, name: str) -> None:
    quoted = json.dumps(name, ensure_ascii=False)
    for old, new in (
        ("name: mlp", f"name: {quoted}"),
        ("id: act", f"id: {quoted}"),
        ("outputs: {logits:", f"outputs: {{{quoted}:"),
        ("vars: {d: 8}", f"place: {{act: {quoted}}}"),
    ):
        found = files.errors(changed((old, new)))
        assert any("must be 1 to 63 of a-z" in one for one in found), found
        assert all(one.isprintable() for one in found)


@pytest.mark.parametrize("name", ["a", "0", "x" * 63, "a-b_c", "no", "1e4", "true", "null", "on", "010"])
def test_ids_stay_text(files: Files, name: str) -> None:
    text = changed(("name: mlp", f"name: {name}"), ("id: act", f"id: {name}"), ("-> act ->", f"-> {name} ->"))
    network = files.load(text)
    assert network.id == name
    assert name in [node.id for node in network.graph.nodes]


@pytest.mark.parametrize(
    "source", ["../../other", "a/b", ".", "%2e%2e", "a\0b", "x" * 300, "gpt-chаr", "/etc/shadow\0", ""]
)
def test_sources_that_are_none_are_refused(source: str) -> None:
    with pytest.raises(BadFileError) as caught:
        load(source)
    assert str(caught.value).isprintable()


def test_a_name_never_opens_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text(MLP)
    with pytest.raises(BadFileError, match="no network is called 'mine'"):
        load("mine")
    with pytest.raises(BadFileError, match="did you mean 'gpt-char'"):
        load("gpt-chr")


def test_folders_fifos_and_devices_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path, tmp_path / "pipe.yaml", Path("/dev/zero")):
        with pytest.raises(BadFileError, match="is not a file"):
            load(path)


def test_bytes_that_are_not_utf8(files: Files) -> None:
    assert files.errors(b"version: 1\nname: \xff\n") == ["2:7: byte 0xff is not UTF-8 | save the file as UTF-8"]


def test_byte_order_mark_and_windows_line_ends(files: Files) -> None:
    digest = files.load(MLP).digest
    assert files.load(b"\xef\xbb\xbf" + MLP.encode()).digest == digest
    assert files.load(MLP.replace("\n", "\r\n")).digest == digest


def test_text_of_the_file_is_shown_literally(files: Files) -> None:
    with pytest.raises(NetworkFileError) as caught:
        files.load(changed(("type: relu", 'type: "[red]\\e[31m\\u202e"')))
    text = str(caught.value)
    assert "unknown node type '[red]\\x1b[31m\\u202e'" in text
    assert all(line.isprintable() for line in text.split("\n"))


def test_long_lines_are_cut_around_the_fault() -> None:
    found = str(Diagnostic("f", 1, 500, "text", "a" * 499 + "!" + "b" * 500))
    line, caret = found.split("\n")[1:3]
    assert len(line) < 180
    assert line[caret.index("^")] == "!"


def test_many_errors_are_counted(files: Files) -> None:
    text = changed(("nodes:\n", "nodes:\n" + "".join(f"  - {{id: n{i}, type: nope}}\n" for i in range(200))))
    with pytest.raises(NetworkFileError) as caught:
        files.load(text)
    assert len(caught.value.diagnostics) == 200
    assert str(caught.value).endswith("… and 150 more errors")


def test_vocab_comes_from_the_data(files: Files) -> None:
    text = changed(("out: 4}", "out: $vocab}"))
    assert files.load(text, given={"vocab": 7}).vars == {"d": 8, "vocab": 7}
    assert "it comes from the tokenizer" in files.errors(text)[0]
    assert read_recipe(files.write(text)).batch == 4
    assert files.load(text, sets=["vars.vocab=7"]).vars["vocab"] == 7
    found = files.errors(text, sets=["vars.vocab=7"], given={"vocab": 8})
    assert found == [
        "1:12: 'vars.vocab' is 7 here, but the data give 8 | remove it from 'vars'; $vocab is known without"
    ]
    assert files.load(MLP, given={"vocab": 7}).vars == {"d": 8}


def test_the_recipe_is_read_before_the_data_are_known_and_all_else_is_checked_too(files: Files) -> None:
    text = changed(("out: 4}", "out: $vocab}"), ("type: relu", "type: rellu"), ("lr: 1e-3", "lr: fast"))
    with pytest.raises(NetworkFileError) as caught:
        read_recipe(files.write(text))
    assert len(caught.value.diagnostics) == 2


def test_a_file_without_training(files: Files) -> None:
    text = MLP[: MLP.index("train:")]
    assert files.load(text).recipe.steps == 0
    assert read_recipe(files.write(text)).data is None


def test_context_defaults_to_the_length_of_tokens() -> None:
    recipe = read_recipe("gpt-char", ["vars.ctx=32"])
    assert recipe.data is not None
    assert recipe.data.context == 32


def test_shipped_networks_are_located_by_name() -> None:
    assert {path.stem for path in shipped()} >= {"mlp-digits", "cnn-digits", "gpt-char", "gpt-bpe", "moe-digits"}
    assert locate("gpt-char").name == "gpt-char.yaml"


def many_nodes(count: int) -> str:
    lines = ["version: 1", "name: big", "inputs: {x: {dtype: float32, shape: [batch, 8]}}", "nodes:"]
    lines += [
        f"  - {{id: n{i}, type: linear, in: 8, out: 8, bias: false}}" if i % 2 else f"  - {{id: n{i}, type: relu}}"
        for i in range(count)
    ]
    lines += ["edges:", "  - x -> n0", *(f"  - n{i} -> n{i + 1}" for i in range(count - 1))]
    return "\n".join([*lines, f"outputs: {{y: n{count - 1}}}"])


def test_twenty_thousand_nodes_load_in_three_seconds(files: Files) -> None:
    files.load(many_nodes(4))
    path = files.write(many_nodes(20_000))
    started = time.process_time()
    assert len(load(path).graph.nodes) == 20_000
    assert time.process_time() - started < 3.0


def test_twenty_thousand_bad_nodes_are_refused_in_a_second_each_named(files: Files) -> None:
    path = files.write(many_nodes(20_000).replace("relu", "rellu"))
    started = time.process_time()
    with pytest.raises(NetworkFileError) as caught:
        load(path)
    assert time.process_time() - started < 3.0
    assert len(caught.value.diagnostics) == 10_000
