"""Root of the `streammeta` command: all commands by name, each imported when it is called."""

import importlib
from typing import NamedTuple

import click


class Entry(NamedTuple):
    """A command of the root."""

    place: str
    """Its module and its name there."""
    summary: str
    """First sentence of its help."""


COMMANDS = {
    "audit": Entry(
        "streammeta.cli.security.audit_command:audit",
        "Verify and search the audit logs that controllers write.",
    ),
    "backup": Entry(
        "streammeta.cli.recovery.backup_command:backup",
        "Look after the backups that controllers make with --backup-store.",
    ),
    "certs": Entry(
        "streammeta.cli.security.certs_command:certs",
        "Make certificates for controllers, brokers and users, and look at those there are.",
    ),
    "check": Entry(
        "streammeta.cli.quorum.check_command:check",
        "Try a running cluster for a few seconds; nothing is left behind.",
    ),
    "cluster": Entry(
        "streammeta.cli.quorum.cluster_command:cluster", "Look at all members of a cluster at once."
    ),
    "compact": Entry(
        "streammeta.cli.brokers.compact_command:compact",
        "Merge many small set objects into few large ones, or show what that would save.",
    ),
    "completion": Entry(
        "streammeta.cli.completion_command:completion",
        "Print the script that makes a shell complete commands, options and their values.",
    ),
    "config": Entry(
        "streammeta.cli.controller.config_command:config", "Look at the settings of a controller."
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
        "Show and change the feature level: what the cluster's log and checkpoints may hold.",
    ),
    "health": Entry(
        "streammeta.cli.quorum.cluster_command:health",
        "Exit 0 if a controller is healthy, 1 if not.",
    ),
    "kafka": Entry(
        "streammeta.cli.brokers.kafka_command:kafka",
        "Run a broker that Kafka's clients accept, until Ctrl-C.",
    ),
    "kafka-user": Entry(
        "streammeta.cli.brokers.kafka_command:kafka_user",
        "Make the line of a file of users (--users) for NAME.",
    ),
    "node": Entry(
        "streammeta.cli.brokers.node_command:node",
        "Look at brokers, and settle what one has left behind.",
    ),
    "object": Entry(
        "streammeta.cli.inspection.object_command:object_group", "Look into objects of the store."
    ),
    "profile": Entry(
        "streammeta.cli.profile_command:profile", "Show the profiles that commands connect by."
    ),
    "quorum": Entry(
        "streammeta.cli.quorum.quorum_command:quorum", "Show and change the voters and the leader."
    ),
    "reconcile": Entry(
        "streammeta.cli.reconcile.reconcile_command:reconcile",
        "Compare the bucket with the map, and delete what the map has forgotten.",
    ),
    "recover": Entry(
        "streammeta.cli.recovery.recover_command:recover",
        "Go on from one survivor when the disks of a majority are lost for good.",
    ),
    "restore": Entry(
        "streammeta.cli.recovery.restore_command:restore",
        "Make a new cluster from a backup, when the controllers of the old one are lost.",
    ),
    "s3": Entry(
        "streammeta.cli.inspection.s3_command:s3",
        "Write the address of a bucket, and check that its server can be built upon.",
    ),
    "shell": Entry(
        "streammeta.cli.inspection.shell_command:shell",
        "Walk the map of a running cluster, or one in files, as a tree of files.",
    ),
    "snapshot": Entry(
        "streammeta.cli.recovery.snapshot_command:snapshot",
        "Look into checkpoint files and copies of the map, and export them.",
    ),
    "storage": Entry(
        "streammeta.cli.controller.storage_command:storage",
        "Format a controller's data directory, and look into that of a stopped controller.",
    ),
    "version": Entry(
        "streammeta.cli.version_command:version",
        "Show the version, the feature levels that it can run at, and what it runs on.",
    ),
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
