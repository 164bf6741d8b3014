"""Root of the `streammeta` command: all commands by name, each imported when it is called."""

import importlib

import click

COMMANDS = {
    "audit": "streammeta.cli.audit_command:audit",
    "backup": "streammeta.cli.backup_command:backup",
    "certs": "streammeta.cli.certs_command:certs",
    "cluster": "streammeta.cli.cluster_command:cluster",
    "compact": "streammeta.cli.compact_command:compact",
    "config": "streammeta.cli.config_command:config",
    "controller": "streammeta.cli.controller_command:controller",
    "dev": "streammeta.cli.dev_command:dev",
    "features": "streammeta.cli.features_command:features",
    "health": "streammeta.cli.cluster_command:health",
    "node": "streammeta.cli.node_command:node",
    "object": "streammeta.cli.object_command:object_group",
    "profile": "streammeta.cli.profile_command:profile",
    "quorum": "streammeta.cli.quorum_command:quorum",
    "reconcile": "streammeta.cli.reconcile_command:reconcile",
    "restore": "streammeta.cli.restore_command:restore",
    "s3": "streammeta.cli.s3_command:s3",
    "shell": "streammeta.cli.shell_command:shell",
    "snapshot": "streammeta.cli.snapshot_command:snapshot",
    "storage": "streammeta.cli.storage_command:storage",
}


_CONTEXT_SETTINGS = {
    "auto_envvar_prefix": "STREAMMETA",
    "help_option_names": ["-h", "--help"],
}


class LazyGroup(click.Group):
    """A group that imports a command when it is called: Spark and boto3 load slowly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings=_CONTEXT_SETTINGS)
@click.version_option(package_name="streammeta")
def cli() -> None:
    """Metadata controller for streams kept in object storage.

    Every option may also be set in the environment: STREAMMETA_<COMMAND>_<OPTION>.

    \b
    Example:
      streammeta dev --port 9091
      streammeta shell --connect 127.0.0.1:9091 -- ls /streams
    """
