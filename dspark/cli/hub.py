"""`dspark hub push`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from dspark.cli.common import Json, finish
from dspark.errors import ConfigError

__all__ = ["register"]


def _push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Exported draft.")],
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository of the hub.")],
    card: Annotated[
        bool, typer.Option("--card", help="Write a new card in place of the directory's.")
    ] = False,
    evaluations: Annotated[
        list[Path] | None,
        typer.Option(
            "--eval", help="For its table: what `dspark eval --json` printed; repeatable."
        ),
    ] = None,
    licence: Annotated[str | None, typer.Option(help="For it: SPDX id.")] = None,
    target: Annotated[
        str | None, typer.Option(help="For it: the target's name on the hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a private repository.")] = False,
    branch: Annotated[
        str, typer.Option("--branch", "--revision", help="Made where it is missing.")
    ] = "main",
    message: Annotated[str | None, typer.Option(help="Of the commit.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show files and card; needs no network, no token.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Upload an exported draft with its card, in one commit; the token is read from HF_TOKEN.

    Example: dspark hub push outputs/draft me/my-draft --card --eval eval.json --dry-run
    """
    from dspark.export.hub import check_access, check_branch, push
    from dspark.export.package import Card, package

    for option, value in (("--eval", evaluations), ("--licence", licence), ("--target", target)):
        if value and not card:
            raise ConfigError(f"{option} is for a new card: give --card too")
    check_branch(branch)
    token = "" if dry_run else check_access(os.environ.get("HF_TOKEN"))
    new = Card(evaluations=evaluations or (), licence=licence, target=target) if card else None
    packed = package(directory, repo_id, new)
    for item in packed.items:
        print(f"{item.sha256}  {item.num_bytes:>14,}  {item.path}")
    print(f"{len(packed.items)} files, {packed.num_bytes:,} bytes, to {repo_id}, branch {branch}")
    if packed.left_out:
        print(f"not uploaded, since no export has written them: {', '.join(packed.left_out)}")
    report = {
        "repo_id": repo_id,
        "branch": branch,
        "private": private,
        "dry_run": dry_run,
        "files": [item.summary() for item in packed.items],
        "total_bytes": packed.num_bytes,
        "left_out": list(packed.left_out),
        "card": packed.card,
    }
    if dry_run:
        print(f"\n{packed.card}")
    else:
        done = push(packed, repo_id, token=token, private=private, branch=branch, message=message)
        if done["removed"]:
            print(f"removed there, as weights of another draft: {', '.join(done['removed'])}")
        print(f"uploaded: {done['url']}")
        report |= done
    finish(report, as_json)


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    hub = typer.Typer(help="Share a draft on the Hugging Face hub.", no_args_is_help=True)
    # a callback keeps a group of one command a group
    hub.callback()(lambda: None)
    hub.command("push")(_push)
    app.add_typer(hub, name="hub")
