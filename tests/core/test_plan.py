"""The plan on disk: the same bytes for the same plan, and a named reason for every text that is no plan."""

from __future__ import annotations

import json
from typing import Any

import pytest
from attrs import evolve

from capture.core import plan as plan_module
from capture.core.findings import Severity
from capture.core.plan import CapturePlan, PlanError, differing_fields, dumps, loads, sequence_digest
from capture.rules import RULES
from capture.rules.compile_plan import compile_plan
from tests.support.samples import check_golden, decoder, limited


def plan() -> CapturePlan:
    given = decoder()
    return compile_plan(given.annotation, given.facts, RULES, {"torch": "2.13.0", "source": "b1f0"})


def test_the_text_is_as_json_writes_it() -> None:
    values: list[Any] = [
        {}, [], {"b": [], "a": {}}, {"b": 1, "a": None, "ö": True}, ["é\n\"", [1, [2, []]], {"x": {"y": [3]}}],
        {"z": "last", "list": [{"b": "", "a": ":"}, {"a": [{}]}], "a": -1},
    ]  # fmt: skip
    for value in values:
        assert plan_module._indented(value, "\n") == json.dumps(value, indent=2, sort_keys=True)


def test_plan_on_file() -> None:
    """The file on disk changes with the format alone, not with a refactoring."""
    check_golden("plan/decoder.json", dumps(plan()))


@pytest.mark.parametrize("given", [decoder(), limited()], ids=["decoder", "limited"])
def test_round_trip(given: Any) -> None:
    made = compile_plan(given.annotation, given.facts, RULES, {"b": "1", "a": "2"})
    assert loads(dumps(made)) == made
    assert dumps(loads(dumps(made))) == dumps(made)


def test_form() -> None:
    """Sorted keys, two spaces, one newline, ASCII; the order in which the fingerprint was filled does not show."""
    text = dumps(evolve(plan(), function="Modèle.step"))
    assert text.isascii()
    assert text.endswith("}\n")
    assert text == json.dumps(json.loads(text), indent=2, sort_keys=True) + "\n"
    assert dumps(evolve(plan(), fingerprint={"a": "1", "b": "2"})) == dumps(
        evolve(plan(), fingerprint={"b": "2", "a": "1"})
    )


def test_enums_by_name() -> None:
    data = json.loads(dumps(plan()))
    assert [item["policy"] for item in data["placeholders"]] == ["copy", "static", "copy_back", "static", "static"]
    assert data["findings"][0]["severity"] == "copy"


@pytest.mark.parametrize("text", ["", "garbage", "[" * 100_000, '{"version": 1', "\x00"])
def test_garbage_is_no_json(text: str) -> None:
    with pytest.raises(PlanError, match="not JSON"):
        loads(text)


def test_every_truncation_is_noticed() -> None:
    text = dumps(plan()).rstrip()
    for end in range(0, len(text), 97):
        with pytest.raises(PlanError, match="not JSON"):
            loads(text[:end])


@pytest.mark.parametrize("text", ["[]", "1", "null", '"plan"'])
def test_other_json_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError, match="a JSON object is expected, found"):
        loads(text)


@pytest.mark.parametrize(
    ("version", "found"), [(1, "version 1"), ("1", "version '1'"), (True, "version True"), (None, "version None")]
)
def test_foreign_schema_names_both_versions(version: object, found: str) -> None:
    data = json.loads(dumps(plan())) | {"version": version}
    with pytest.raises(PlanError, match=f"found schema {found}, expected 3"):
        loads(json.dumps(data))


def test_no_schema_version() -> None:
    with pytest.raises(PlanError, match="found no schema version, expected 3"):
        loads("{}")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["num_ops"], "3", r"expected a whole number, found \"3\" @ \$\.num_ops"),
        (["num_ops"], True, r"expected a whole number, found true @ \$\.num_ops"),
        (["num_ops"], 3.0, r"expected a whole number, found 3\.0 @ \$\.num_ops"),
        (["function"], 1, r"expected a text, found 1 @ \$\.function"),
        (["outcome"], "maybe", r"expected one of record, eager, found \"maybe\" @ \$\.outcome"),
        (["rng"], ["eager"], r"expected one of graphsafe, eager, forbid, found \[\"eager\"\] @ \$\.rng"),
        (["fingerprint"], [], r"expected an object, found \[\] @ \$\.fingerprint"),
        (["fingerprint", "torch"], 2, r"expected a text, found 2 @ \$\.fingerprint\['torch'\]"),
        (["placeholders"], {}, r"expected a list, found \{\} @ \$\.placeholders"),
        (["placeholders", 0], "ids", r"expected an object, found \"ids\" @ \$\.placeholders\[0\]"),
        (["placeholders", 0, "policy"], "COPY", r"one of static, .*found \"COPY\" @ \$\.placeholders\[0\]\.policy"),
        (["placeholders", 0, "policy"], 1, r"found 1 @ \$\.placeholders\[0\]\.policy"),
        (["placeholders", 0, "mutated"], 0, r"expected true or false, found 0 @ \$\.placeholders\[0\]\.mutated"),
        (["placeholders", 0, "tensor", "shape"], "81", r"expected a list, found \"81\""),
        (["placeholders", 0, "tensor", "shape", 1], None, r"found null @ \$\.placeholders\[0\]\.tensor\.shape\[1\]"),
        (["findings", 0, "fix"], "one", r"expected a list, found \"one\" @ \$\.findings\[0\]\.fix"),
        (["unknown"], 1, r"unknown @ \$"),
    ],
)
def test_wrong_types_are_named_with_their_place(path: list[Any], value: object, message: str) -> None:
    data: Any = json.loads(dumps(plan()))
    inner = data
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = value
    with pytest.raises(PlanError, match=message) as caught:
        loads(json.dumps(data))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["function", "outcome", "placeholders", "findings", "sequence_digest"])
def test_missing_fields_are_named(name: str) -> None:
    data = json.loads(dumps(plan()))
    del data[name]
    with pytest.raises(PlanError, match=f"missing field '{name}'"):
        loads(json.dumps(data))


def test_plan_error_is_a_value_error() -> None:
    assert issubclass(PlanError, ValueError)


def test_differing_fields() -> None:
    assert differing_fields({"a": "1", "b": "2", "c": "3"}, {"b": "2", "c": "4", "d": "5"}) == ("a", "c", "d")
    assert differing_fields({"a": "1"}, {"a": "1"}) == ()


def test_sequence_digest_depends_on_the_order() -> None:
    assert sequence_digest(["a", "b"]) != sequence_digest(["b", "a"])
    assert sequence_digest(()) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_findings_at_least() -> None:
    made = plan()
    assert [finding.code for finding in made.findings_at_least(Severity.COPY)] == ["CG102"]
    assert made.findings_at_least(Severity.NOTE) == made.findings
    assert made.findings_at_least(Severity.ERROR) == ()
