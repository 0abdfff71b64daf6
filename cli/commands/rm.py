"""The command `rm`: delete models from the cache."""

from __future__ import annotations

import click

from qwenimg.cli import streams
from qwenimg.common.base.errors import UsageError


@click.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Delete the models NAME from the Hugging Face cache, as `qwenimg models` lists them: known names, hub ids, or
    OWNER/NAME/FILE for one file.

    It prints what is deleted and what else uses it, and asks. Folders and files outside the cache are never deleted."""
    from qwenimg.cli import config
    from qwenimg.common.base.amounts import size_text
    from qwenimg.common.hub.pull import removal, removing

    chosen = [(name, *removal(name)) for name in dict.fromkeys(names)]
    default = str(config.defaults().get("model") or "")
    for name, what, users in chosen:
        streams.say(f"{name}: {size_text(what.bytes)} in {what.storage}")
        lines = [*users, *what.processes()]
        if what.shared:
            lines.append(f"{size_text(what.shared)} of it have another name elsewhere, and stay there")
        lines += ["config.toml names it as the model to draw with"] if name == default else []
        for line in lines:
            streams.say(f"  {line}")
    if not yes and not streams.can_ask():
        raise UsageError("rm asks before it deletes, and this is no terminal: give --yes")
    if not yes and not streams.confirm("delete this? other programs that use the cache lose it too", default=False):
        streams.say("nothing is deleted")
        return
    for _, what, _ in chosen:
        removing(what)
    streams.say(f"freed {size_text(sum(what.bytes for _, what, _ in chosen))}")
