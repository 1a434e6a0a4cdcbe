"""The dataclasses of a training command, as tests ask for them."""

from collections.abc import Sequence

from trl import ModelConfig

from adora_vl.config import AdoraGRPOConfig, AdoraScriptArguments
from adora_vl.config.command import parse_command
from adora_vl.config.schema import Configs, build_configs
from adora_vl.utils.errors import UserError

CONFIG_DATACLASSES = (AdoraScriptArguments, AdoraGRPOConfig, ModelConfig)


def parse(arguments: Sequence[str]) -> Configs:
    """Build the dataclasses of a training command, whose model is `tiny` where it names none."""
    try:
        cli_args = parse_command(arguments)
    except UserError as error:
        if "model_name_or_path: not set" not in str(error):
            raise
        cli_args = parse_command([*arguments, "--model_name_or_path", "tiny"])
    return build_configs(cli_args)
