"""The form of a rule: one pure function and its page of documentation, made into a frozen ``Rule``.

Stage: used by the files beside it and by rules of other packages. In: a check and its module's docstring. Out:
``Rule``. No torch.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from capture.core.data import frozen
from capture.core.facts import CodeLocation, PlaceholderInfo
from capture.core.findings import Decision, Finding, Policy, Severity
from capture.rules.case import Case

HEADINGS = ("What it does", "Why it matters", "Example", "Instead", "Fix safety", "Known gaps")
"""Every rule's page has these, in this order."""

Check = Callable[[Case], Iterator[Finding | Decision]]


@frozen(kw_only=True, eq=False)
class Rule:
    """A stable code, a name that reads after "allow ...", a documentation page and a pure check."""

    code: str
    name: str
    severity: Severity
    """The usual severity; a finding may have another one."""
    since: str
    revision: int
    """A number that rises when the rule decides otherwise on the same facts, so that cached plans are made again."""
    decides: bool
    """Whether it may change what a plan does, by a decision or by a finding of ``EAGER`` or above. If not, it only
    remarks, and plans that were made without it stay good."""
    summary: str
    doc: str
    """The whole page: summary, then one section a heading."""
    headings: Mapping[str, str]
    check: Check

    def finding(
        self,
        *,
        what: str,
        why: str,
        fix: Iterable[str] = (),
        where: CodeLocation | None = None,
        path: str | None = None,
        severity: Severity | None = None,
    ) -> Finding:
        """A finding of this rule, of its usual severity if none is given."""
        return Finding(
            code=self.code,
            name=self.name,
            severity=self.severity if severity is None else severity,
            what=what,
            why=why,
            fix=tuple(fix),
            where=where,
            path=path,
        )

    def decision(self, path: str, policy: Policy, reason: str) -> Decision:
        """The placeholder at ``path`` needs at least ``policy``."""
        return Decision(field=f"policy:{path}", value=policy, code=self.code, reason=reason)


def rule(
    code: str, name: str, *, severity: Severity, since: str = "0.1", revision: int = 1, decides: bool = True
) -> Callable[[Check], Rule]:
    """Turn a check and the docstring of its module into a ``Rule``. The fields of ``Rule`` say what the options mean.

    Raises ``TypeError`` if the module's docstring lacks a heading, has one too many, or has them in another order.
    """

    def make(check: Check) -> Rule:
        doc = inspect.cleandoc(check.__globals__["__doc__"] or "")
        headings = _sections(doc)
        if tuple(headings) != HEADINGS or not all(headings.values()):
            raise TypeError(f"the docstring of rule {code} needs text under each of: {', '.join(HEADINGS)}")
        return Rule(
            code=code,
            name=name,
            severity=severity,
            since=since,
            revision=revision,
            decides=decides,
            summary=doc.split("\n", 1)[0],
            doc=doc,
            headings=headings,
            check=check,
        )

    return make


def _sections(doc: str) -> dict[str, str]:
    parts = f"\n{doc}".split("\n## ")[1:]
    titled = (part.partition("\n") for part in parts)
    return {title.strip(): text.strip() for title, _, text in titled}


def short_op(op: str) -> str:
    """``"aten.mul.Tensor"`` -> ``"mul"``, ``"Tensor.tolist"`` -> ``"tolist"``."""
    parts = op.replace("::", ".").split(".")
    return parts[-1] if len(parts) < 3 else parts[1]


def op_text(op: str) -> str:
    """An operator as users know it: ``"aten.add_.Tensor"`` -> ``"`add_`"``. What is no operator's name stays."""
    is_operator = op.startswith("aten") or op.count(".") == 2 or "::" in op
    return f"`{_FAMILIAR.get(short_op(op), short_op(op))}`" if is_operator and " " not in op else op


_FAMILIAR = {
    "_to_copy": "to",
    "index": "x[mask]",
    "index_put": "x[mask] = y",
    "index_put_": "x[mask] = y",
    "lift_fresh": "torch.tensor` or `torch.from_numpy",
    "_softmax": "softmax",
    "_unique2": "unique",
    "addmm": "linear",
    "t": "linear",
}
"""Operators of ATen that users write in another way."""


def names_text(paths: Iterable[str], most: int = 3) -> str:
    """``"'a', 'b' and 2 more"``."""
    quoted = [repr(path) for path in paths]
    shown, rest = quoted[:most], len(quoted) - most
    if rest > 0:
        return f"{', '.join(shown)} and {rest} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def accelerators(devices: Iterable[str]) -> tuple[str, ...]:
    """The devices that run kernels of their own, sorted."""
    return tuple(sorted({device for device in devices if device.split(":")[0] not in ("cpu", "meta")}))


NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")
"""A number, as a key's part is shown."""
SIZES = re.compile(r"\w+\[[\d, ]*\].*|strides .*")
"""A tensor's dtype, shape and device, or its strides, as a key's part is shown."""
SETTING = re.compile(r"(\w+) of (\w+)")
"""A setting of an optimizer, as a key's part is named: ``lr of SGD``."""


def tensor_setting(setting: str, optimizer: str) -> str:
    """The fix for a setting of an optimizer that changes while the function is in use."""
    if setting != "lr":
        return f"keep {setting} of {optimizer} as it is, or leave the optimizer out of the captured function  (no cost)"
    return (
        f"make the rate a tensor, which schedulers write to: {optimizer}(..., lr=torch.tensor(0.1), fused=True);"
        " on a GPU a tensor there, and capturable=True  (no cost)"
    )


BIND_BYTES = 1 << 20
"""Arguments from this size on are bound by default. A copy of 1 MiB takes an H200 about as long as the host needs to
point a kernel or two elsewhere (1 to 2 us each, ``benchmarks/results/gpu_rebind.json``); below it one batched copy of
all inputs is the cheaper way, which needs nothing to be learned of a graph."""


def is_bound(case: Case, info: PlaceholderInfo) -> bool:
    """Whether the annotation lets this argument be read where the caller keeps it, wherever that is: on the device
    that the kernels run on, in memory that is no other argument's. A body that communicates cannot be compared with
    eager."""
    wanted = case.annotation.inputs
    if info.kind != "argument" or info.static or info.tensor.layout != "strided":
        return False
    others = [
        placeholder
        for placeholder in case.facts.placeholders
        if placeholder.kind == "argument" and placeholder is not info
    ]
    if info.alias_group is not None and any(placeholder.alias_group == info.alias_group for placeholder in others):
        return False
    if wanted == "copy" or info.tensor.nbytes < (BIND_BYTES if wanted == "auto" else 1):
        return False
    if case.facts.collectives:
        return False
    devices = accelerators(placeholder.tensor.device for placeholder in case.facts.placeholders)
    return not devices or devices == (info.tensor.device,)
