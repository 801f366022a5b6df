"""What the function leaves behind needs gradients.

## What it does
Finds results, attributes and written tensors that carry an autograd graph when the body is over. Where results alone
do, or new tensors in places that the body does not read, forward and backward are recorded apart, and this is a remark;
else the function runs eagerly. A backward pass
inside the body that leaves no graph, or only one that it freed, is recorded as part of it.

## Why it matters
The backward pass outside needs tensors that the forward pass inside saved. They are handed out beside the results and
stay until autograd drops them. A graph on anything but new results cannot be cut off like that.

## Example
```python
@capture
def layer(h, x):
    return h.view(-1), x @ h     # a view of an input that needs gradients
```

## Instead
```python
@capture
def layer(h, x):
    return x @ h                 # view h outside

@capture
def step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = loss_of(model(x), y)
    loss.backward()
    optimizer.step()
    return loss                  # the whole step: the backward pass has freed the loss's graph
```

## Fix safety
A step moved into the function as a whole computes what it computed before.
`torch.no_grad()` is safe for inference; under it no gradient reaches the parameters.

## Known gaps
A backward pass frees the graph of a loss that is returned all the same. Replays give it a node of that name, whose
backward pass raises as eager's does; it leads to no parameters, so ``torch.autograd.grad`` with ``allow_unused=True``
gives None for them where eager raises. What was kept by ``retain_graph=True`` is no freed graph.

One finding stands for all operators of the call; the first is named. Gradients of gradients are computed, and calls
are eager from then on; those of the third order of a call that was replayed before that was seen may differ from eager
in the last bit. A parameter's hooks run as in eager, but after all gradients of the function were computed.

The function is one node of the caller's graph, freed and checked as a whole. Where eager's backward pass needs a part
of it alone (some inputs, one of two results that share nothing), a second backward pass, or a write into what another
part saved, may raise here and not in eager. One that raises leaves other gradients behind. A result that another result
is made of has no part in that one's graph: where hooks, `retain_grad` or `torch.autograd.grad` ask for its gradient,
calls to come are eager. A hook that is put on it for the first time after replays sees, in that pass, what comes from
outside only.
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import names_text, op_text, rule
from capture.rules.case import Case


@rule("CG501", "gradient-needed", severity=Severity.EAGER, revision=2)
def RULE(case: Case) -> Iterator[Finding | Decision]:
    uses, obstacles = case.facts.gradients, case.facts.gradient_obstacles
    if not uses:
        return
    paths = dict.fromkeys(use.path for use in uses if use.path)
    begins = [op_text(uses[0].op)] * bool(uses[0].op)
    asked = " for ".join(begins + [names_text(paths, most=2)] * bool(paths))
    what = f"the call leaves an autograd graph{f' (begun by {asked})' if asked else ''}"
    if not obstacles:
        yield RULE.finding(
            what=what,
            why="forward and backward are recorded apart: the backward pass is recorded when it runs",
            where=uses[0].where,
            path=uses[0].path,
            severity=Severity.NOTE,
        )
        return
    yield RULE.finding(
        what=f"{what}, and {obstacles[0].reason}",
        why="so forward and backward cannot be recorded apart",
        fix=(
            "return it detached, where its backward pass is inside: return loss.detach()  (no cost)",
            "capture the whole step, with its backward pass and the optimizer  (no cost)",
            "call it under torch.no_grad() or torch.inference_mode()  (no cost; no gradients)",
            "do what stands in the way outside of the function  (eager there)",
        ),
        where=obstacles[0].where or uses[0].where,
        path=obstacles[0].path or uses[0].path,
    )
