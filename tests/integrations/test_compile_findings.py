"""``torch.compile(backend="capture")``: options, findings, reports, and captured functions around compiled ones."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture import CaptureWarning, capture, explain, plans, recordings, release, report
from tests.support.compiled import MODELS, STEPS, compiled, made, only, replayed, train, twins
from tests.support.compiled import compiler as compiler
from tests.support.nets import Mlp
from tests.support.rows import fresh as fresh
from tests.support.rows import rand, same

# ---------------------------------------------------------------------------------------------- options and findings


def test_options_are_those_of_the_decorator() -> None:
    f = compiled(lambda x: x.sin(), options={"outputs": "clone", "verify": "always", "name": "wave"})
    for seed in range(STEPS):
        same(f(rand(4, seed=seed)), rand(4, seed=seed).sin())
    now = recordings(made("wave")[0])
    assert now.function.startswith("wave [")
    assert now.verifications >= STEPS - 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"outpts": "clone"}}, r"unknown option 'outpts'.*did you mean 'outputs'.*known: static, rng"),
        ({"options": {"outputs": "keep"}}, "outputs='keep' is not a choice"),
        ({"options": {"static": ["x"]}}, "mark_static_address"),
        ({"mode": "max-autotune"}, r"does not take mode=.*options="),
    ],
)
def test_unknown_options(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"(?s)AnnotationError: .*{message}"):
        compiled(lambda x: x.sin(), **settings)(rand(3))


def test_findings_name_the_users_line() -> None:
    def f(x: Tensor) -> Tensor:
        y = x + 1
        return nn.functional.dropout(y, training=True)  # the line

    run = compiled(f, options={"rng": "eager"})
    with pytest.warns(CaptureWarning, match="CG301"):
        run(rand(4))
    where = next(finding.where for finding in only().findings if finding.code == "CG301")
    assert where.file == __file__
    assert where.code.endswith("# the line")


def test_names_in_reports_and_plans() -> None:
    net, _ = twins(Mlp)
    train(compiled(net), net, MODELS["mlp"][1])
    table = report()
    for part in ("Mlp.forward [0/0] forward", "Mlp.forward [0/0] backward"):
        assert part in table
    paths = [placeholder.path for placeholder in plans(made()[0])[0].placeholders]
    assert paths == [
        "l_self_modules_first_parameters_weight_", "l_self_modules_first_parameters_bias_", "l_x_",
        "l_self_modules_second_parameters_weight_", "l_self_modules_second_parameters_bias_",
    ]  # fmt: skip
    backward = [placeholder.path for placeholder in plans(made()[1])[0].placeholders]
    assert "l_x_" in backward
    assert "tangents_1" in backward


def test_explain_and_release() -> None:
    f = compiled(lambda x: x.sin() * 2)
    for seed in range(STEPS):
        f(rand(4, seed=seed))
    (graph,) = made()
    assert explain(graph)(rand(4)).outcome == "record"
    release(graph)
    same(f(rand(4)), rand(4).sin() * 2)
    assert recordings(graph).recordings == 2


def test_graphs_go_with_what_was_compiled() -> None:
    f = compiled(lambda x: x.sin())
    f(rand(4))
    assert len(made()) == 1
    del f
    torch.compiler.reset()
    gc.collect()
    assert made() == []


# -------------------------------------------------------------------------------------------- captured and compiled


def test_a_captured_function_that_calls_a_compiled_one() -> None:
    net, twin = twins(Mlp)
    f = compiled(net)

    @capture
    def step(x: Tensor) -> Tensor:
        return f(x).sin()  # type: ignore[no-any-return]

    with torch.no_grad():
        for seed in range(STEPS + 2):  # the compiler's own state changes in the first calls
            same(step(rand(4, 8, seed=seed)), twin(rand(4, 8, seed=seed)).sin())
    assert recordings(step).replays > 1
    assert only().recordings == 0


def test_a_compiled_function_around_a_captured_one() -> None:
    net, twin = twins(Mlp)
    capture(net)
    f = compiled(lambda x: net(x).sin(), fullgraph=True)
    with torch.no_grad():
        for seed in range(STEPS):
            same(f(rand(4, 8, seed=seed)), twin(rand(4, 8, seed=seed)).sin())
    replayed("inference")
    assert recordings(net).recordings == 0
