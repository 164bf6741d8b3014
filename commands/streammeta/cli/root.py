"""Root of the `streammeta` command: all commands by name, each imported on its first call."""

import importlib
from typing import NamedTuple

import click


class Entry(NamedTuple):
    """Command of the root."""

    place: str
    """Module and name of the command."""
    summary: str
    """First sentence of the help."""


COMMANDS = {
    "audit": Entry(
        "streammeta.cli.security.audit_command:audit",
        "Verify and search the audit logs that controllers write.",
    ),
    "backup": Entry(
        "streammeta.cli.recovery.backup_command:backup",
        "Manage the backups that controllers write with --backup-store.",
    ),
    "certs": Entry(
        "streammeta.cli.security.certs_command:certs",
        "Create certificates for controllers, brokers and users, and show existing ones.",
    ),
    "check": Entry(
        "streammeta.cli.quorum.check_command:check",
        "Test a running cluster for a few seconds and remove all test data.",
    ),
    "cluster": Entry(
        "streammeta.cli.quorum.cluster_command:cluster", "Show all members of a cluster at once."
    ),
    "compact": Entry(
        "streammeta.cli.brokers.compact_command:compact",
        "Merge many small stream set objects into few large ones, or show the savings.",
    ),
    "completion": Entry(
        "streammeta.cli.completion_command:completion",
        "Print the script that lets a shell complete commands, options and their values.",
    ),
    "config": Entry(
        "streammeta.cli.controller.controller_command:config", "Show the settings of a controller."
    ),
    "controller": Entry(
        "streammeta.cli.controller.controller_command:controller",
        "Run one controller of a cluster.",
    ),
    "dev": Entry(
        "streammeta.cli.local.dev_command:dev",
        "Run three controllers and a local-directory store until Ctrl-C.",
    ),
    "features": Entry(
        "streammeta.cli.quorum.features_command:features",
        "Show and change the feature level of the cluster's log and checkpoints.",
    ),
    "health": Entry(
        "streammeta.cli.quorum.cluster_command:health",
        "Exit 0 if a controller is healthy, 1 if not.",
    ),
    "kafka": Entry(
        "streammeta.cli.brokers.kafka_command:kafka",
        "Run a broker for Kafka clients, until Ctrl-C.",
    ),
    "kafka-user": Entry(
        "streammeta.cli.brokers.kafka_command:kafka_user",
        "Print the line for NAME in a file of users (--users).",
    ),
    "node": Entry(
        "streammeta.cli.brokers.node_command:node",
        "Show brokers, and clean up after departed ones.",
    ),
    "object": Entry(
        "streammeta.cli.inspection.object_command:object_group", "Inspect objects of the store."
    ),
    "profile": Entry(
        "streammeta.cli.profile_command:profile", "Show the profiles that commands connect with."
    ),
    "quorum": Entry(
        "streammeta.cli.quorum.quorum_command:quorum", "Show and change the voters and the leader."
    ),
    "reconcile": Entry(
        "streammeta.cli.reconcile.reconcile_command:reconcile",
        "Compare the bucket with the metadata, and delete orphans.",
    ),
    "recover": Entry(
        "streammeta.cli.recovery.recover_command:recover",
        "Recover from one survivor when the disks of a majority are lost.",
    ),
    "restore": Entry(
        "streammeta.cli.recovery.restore_command:restore",
        "Create a new cluster from a backup, when the controllers of the old one are lost.",
    ),
    "s3": Entry(
        "streammeta.cli.inspection.s3_command:s3",
        "Format the address of a bucket, and check that its server is suitable.",
    ),
    "shell": Entry(
        "streammeta.cli.inspection.shell_command:shell",
        "Browse the metadata of a running cluster, or of files, as a tree of files.",
    ),
    "snapshot": Entry(
        "streammeta.cli.recovery.snapshot_command:snapshot",
        "Inspect checkpoint files and copies of the metadata, and export them.",
    ),
    "storage": Entry(
        "streammeta.cli.controller.storage_command:storage",
        "Format a controller's data directory, and inspect a stopped controller's directory.",
    ),
    "version": Entry(
        "streammeta.cli.version_command:version",
        "Show the version, its feature levels and its platform.",
    ),
}


_CONTEXT_SETTINGS = {
    "auto_envvar_prefix": "STREAMMETA",
    "help_option_names": ["-h", "--help"],
    "show_default": True,
}


class LazyGroup(click.Group):
    """Group that imports a command on its first call, because Spark and boto3 load slowly."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, sorted."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None if the name is unknown."""
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].place.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        listed = {name: click.Command(name, help=entry.summary) for name, entry in COMMANDS.items()}
        click.Group(commands=listed).format_commands(ctx, formatter)


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
