"""The rules, in one literal tuple.

Stage: between facts and the plan. In: ``Case``. Out: findings and decisions. No torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import warnings

from capture._annotate import suggestion
from capture.rules._rule import Rule, rule
from capture.rules.cg101_static_address_moved import RULE as CG101
from capture.rules.cg102_input_mutated import RULE as CG102
from capture.rules.cg103_inputs_alias import RULE as CG103
from capture.rules.cg104_static_name_unmatched import RULE as CG104
from capture.rules.cg105_implicit_input import RULE as CG105
from capture.rules.cg106_unknown_container import RULE as CG106
from capture.rules.cg107_unsupported_subclass import RULE as CG107
from capture.rules.cg108_plain_argument import RULE as CG108
from capture.rules.cg109_binding_refused import RULE as CG109
from capture.rules.cg110_unkeyed_read import RULE as CG110
from capture.rules.cg201_host_sync import RULE as CG201
from capture.rules.cg202_host_work import RULE as CG202
from capture.rules.cg203_several_devices import RULE as CG203
from capture.rules.cg204_python_state_changed import RULE as CG204
from capture.rules.cg205_python_value_drifts import RULE as CG205
from capture.rules.cg206_operators_differ import RULE as CG206
from capture.rules.cg207_unseen_kernel import RULE as CG207
from capture.rules.cg301_random_draws import RULE as CG301
from capture.rules.cg401_escaped_tensor import RULE as CG401
from capture.rules.cg402_tensor_effect import RULE as CG402
from capture.rules.cg403_output_aliases_input import RULE as CG403
from capture.rules.cg404_borrowed_output_used import RULE as CG404
from capture.rules.cg501_gradient_needed import RULE as CG501
from capture.rules.cg502_gradient_of_argument import RULE as CG502
from capture.rules.cg601_data_dependent_shape import RULE as CG601
from capture.rules.cg701_ranks_disagree import RULE as CG701
from capture.rules.cg702_collective_not_recorded import RULE as CG702
from capture.rules.cg703_collective_not_verified import RULE as CG703
from capture.rules.cg704_segments_not_registered import RULE as CG704
from capture.rules.cg801_nested_capture import RULE as CG801
from capture.rules.cg802_no_backend import RULE as CG802
from capture.rules.cg803_separate_pools import RULE as CG803
from capture.rules.cg804_graphs_not_patched import RULE as CG804
from capture.rules.cg805_foreign_surroundings import RULE as CG805
from capture.rules.cg806_package_entry_point import RULE as CG806
from capture.rules.cg901_recording_limit import RULE as CG901
from capture.rules.cg902_recording_does_not_pay import RULE as CG902
from capture.rules.cg903_replay_differs import RULE as CG903
from capture.rules.cg904_recording_refused import RULE as CG904

__all__ = ["RULES", "Rule", "all_rules", "rule", "rule_by_code", "rules_revision"]

RULES: tuple[Rule, ...] = (
    CG101,
    CG102,
    CG103,
    CG104,
    CG105,
    CG106,
    CG107,
    CG108,
    CG109,
    CG110,
    CG201,
    CG202,
    CG203,
    CG204,
    CG205,
    CG206,
    CG207,
    CG301,
    CG401,
    CG402,
    CG403,
    CG404,
    CG501,
    CG502,
    CG601,
    CG701,
    CG702,
    CG703,
    CG704,
    CG801,
    CG802,
    CG803,
    CG804,
    CG805,
    CG806,
    CG901,
    CG902,
    CG903,
    CG904,
)
"""The built-in rules, by code."""

ENTRY_POINTS = "capture.rules"


@functools.cache
def all_rules() -> tuple[Rule, ...]:
    """The built-in rules and those of installed packages, by code.

    A package adds one by an entry point in the group ``capture.rules`` that names a ``Rule``. One that cannot be
    loaded, is no rule or takes a code already in use gets a ``RuntimeWarning`` and is left out. Loaded once a process.
    """
    rules = {each.code: each for each in RULES}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        try:
            extra = entry.load()
        except Exception as error:  # noqa: BLE001 - the code of others may raise anything
            _ignored(entry.name, f"{type(error).__name__}: {error}")
            continue
        if not isinstance(extra, Rule):
            _ignored(entry.name, f"{entry.value} is a {type(extra).__name__}, no Rule")
        elif extra.code in rules:
            _ignored(entry.name, f"{extra.code} is taken by {rules[extra.code].name}")
        else:
            rules[extra.code] = extra
    return tuple(sorted(rules.values(), key=lambda each: each.code))


def _ignored(name: str, reason: str) -> None:
    warnings.warn(f"rule {name!r} of group {ENTRY_POINTS!r} is ignored: {reason}", RuntimeWarning, stacklevel=3)


def rule_by_code(code: str) -> Rule:
    """The rule with this code, in any case of letters; ``LookupError`` names the nearest one."""
    rules = {each.code: each for each in all_rules()}
    found = rules.get(code.upper())
    if found is None:
        raise LookupError(f"there is no rule {code!r}{suggestion(code.upper(), rules)}")
    return found


def rules_revision() -> str:
    """A hash (16 hex digits) over code and revision of all rules; plans made under another one are stale."""
    text = "\n".join(f"{each.code} {each.revision}" for each in all_rules())
    return hashlib.sha256(text.encode()).hexdigest()[:16]
