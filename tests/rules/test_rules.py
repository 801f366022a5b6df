"""Every rule: it fires where it should, keeps quiet beside that, and its message is the one on file."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import capture.rules as rules_package
from capture._facts import (
    BorrowedUse,
    Collective,
    Dissent,
    Draw,
    Drift,
    Effect,
    Escape,
    GradientObstacle,
    GradientUse,
    HostSync,
    HostWork,
    Inlined,
    Moved,
    OpaqueLeaf,
    OutputInfo,
    PackageRunner,
    SequenceChange,
    SubclassLeaf,
    Unbound,
    Unkeyed,
    Verification,
)
from capture._findings import Case, Decision, Finding, Policy, Severity
from capture._report import format_finding
from capture.rules import RULES, Rule, all_rules, rule, rule_by_code, rules_revision
from capture.rules._rule import HEADINGS, accelerators, bytes_text, names_text, short_op
from tests.plan.samples import annotation, argument, case, check_golden, implicit, limited, mutation, tensor, where

FOLDER = Path(rules_package.__file__).parent
BY_CODE = {each.code: each for each in RULES}


def collective(op: str = "c10d.allreduce_.default", **fields: Any) -> Collective:
    usual: dict[str, Any] = {"group": "0", "all_wait": True, "where": where(94, "dist.all_reduce(y)")}
    return Collective(op=op, **usual | fields)


# Per code: cases that fire (all of them in the golden file), and near misses.
CASES: dict[str, tuple[list[Case], list[Case]]] = {
    "CG101": (
        [
            case(
                placeholders=(argument("kv.0.k", static=True, tensor=tensor(8, 4096, 128)), implicit("self.table")),
                moved=(
                    Moved(path="kv.0.k", before_addr=0x7F00, after_addr=0x8F00, where=where()),
                    Moved(path="self.table", before_addr=0x100, after_addr=0x200),
                ),
            )
        ],
        [case(placeholders=(argument("kv.0.k", static=True),))],
    ),
    "CG102": (
        [case(placeholders=(argument("bias", mutation=mutation()),))],
        [
            case(
                placeholders=(argument("kv", static=True, mutation=mutation()), implicit("self.n", mutation=mutation()))
            )
        ],
    ),
    "CG103": (
        [
            case(placeholders=(argument("a", alias_group=0), argument("b", alias_group=0))),
            case(placeholders=(argument("a", alias_group=0), argument("b", alias_group=0, mutation=mutation()))),
            case(placeholders=(argument("row", alias_group=1), argument("table", static=True, alias_group=1))),
            case(placeholders=(argument("row", alias_group=1), implicit("self.w", alias_group=1, mutation=mutation()))),
        ],
        [
            case(placeholders=(argument("a"), argument("b", mutation=mutation()))),
            case(placeholders=(argument("a", alias_group=0), argument("b", alias_group=1))),
            case(
                placeholders=(
                    argument("a", static=True, alias_group=0, mutation=mutation()),
                    implicit("self.w", alias_group=0),
                )
            ),
        ],
    ),
    "CG104": (
        [case(unmatched_static=("cache.keys",), known_paths=("x", "cache.key")), case(unmatched_static=("cache",))],
        [case(known_paths=("x", "cache.key"))],
    ),
    "CG105": (
        [
            case(placeholders=(implicit("self.weight"), implicit("(constant)", "constant"))),
            case(placeholders=(implicit("table", "closure"), implicit("TABLE", "global"), implicit("d['t']", "item"))),
            case(placeholders=(implicit("(unknown 0)", "unknown"),)),
            case(placeholders=(implicit("self.h", "attribute", replaced=True),)),
            case(placeholders=(implicit("self.h", "attribute", replaced=True, mutation=mutation()),)),
        ],
        [case(placeholders=(argument("x"), argument("kv", static=True)))],
    ),
    "CG106": (
        [
            case(
                opaque=(
                    OpaqueLeaf(path="pair", type="Pair", role="argument", num_tensors=2),
                    OpaqueLeaf(path="0", type="Box", role="output", num_tensors=1),
                    OpaqueLeaf(path="mode", type="Mode", role="argument", num_tensors=0, keyless=True),
                )
            )
        ],
        [case(opaque=(OpaqueLeaf(path="mode", type="Mode", role="argument", num_tensors=0),))],
    ),
    "CG107": (
        [case(subclasses=(SubclassLeaf(path="weight", type="sparse_coo tensor"),))],
        [case(placeholders=(argument("weight"),))],
    ),
    "CG108": (
        [case(placeholders=(argument("x"), argument("kv", static=True)))],
        [case(placeholders=(implicit("self.weight"),))],
    ),
    "CG109": (
        [
            case(
                unbound=(
                    Unbound(path="self.w", reason="a parameter changed for no known reason", kernel="gemm"),
                    Unbound(path="cache", reason="no parameter of a kernel holds its address"),
                )
            )
        ],
        [case(moved=(Moved(path="self.w", before_addr=1, after_addr=2),))],
    ),
    "CG110": (
        [
            case(
                placeholders=(argument("x"), implicit("self.weight")),
                unkeyed=(
                    Unkeyed(name="aten.as_strided.default", kind="beside", paths=("x",), where=where()),
                    Unkeyed(name="Tensor.as_strided", kind="place", paths=("x",), where=where()),
                    Unkeyed(name="Tensor.storage_offset", kind="answer", paths=("x",), where=where()),
                    Unkeyed(name="Parameter._version", kind="answer", paths=("self.weight",)),
                ),
            )
        ],
        [
            case(
                placeholders=(implicit("self.cache"), argument("kv", static=True)),
                unkeyed=(
                    Unkeyed(name="Tensor.as_strided", kind="place", paths=("self.cache",)),
                    Unkeyed(name="aten.as_strided.default", kind="beside", paths=("kv",)),
                ),
            )
        ],
    ),
    "CG201": (
        [
            case(host_syncs=(HostSync(op=op, where=where(12, code)),))
            for op, code in (
                ("aten._local_scalar_dense.default", "if x.sum() > 0:"),
                ("aten.is_nonzero.default", "while mask.any():"),
                ("aten.equal.default", "if torch.equal(a, b):"),
                ("tolist", "ids.tolist()"),
                ("Tensor.numpy", "x.numpy()"),
                ("__repr__", "print(x)"),
                ("mylib.peek.default", "peek(x)"),
            )
        ],
        [case(host_syncs=(HostSync(op="aten.nonzero.default", where=where(), data_dependent_shape=True),))],
    ),
    "CG202": (
        [
            case(
                devices=("cpu", "cuda:0"),
                host_work=(
                    HostWork(op="aten.add.Tensor", kind="compute", where=where()),
                    HostWork(op="aten._to_copy.default", kind="copy", where=where(90, "x.cpu()")),
                ),
            ),
            case(devices=("cpu",), host_work=(HostWork(op="mylib.wait.default", kind="unsafe", where=where()),)),
            case(host_work=(HostWork(op="mylib.peek.default", kind="address", where=where()),)),
        ],
        [case(devices=("cpu",), host_work=(HostWork(op="aten.add.Tensor", kind="compute", where=where()),))],
    ),
    "CG203": ([case(devices=("cpu", "cuda:1", "cuda:0"))], [case(devices=("cpu", "cuda:0", "meta"))]),
    "CG204": (
        [
            case(
                effects=(
                    Effect(path="self.num_calls", kind="python", before="1", after="2", where=where()),
                    Effect(path="self.seen", kind="container", before="list of 1", after="list of 2"),
                )
            )
        ],
        [case(effects=(Effect(path="self.h", kind="tensor", before="None", after="f16[8]"),))],
    ),
    "CG205": (
        [case(drifts=(Drift(path="aten.mul.Tensor argument 1", first="0.5", second="0.6", where=where()),))],
        [case(runs=2)],
    ),
    "CG206": (
        [
            case(sequence_change=SequenceChange(index=3, first="aten.mul.Tensor", second="aten.add.Tensor")),
            case(sequence_change=SequenceChange(index=3, first="aten.mul.Tensor", second="", where=where())),
        ],
        [case(runs=2, sequence=("aten.mul.Tensor",))],
    ),
    "CG207": (
        [case(unseen=(where(), None))],
        [case(devices=("cuda:0",))],
    ),
    "CG301": (
        [
            case(
                annotation(rng=rng),
                draws=(
                    Draw(generator="default", device="cuda:0", op="aten.native_dropout.default", where=where()),
                    Draw(generator="default", device="cuda:0", op="aten.rand.default", where=where(90)),
                    Draw(generator="self.gen", device="cuda:0", op="aten.randn.generator"),
                ),
            )
            for rng in ("graphsafe", "eager", "forbid")
        ],
        [case(annotation(rng="forbid"))],
    ),
    "CG401": (
        [case(escapes=(Escape(tensor=tensor(8, 4), op="aten.mul.Tensor", where=where()),))],
        [case(outputs=(OutputInfo(path="", kind="fresh", tensor=tensor(8, 4)),))],
    ),
    "CG402": (
        [case(effects=(Effect(path="self.h", kind="tensor", before="None", after="f16[8]", where=where()),))],
        [case(effects=(Effect(path="self.n", kind="python", before="1", after="2"),))],
    ),
    "CG403": (
        [
            case(
                outputs=(
                    OutputInfo(path="", kind="input-view", source="x", tensor=tensor(4)),
                    OutputInfo(path="1.k", kind="static-view", source="kv.0.k", tensor=tensor(4)),
                    OutputInfo(path="2", kind="foreign", tensor=tensor(4)),
                )
            )
        ],
        [
            case(
                outputs=(
                    OutputInfo(path="0", kind="input", source="x"),
                    OutputInfo(path="1", kind="static", source="kv"),
                    OutputInfo(path="2", kind="fresh"),
                )
            )
        ],
    ),
    "CG404": (
        [case(borrowed_use=BorrowedUse(function="model.decode", where=where(12, "return self.head(x)")))],
        [case(annotation(outputs="borrow"))],
    ),
    "CG501": (
        [
            case(
                gradients=tuple(
                    GradientUse(path=path, op="aten.addmm.default", where=where(line))
                    for line, path in enumerate(("self.a.weight", "self.b.weight", "self.b.weight", "x"), 88)
                )
            ),
            case(gradients=(GradientUse(path=None, op="aten.mul.Tensor"),)),
            case(
                gradients=(GradientUse(path="x", op="aten.mul.Tensor", where=where()),),
                gradient_obstacles=(
                    GradientObstacle(path="output.1", reason="output.1 is no new tensor (input-view)"),
                    GradientObstacle(path=None, reason="the body uses register_hook", where=where(90)),
                ),
            ),
        ],
        [case(placeholders=(argument("x", tensor=evolve(tensor(4), requires_grad=True)),))],
    ),
    "CG502": (
        [
            case(
                placeholders=(argument("x", first_use=where()),),
                effects=(Effect(path="x.grad", kind="tensor", before="None", after="f32[8]", where=where()),),
            ),
            case(placeholders=(argument("batch[0]"), implicit("batch[0].grad", "argument"))),
        ],
        [
            case(
                placeholders=(argument("x", static=True), implicit("x.grad", "argument")),
                effects=(Effect(path="x.grad", kind="tensor", before="None", after="f32[8]"),),
            ),
            case(
                placeholders=(argument("x"),),
                effects=(Effect(path="self.x.grad", kind="tensor", before="None", after="f32[8]"),),
            ),
        ],
    ),
    "CG601": (
        [case(host_syncs=(HostSync(op="aten.nonzero.default", where=where(), data_dependent_shape=True),))],
        [case(host_syncs=(HostSync(op="aten._local_scalar_dense.default"),))],
    ),
    "CG701": (
        [
            case(dissent=Dissent(rank=3, reason="CG201 a tensor's value is read as a Python number or bool")),
            case(dissent=Dissent(rank=-1, reason="the store of the process group cannot be reached (Broken pipe)")),
        ],
        [case(collectives=(collective(),))],
    ),
    "CG702": (
        [
            case(collectives=(collective(), collective("c10d.send.default", obstacle="sends between two ranks"))),
            case(collectives=(collective("output.1", where=None, obstacle="is handed out unfinished"),)),
        ],
        [case(collectives=(collective(),))],
    ),
    "CG703": (
        [case(annotation(verify="always"), collectives=(collective(), collective("c10d.broadcast_.default")))],
        [case(annotation(verify="first")), case(collectives=(collective(),))],
    ),
    "CG704": (
        [case(collectives=(collective("c10d.allreduce_.default", registers_segments=True),))],
        [case(collectives=(collective(),))],
    ),
    "CG801": ([case(inlined=(Inlined(function="model.attend", where=where()),))], [case()]),
    "CG802": ([case(backend_missing="meta")], [case(devices=("cpu",))]),
    "CG803": (
        [case(separate_pools="cudaMallocAsync")],
        [case(devices=("cuda:0",))],
    ),
    "CG804": ([case(unpatchable="the package cuda-bindings is not installed")], [case(devices=("cuda:0",))]),
    "CG805": ([case(around="a transform of torch.func")], [case(num_ops=2)]),
    "CG806": (
        [
            case(runners=(PackageRunner(entry=entry, where=where(12, "return self.package(x)")),))
            for entry in ("threaded", "missing", "unknown")
        ],
        [case(devices=("cuda:0",))],
    ),
    "CG901": (
        [
            limited(),
            limited("error"),
            limited(path=None),
        ],
        [case(annotation(max_recordings=1))],
    ),
    "CG902": ([case(num_ops=1), case(num_ops=0)], [case(num_ops=2), case(num_ops=0, runs=0)]),
    "CG903": (
        [case(verification=Verification(path="output.0", deterministic=same)) for same in (True, False)],
        [case(annotation(verify="always"))],
    ),
    "CG904": ([case(refused="aten.resize_.default changes the shape of a tensor in place")], [case()]),
}


def outcome(each: Rule, given: Case) -> list[Finding | Decision]:
    return list(each.check(given))


def policies(each: Rule, given: Case) -> dict[str, Policy]:
    return {
        said.field.removeprefix("policy:"): said.value for said in outcome(each, given) if isinstance(said, Decision)
    }


def severities(each: Rule, given: Case) -> list[Severity]:
    return [said.severity for said in outcome(each, given) if isinstance(said, Finding)]


def rendered(said: Finding | Decision) -> str:
    if isinstance(said, Finding):
        return f"[{said.severity}] {format_finding(said, function='Decoder.step')}"
    return f"{said.field} -> {said.value}  ({said.code}: {said.reason})"


def test_every_rule_has_cases() -> None:
    assert list(CASES) == [each.code for each in RULES]


@pytest.mark.parametrize("code", CASES)
def test_rule_fires_with_the_message_on_file(code: str) -> None:
    blocks = []
    for given in CASES[code][0]:
        said = outcome(BY_CODE[code], given)
        assert said
        assert all(each.code == code for each in said)
        blocks.append("\n\n".join(map(rendered, said)))
    check_golden(f"rules/{code}.txt", "\n\n---\n\n".join(blocks) + "\n")


@pytest.mark.parametrize("code", CASES)
def test_near_misses_yield_nothing(code: str) -> None:
    for given in CASES[code][1]:
        assert outcome(BY_CODE[code], given) == []


@pytest.mark.parametrize("code", CASES)
def test_messages_keep_to_the_style(code: str) -> None:
    """One clause, no full stop, no words that blame; each fix says what it costs."""
    for given in CASES[code][0]:
        for said in outcome(BY_CODE[code], given):
            if isinstance(said, Finding):
                assert not said.what.endswith(".")
                assert not said.why.endswith(".")
                assert not re.search(r"\b(illegal|invalid|please|simply)\b", f"{said.what} {said.why}".lower())
                assert all(fix.endswith(")") and "  (" in fix for fix in said.fix)


# ------------------------------------------------------------------------------------------------ what rules decide


def test_static_and_implicit_mutation_stays_in_place() -> None:
    given = case(placeholders=(argument("kv", static=True, mutation=mutation()), argument("x", mutation=mutation())))
    assert policies(BY_CODE["CG102"], given) == {"x": Policy.COPY_BACK}
    assert policies(BY_CODE["CG108"], given) == {"kv": Policy.STATIC, "x": Policy.COPY}


def test_aliasing_arguments_are_copied_back_together() -> None:
    group = (argument("a", alias_group=0), argument("b", alias_group=0, mutation=mutation()))
    assert policies(BY_CODE["CG103"], case(placeholders=group)) == {"a": Policy.COPY_BACK, "b": Policy.COPY_BACK}
    assert severities(BY_CODE["CG103"], case(placeholders=group)) == [Severity.COPY]


@pytest.mark.parametrize("beside", [argument("t", static=True, alias_group=0), implicit("self.t", alias_group=0)])
def test_argument_beside_a_fixed_tensor(beside: Any) -> None:
    """A write on either side makes the call eager; without one it is only worth a note."""
    one, other = argument("x", alias_group=0), beside
    assert severities(BY_CODE["CG103"], case(placeholders=(one, other))) == [Severity.NOTE]
    for pair in ((evolve(one, mutation=mutation()), other), (one, evolve(other, mutation=mutation()))):
        assert severities(BY_CODE["CG103"], case(placeholders=pair)) == [Severity.EAGER]


@pytest.mark.parametrize("owner", ["parameter", "buffer", "attribute", "constant", "closure", "global", "item"])
def test_owned_implicit_inputs_are_static(owner: str) -> None:
    given = case(placeholders=(implicit("t", owner),))
    noted = owner in ("closure", "global", "item")
    assert policies(BY_CODE["CG105"], given) == {"t": Policy.STATIC}
    assert severities(BY_CODE["CG105"], given) == ([Severity.NOTE] if noted else [])


def test_implicit_input_without_owner_is_eager() -> None:
    given = case(placeholders=(implicit("t", "unknown", replaced=True),))
    assert policies(BY_CODE["CG105"], given) == {"t": Policy.EAGER}
    assert severities(BY_CODE["CG105"], given) == [Severity.EAGER]


def test_replaced_implicit_input_is_bound_anew() -> None:
    """Where it lives changes on every call; nothing is copied, and a write to the old tensor stays in place."""
    replaced = implicit("self.h", "attribute", replaced=True)
    for given in (replaced, evolve(replaced, mutation=mutation())):
        assert policies(BY_CODE["CG105"], case(placeholders=(given,))) == {"self.h": Policy.STATIC}


def test_severity_follows_the_options() -> None:
    draws = (Draw(generator="default", device="cpu", op="aten.rand.default"),)
    by_rng = [severities(BY_CODE["CG301"], case(annotation(rng=rng), draws=draws)) for rng in ("graphsafe", "eager")]
    assert by_rng == [[Severity.NOTE], [Severity.EAGER]]
    assert severities(BY_CODE["CG301"], case(annotation(rng="forbid"), draws=draws)) == [Severity.ERROR]
    assert severities(BY_CODE["CG901"], limited("eager")) == [Severity.EAGER]
    assert severities(BY_CODE["CG901"], limited("error")) == [Severity.ERROR]


# ------------------------------------------------------------------------------------------------ the list of rules


def test_rules_are_the_files_on_disk() -> None:
    files = {path.stem for path in FOLDER.glob("cg*.py")}
    assert files == {f"{each.code}_{each.name}".lower().replace("-", "_") for each in RULES}
    codes = [each.code for each in RULES]
    assert codes == sorted(set(codes))
    assert len({each.name for each in RULES}) == len(RULES)


@pytest.mark.parametrize("each", RULES, ids=lambda each: each.code)
def test_rule_page(each: Rule) -> None:
    """All headings, a summary of one line, and examples that compile."""
    assert tuple(each.headings) == HEADINGS
    assert each.summary.endswith(".")
    for heading in ("Example", "Instead"):
        blocks = re.findall(r"```python\n(.*?)```", each.headings[heading], flags=re.DOTALL)
        assert blocks, heading
        for block in blocks:
            compile(block, f"{each.code} {heading}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_rule_files_are_short() -> None:
    sizes = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FOLDER.glob("cg*.py")}
    assert {name: size for name, size in sizes.items() if not 30 <= size <= 110} == {}


def make_rule(doc: str | None, code: str = "XX100") -> Rule:
    source = textwrap.dedent("""
        def check(case):
            yield from ()
    """)
    namespace: dict[str, Any] = {"__doc__": doc}
    exec(source, namespace)  # noqa: S102 - the docstring of a module that need not exist
    return rule(code, "extra", severity=Severity.NOTE, revision=3)(namespace["check"])


PAGE = "Summary.\n\n" + "\n\n".join(f"## {heading}\ntext" for heading in HEADINGS)


@pytest.mark.parametrize(
    "doc", [None, "Summary.", PAGE.replace("## Known gaps\ntext", ""), PAGE.replace("## Instead\ntext", "## Instead")]
)
def test_missing_heading_fails_at_import(doc: str | None) -> None:
    with pytest.raises(TypeError, match="XX100 needs text under each of: What it does"):
        make_rule(doc)


def test_rule_by_code() -> None:
    assert rule_by_code("cg101") is RULES[0]
    with pytest.raises(LookupError, match=r"no rule 'CG111' \(did you mean 'CG1"):
        rule_by_code("CG111")


class FakeEntry:
    value = "package:RULE"

    def __init__(self, name: str, loaded: object) -> None:
        self.name = name
        self.loaded = loaded

    def load(self) -> object:
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


@pytest.fixture
def _fresh_rules() -> Iterator[None]:
    all_rules.cache_clear()
    yield
    all_rules.cache_clear()


@pytest.mark.usefixtures("_fresh_rules")
def test_extra_rules_come_through_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """A good one joins in its place and changes the revision; broken ones warn and are left out."""
    extra = make_rule(PAGE, "CG250")
    entries = [
        FakeEntry("good", extra),
        FakeEntry("broken", ImportError("no module")),
        FakeEntry("no-rule", 3),
        FakeEntry("taken", make_rule(PAGE, "CG101")),
    ]
    before = rules_revision()
    all_rules.cache_clear()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries if group == "capture.rules" else [])
    with pytest.warns(RuntimeWarning, match="is ignored") as warned:
        found = all_rules()
    assert [each.code for each in found] == sorted([*BY_CODE, "CG250"])
    assert [str(each.message).split(" of ")[0] for each in warned] == [
        "rule 'broken'",
        "rule 'no-rule'",
        "rule 'taken'",
    ]
    assert rule_by_code("CG250") is extra
    assert rules_revision() != before


def test_revision_is_stable() -> None:
    assert rules_revision() == rules_revision()
    assert re.fullmatch("[0-9a-f]{16}", rules_revision())


# --------------------------------------------------------------------------------------------------- words and sizes


def test_texts() -> None:
    assert [bytes_text(size) for size in (0, 999, 1000, 8_388_608, 999_960_000, 3 * 10**12)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "8.4 MB",
        "1.0 GB",
        "3.0 TB",
    ]
    assert [names_text(list(text)) for text in ("", "a", "ab", "abc", "abcde")] == [
        "",
        "'a'",
        "'a' and 'b'",
        "'a', 'b' and 'c'",
        "'a', 'b', 'c' and 2 more",
    ]
    assert [short_op(op) for op in ("aten.mul.Tensor", "aten::mul.Tensor", "Tensor.tolist", "tolist")] == [
        "mul",
        "mul",
        "tolist",
        "tolist",
    ]
    assert accelerators(("cuda:1", "cpu", "meta", "cuda:0", "cuda:1")) == ("cuda:0", "cuda:1")
