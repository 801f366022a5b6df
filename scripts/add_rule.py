"""Make a rule: its file in ``capture/rules/`` and the file of its cases in ``tests/rules/cases/``.

    python scripts/add_rule.py ragged-batch --code CG111 --severity eager

Both files run at once. What only you can say is left as ``<<...>>``, and the tests fail until no such blank is left:
first write the page and the check, then the cases, then ``make golden``, and read the message that it wrote.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SEVERITIES = ("note", "copy", "eager", "error")

RULE = '''"""<<One line, with a full stop: what the rule has found when it speaks.>>

## What it does
<<Which facts it looks at, and what it decides or remarks.>>

## Why it matters
<<What a recording would get wrong, or what it costs.>>

## Example
```python
@capture
def step(x):
    return x + 1
```

## Instead
```python
@capture
def step(x):
    return x + 2
```

## Fix safety
<<Whether the values stay the same with the fix, and what it costs.>>

## Known gaps
<<What the rule does not see.>>
"""

from __future__ import annotations

from collections.abc import Iterator

from capture.core.findings import Decision, Finding, Severity
from capture.rules._rule import rule
from capture.rules.case import Case


@rule("{code}", "{name}", severity=Severity.{severity}{decides})
def RULE(case: Case) -> Iterator[Finding | Decision]:
    if case.facts.num_ops == 123456:  # <<the condition, on fields of capture/core/facts.py>>
        yield RULE.finding(
            what="<<one clause in the user's words>>",
            why="<<one clause>>",
            fix=("<<the cheapest way out>>  (<<its cost>>)",),
            where=case.facts.defined_at,
        )
'''

CASES = '''"""Cases in which {code} fires, and near misses in which it does not."""

from __future__ import annotations

from capture.rules.case import Case
from tests.support.samples import case

# <<Facts on which the rule has to speak; all messages go into its golden file.>>
FIRES: list[Case] = [case(num_ops=123456)]
# <<Facts that are nearly the same, on which it must not speak.>>
NEAR_MISSES: list[Case] = [case(num_ops=123457)]
'''


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help='reads after "allow ...": lower case, words joined by "-"')
    parser.add_argument("--code", required=True, help="CG and three digits; CONTRIBUTING.md names the ranges")
    parser.add_argument("--severity", required=True, choices=SEVERITIES, help="eager and above: no recording")
    given = parser.parse_args(arguments)
    stem = f"{given.code}_{given.name}".lower().replace("-", "_")
    refused = refusal(given.code, given.name)
    if refused:
        parser.error(refused)
    # A rule that only remarks leaves existing plans in use; it says so, and a decision of it is refused.
    decides = ", decides=False" if given.severity in ("note", "copy") else ""
    rule = RULE.format(code=given.code, name=given.name, severity=given.severity.upper(), decides=decides)
    for folder, text in (("capture/rules", rule), ("tests/rules/cases", CASES.format(code=given.code))):
        path = ROOT / folder / f"{stem}.py"
        path.write_text(text, encoding="utf-8")
        print(f"made {path.relative_to(ROOT)}")
    print("fill in every <<...>> of both, then: make golden, and read what it wrote")
    return 0


def refusal(code: str, name: str) -> str | None:
    """Why such a rule cannot be added, or None."""
    if not re.fullmatch(r"CG\d{3}", code):
        return f"{code!r} is no code: CG and three digits"
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        return f'{name!r} is no name: lower case, words joined by "-"'
    for path in (ROOT / "capture" / "rules").glob("cg*.py"):
        taken, _, called = path.stem.partition("_")
        if taken == code.lower() or called == name.replace("-", "_"):
            return f"{path.name} has that {'code' if taken == code.lower() else 'name'}"
    return None


if __name__ == "__main__":
    sys.exit(main())
