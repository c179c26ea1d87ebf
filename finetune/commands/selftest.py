"""`finetune selftest`."""

from __future__ import annotations

import typer

from finetune.commands.options import JsonOption
from finetune.console import Console
from finetune.errors import GateStopped
from finetune.process import prepare_process


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(selftest)


def selftest(is_json: JsonOption = False) -> None:
    """Check packed attention on this machine: packed = separate on every backend."""
    prepare_process(needs_hub=False)
    from finetune.selftest import SelftestResult, run_selftest

    console = Console(is_json=is_json)

    def say(result: SelftestResult) -> None:
        mark = {"ok": "ok      ", "wrong": "WRONG   ", "not here": "not here"}[result.status]
        style = {"ok": "green", "wrong": "bold red", "not here": "dim"}[result.status]
        console.line(f"{mark} {result.backend:<9}{result.model:<18}{result.detail}", style=style)

    device, results = run_selftest(say=say)
    if wrong := [result for result in results if result.status == "wrong"]:
        raise GateStopped(
            f"{len(wrong)} of {len(results)} checks failed, such as {wrong[0].backend} with {wrong[0].model}: "
            f"{wrong[0].detail}",
            place=device,
            remedy="Set model.attention to a backend that is ok above, and please report this with the lines above.",
        )
    console.result({"device": device, "results": [result.as_dict() for result in results]})
