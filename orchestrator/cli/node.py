"""The command `headway node watch`."""

from typing import Annotated

import typer

node_app = typer.Typer(help="Watch a node of a cluster.", no_args_is_help=True, rich_markup_mode=None)

_METADATA_URL = "http://169.254.169.254"


@node_app.callback()
def _node() -> None:
    """Keep `watch` a subcommand, although it is the only one."""


@node_app.command("watch")
def watch(
    cloud: Annotated[str, typer.Option(help="auto, aws, gcp, azure or none.")] = "auto",
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="Ray cluster; default: this machine's.")] = "auto",
    node_id: Annotated[str | None, typer.Option(help="Ray node; default: this machine's.")] = None,
    grace: Annotated[str, typer.Option(metavar="DURATION", help="After SIGTERM, time until the machine goes.")] = "90s",
    rebalance: Annotated[bool, typer.Option("--rebalance", help="Drain on EC2 rebalance recommendations.")] = False,
    metadata_url: Annotated[str, typer.Option(help="Address of the metadata service.")] = _METADATA_URL,
) -> None:
    """Drain this Ray node when its machine is to be taken away.

    Run it beside `ray start` on each worker node. It asks the cloud's metadata
    service for a notice, or waits for SIGTERM; the run then saves a checkpoint
    and leaves the node before the deadline.
    """
    from headway.trainer.errors import ConfigError
    from headway.trainer.loop.progress import Duration

    from ..cluster.node_watch import WatchOptions, watch_node

    left = Duration.parse(grace)
    if left.unit != "seconds":
        raise ConfigError(f"--grace must be a time such as 90s, got {grace!r}")
    watch_node(
        WatchOptions(
            cloud=cloud, address=address, node_id=node_id, grace_s=left.amount, rebalance=rebalance,
            metadata_url=metadata_url,
        )
    )  # fmt: skip
