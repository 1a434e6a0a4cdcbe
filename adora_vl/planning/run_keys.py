"""The keys of a planned run: those that the user changed, and all of them for `--write-config`."""

from collections.abc import Iterator
from dataclasses import Field, fields
from typing import Any, NamedTuple

import yaml

from adora_vl.planning.plan import DryRunPlan
from adora_vl.utils.cli import to_json_types
from adora_vl.utils.convert import field_default
from adora_vl.utils.secrets import without_secrets


class KeyValue(NamedTuple):
    """One key of a run's configuration.

    `field`: the dataclass field that declares it. `value`: its value in the types of YAML and JSON,
    if it has such a form. `is_default`: whether it is the field's default.
    """

    field: Field[Any]
    value: Any
    is_default: bool


def _key_values(plan: DryRunPlan) -> Iterator[KeyValue]:
    """Yield all keys of a run, in the order in which the three config dataclasses declare them."""
    for arguments in (plan.script_args, plan.run.config, plan.run.request.model.model_args):
        for field in fields(arguments):
            value = getattr(arguments, field.name)
            # A member of an enumeration is written by its value.
            yaml_value = to_json_types(getattr(value, "value", value))
            yield KeyValue(field=field, value=yaml_value, is_default=value == field_default(field))


def changed_keys(plan: DryRunPlan) -> dict[str, Any]:
    """Return the values of the keys that the user set to something else than the default.

    Secrets are masked.
    """
    value_by_key: dict[str, Any] = {}
    set_keys = plan.command.set_keys
    for key in _key_values(plan):
        if key.field.name in set_keys and not key.is_default:
            value_by_key[key.field.name] = key.value
    return dict(without_secrets(value_by_key))


def resolve_keys(plan: DryRunPlan) -> dict[str, Any]:
    """Return all keys of a run for `--write-config`, so that `--config` reads the same run again.

    Keys that the user has changed come first, then keys with their defaults. Keys that Transformers
    or TRL derive from other keys are left out, since the libraries would not accept their values.
    """
    value_by_key = changed_keys(plan)
    for key in _key_values(plan):
        # The keys that the user has changed are there already. Of the others a key is derived if it
        # is no argument of `__init__`, or if it has another value than its default.
        is_derived = not (key.field.init and key.is_default)
        if not is_derived:
            value_by_key.setdefault(key.field.name, key.value)
    values_to_write: dict[str, Any] = {}
    for name, value in value_by_key.items():
        # A key that is null has no line, unless the user set it to null.
        has_line = value is not None or name in plan.command.set_keys
        if has_line and _is_plain_yaml(value):
            values_to_write[name] = value
    return values_to_write


def _is_plain_yaml(value: object) -> bool:
    """Return whether YAML can write a value without a tag that only Python reads."""
    try:
        yaml.safe_dump(value)
    except yaml.YAMLError:
        return False
    return True
